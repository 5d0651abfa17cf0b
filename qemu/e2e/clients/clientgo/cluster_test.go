//go:build e2e

// Package clientgo uses a cluster with Kubernetes' own client library, like a
// user's program. Garboard's module must not depend on that library, so this
// package is a separate module. The tests of the parent folder build it and run
// it on a machine in the nodes' network. Its parameters are in the environment.
package clientgo

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	// startBudget is for pods to run, on nodes that have to pull their image first.
	startBudget = 60 * time.Second
	// knownBudget is for a change to get from the API server to kube-proxy, or to
	// a kubelet.
	knownBudget = 20 * time.Second
	// replaceBudget is for a pod to be removed and replaced on another node.
	replaceBudget = 90 * time.Second

	pollPeriod = 100 * time.Millisecond
)

// cluster is the cluster that the test in the parent folder has started.
type cluster struct {
	t       *testing.T
	config  *rest.Config
	client  *kubernetes.Clientset
	space   string   // a namespace of this test alone
	workers []string // names of nodes
}

// connect reads the kubeconfig of $KUBECONFIG as it is, with its authorities
// and keys.
func connect(t *testing.T, space string) *cluster {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", os.Getenv("KUBECONFIG"))
	if err != nil {
		t.Fatal(err)
	}
	// A test polls; the default of 5 requests a second is for programs that watch.
	config.QPS, config.Burst = 50, 100
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	c := &cluster{t: t, config: config, client: client, space: space}
	made := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: space, Labels: map[string]string{
		// A hostPath volume needs it: the standards baseline and restricted forbid them.
		"pod-security.kubernetes.io/enforce": "privileged",
		"pod-security.kubernetes.io/warn":    "privileged",
	}}}
	if _, err := client.CoreV1().Namespaces().Create(t.Context(), made, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	nodes, err := client.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{LabelSelector: "!node-role.kubernetes.io/control-plane"})
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range nodes.Items {
		c.workers = append(c.workers, n.Name)
	}
	if slices.Sort(c.workers); len(c.workers) < 2 {
		t.Fatalf("there are the workers %v, two are needed", c.workers)
	}
	return c
}

// in is the cluster for a subtest.
func (c *cluster) in(t *testing.T) *cluster {
	part := *c
	part.t = t
	return &part
}

// slowdown is how many times slower than an idle machine this one is. The test
// in the parent folder has measured it.
func slowdown() float64 {
	if f, err := strconv.ParseFloat(os.Getenv("GARBOARD_SLOWDOWN"), 64); err == nil && f > 1 {
		return f
	}
	return 1
}

// eventually polls check until it returns nil.
func (c *cluster) eventually(budget time.Duration, name string, check func(ctx context.Context) error) {
	c.t.Helper()
	var last error
	budget = time.Duration(float64(budget) * slowdown())
	err := wait.PollUntilContextTimeout(c.t.Context(), pollPeriod, budget, true, func(ctx context.Context) (bool, error) {
		// The end of the budget interrupts a request; that error is of no interest.
		if err := check(ctx); err == nil || !errors.Is(err, context.DeadlineExceeded) || last == nil {
			last = err
		}
		return last == nil, nil
	})
	if err != nil {
		c.t.Fatalf("not within %s: %s: %v", budget, name, last)
	}
}

// pods are those of an app.
func (c *cluster) pods(ctx context.Context, app string) ([]corev1.Pod, error) {
	list, err := c.client.CoreV1().Pods(c.space).List(ctx, metav1.ListOptions{LabelSelector: "app=" + app})
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

// ready waits for a number of ready pods of an app that aren't terminating, and
// no others.
func (c *cluster) ready(budget time.Duration, app string, want int) []corev1.Pod {
	c.t.Helper()
	var found []corev1.Pod
	c.eventually(budget, fmt.Sprintf("%d pods of %s are ready", want, app), func(ctx context.Context) (err error) {
		if found, err = c.pods(ctx, app); err != nil {
			return err
		}
		said := ""
		n := 0
		for _, p := range found {
			if isReady(p) {
				n++
			} else {
				said += fmt.Sprintf("\n%s on %s: %s %v", p.Name, p.Spec.NodeName, p.Status.Phase, p.Status.ContainerStatuses)
			}
		}
		if n != want || len(found) != want {
			return fmt.Errorf("%d of %d are:%s", n, len(found), said)
		}
		return nil
	})
	return found
}

func isReady(p corev1.Pod) bool {
	return p.DeletionTimestamp == nil && slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}
