//go:build e2e

package clientgo

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// TestKubelets connects to each kubelet: its certificate is signed by the cluster
// for the node's name and address, and it refuses clients without a certificate.
func TestKubelets(t *testing.T) {
	c := connect(t, "kubelets")
	nodes, err := c.client.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(c.config.CAData) {
		t.Fatal("the kubeconfig has no authority")
	}
	for _, n := range nodes.Items {
		for _, name := range []string{n.Name, address(n)} {
			if code, err := anonymous(t.Context(), n, &tls.Config{RootCAs: roots, ServerName: name}); err != nil || code != http.StatusUnauthorized {
				t.Errorf("the kubelet of %s, called %s, answers an anonymous client with %d, %v", n.Name, name, code, err)
			}
		}
		var other x509.HostnameError
		if _, err := anonymous(t.Context(), n, &tls.Config{RootCAs: roots, ServerName: "other"}); !errors.As(err, &other) {
			t.Errorf("the kubelet of %s, called by another's name: %v", n.Name, err)
		}
	}
}

// anonymous requests a kubelet's pods, without a certificate.
func anonymous(ctx context.Context, n corev1.Node, trust *tls.Config) (int, error) {
	client := &http.Client{Timeout: requestTimeout, Transport: &http.Transport{TLSClientConfig: trust, DisableKeepAlives: true}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+net.JoinHostPort(address(n), fmt.Sprint(n.Status.DaemonEndpoints.KubeletEndpoint.Port))+"/pods", nil)
	if err != nil {
		return 0, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode, err
}

// TestDrain drains a node through the eviction API. A disruption budget forbids
// that at first.
func TestDrain(t *testing.T) {
	c := connect(t, "drain")
	pods := c.deploy(2)
	node := pods[0].Spec.NodeName
	all := intstr.FromInt32(2)
	budget := &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec:       policyv1.PodDisruptionBudgetSpec{MinAvailable: &all, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}},
	}
	budgets := c.client.PolicyV1().PodDisruptionBudgets(c.space)
	if _, err := budgets.Create(t.Context(), budget, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	c.cordon(node, true)
	defer c.cordon(node, false)
	c.eventually(knownBudget, "the budget is counted, and forbids the drain", func(ctx context.Context) error {
		b, err := budgets.Get(ctx, "web", metav1.GetOptions{})
		if err == nil && (b.Status.CurrentHealthy != 2 || b.Status.ObservedGeneration != b.Generation) {
			err = fmt.Errorf("it has counted %d", b.Status.CurrentHealthy)
		}
		return err
	})
	if err := c.evict(t.Context(), pods[0].Name); !apierrors.IsTooManyRequests(err) || !strings.Contains(err.Error(), "disruption budget") {
		t.Fatalf("an eviction against the budget: %v", err)
	}
	if p, err := c.client.CoreV1().Pods(c.space).Get(t.Context(), pods[0].Name, metav1.GetOptions{}); err != nil || p.DeletionTimestamp != nil {
		t.Fatalf("the pod is gone in spite of its budget: %v", err)
	}

	if err := budgets.Delete(t.Context(), "web", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	c.eventually(knownBudget, "the pod is evicted", func(ctx context.Context) error { return c.evict(ctx, pods[0].Name) })
	c.moved(node)
}

// moved waits until two pods are ready, and none is on a node.
func (c *cluster) moved(from string) {
	c.t.Helper()
	c.eventually(replaceBudget, "both pods are elsewhere", func(ctx context.Context) error {
		found, err := c.pods(ctx, "web")
		if err != nil {
			return err
		}
		n := 0
		for _, p := range found {
			if p.Spec.NodeName == from {
				return fmt.Errorf("%s is there still", p.Name)
			}
			if isReady(p) {
				n++
			}
		}
		if n != 2 {
			return fmt.Errorf("%d are ready", n)
		}
		return nil
	})
}

func (c *cluster) evict(ctx context.Context, pod string) error {
	return c.client.CoreV1().Pods(c.space).EvictV1(ctx, &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: pod}})
}

func (c *cluster) cordon(node string, on bool) {
	c.t.Helper()
	patch, err := json.Marshal(map[string]any{"spec": map[string]any{"unschedulable": on}})
	if err != nil {
		c.t.Fatal(err)
	}
	// This also runs at the end of a test, when its context has ended.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.t.Context()), requestTimeout)
	defer cancel()
	if _, err := c.client.CoreV1().Nodes().Patch(ctx, node, types.StrategicMergePatchType, patch, metav1.PatchOptions{}); err != nil {
		c.t.Error(err)
	}
}
