//go:build e2e

package controlplane

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// A real API server takes manifests as kubectl takes them. A webhook that refuses everything comes once its pods are
// ready, and stays deleted, also for a node that has just started.
func TestRealManifests(t *testing.T) {
	n := &realNode{t: t, dir: t.TempDir(), config: testConfig(t)}
	n.prepare()
	policy, err := os.ReadFile("testdata/webhook.yaml")
	put(t, err)
	n.config.Cluster.InlineManifests = []config.InlineManifest{
		{Name: "a-bad", Contents: "kind: ConfigMap\nkind: Secret\n---\n{apiVersion: v1, kind: ConfigMap, metadata: {name: beside-it}}\n---\n{apiVersion: v1, kind: ConfigMap, metadata: {name: Not_A_Name}}"},
		{Name: "b-ports", Contents: "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: tcp-services, annotations: {day: 2024-05-01}}\ndata:\n  9000: default/echo:8080\n"},
		{Name: "c-pod", Contents: "apiVersion: v1\nkind: Pod\nmetadata: {name: a, namespace: kube-system}\nspec: {serviceAccountName: coredns, hostNetwork: yes, enableServiceLinks: off, containers: [{name: a, image: b}]}\n"},
		{Name: "d-policy", Contents: string(policy)},
		{Name: "e-last", Contents: "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: last}\n"},
	}
	n.store = testStore(t, n.config)
	n.runControllers()
	n.startEtcd()
	for _, program := range Programs {
		n.startProgram(program)
	}
	client := n.admin()
	n.result("20-b-ports", "made")
	n.result("20-c-pod", "made")
	n.result("20-e-last", "made")
	n.result("20-a-bad", "Not_A_Name")
	n.result("11-core-dns", "made")
	const waits = "waits for a ready pod of Service policy-system/policy"
	n.result("20-d-policy", waits)
	for _, o := range []kubeclient.Ref{
		{APIVersion: "v1", Kind: "ConfigMap", Namespace: "default", Name: "beside-it"},
		{APIVersion: "policies.example.org/v1", Kind: "Rule", Name: "only-known-registries"},
	} {
		if _, err := client.Get(t.Context(), o); err != nil {
			t.Error(err)
		}
	}
	if o, err := client.Get(t.Context(), kubeclient.Ref{APIVersion: "v1", Kind: "ConfigMap", Namespace: "default", Name: "tcp-services"}); err != nil || o.Text("data", "9000") != "default/echo:8080" || o.Text("metadata", "annotations", "day") != "2024-05-01" {
		t.Errorf("%v, %v", o, err)
	}
	n.drift("20-b-ports", "none") // also without a namespace
	hook := kubeclient.Ref{APIVersion: "admissionregistration.k8s.io/v1", Kind: "ValidatingWebhookConfiguration", Name: "policy"}
	if _, err := client.Get(t.Context(), hook); !kubeclient.IsNotFound(err) {
		t.Errorf("the webhook is there before its pods: %v", err)
	}
	_, err = client.Create(t.Context(), kubeclient.Object{
		"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4", "ports": list{object{"port": 8443, "name": ""}},
		"metadata":  object{"name": "policy-x", "namespace": "policy-system", "labels": object{"kubernetes.io/service-name": "policy"}},
		"endpoints": list{object{"addresses": list{"192.0.2.77"}, "conditions": object{"ready": true}}},
	})
	put(t, err)
	n.result("20-d-policy", "made")
	if _, err := client.Get(t.Context(), hook); err != nil {
		t.Error(err)
	}

	put(t, client.Delete(t.Context(), hook))
	n.look()
	const deleted = "ValidatingWebhookConfiguration/policy: deleted by an administrator, and not made again"
	n.result("20-d-policy", deleted)
	n.store = testStore(t, n.config) // another node, or this one after a boot
	put(t, etcd.Statuses.Put(n.store.As("test"), etcd.StatusID, etcd.StatusSpec{Ready: true, Endpoint: n.etcdURL}))
	n.runControllers()
	n.result("20-d-policy", deleted)
	n.result("20-b-ports", "made")
	if _, err := client.Get(t.Context(), hook); !kubeclient.IsNotFound(err) {
		t.Errorf("the webhook is made again: %v", err)
	}
	changed := strings.Replace(string(policy), "timeoutSeconds: 10", "timeoutSeconds: 9", 1)
	next := *n.config
	next.Cluster.InlineManifests = []config.InlineManifest{{Name: "d-policy", Contents: changed}}
	put(t, configuration.Configs.Put(n.store.As("test"), configuration.ConfigID, &next))
	n.result("20-d-policy", "made")
	if o, err := client.Get(t.Context(), hook); err != nil || fmt.Sprint(o.List("webhooks")[0]["timeoutSeconds"]) != "9" {
		t.Errorf("the changed webhook: %v, %v", o, err)
	}
}

// look makes the controllers look again.
func (n *realNode) look() {
	for _, ready := range []bool{false, true} {
		put(n.t, etcd.Statuses.Put(n.store.As("test"), etcd.StatusID, etcd.StatusSpec{Ready: ready, Endpoint: n.etcdURL}))
	}
}

// result waits until a manifest has come to that.
func (n *realNode) result(id, want string) {
	n.t.Helper()
	eventually.That(n.t, 90*time.Second, "manifest "+id+" to be "+want, func() error {
		r, err := ManifestResults.Get(n.store, id)
		if err == nil && (r.Spec.String() != want && (want == "made" || !strings.Contains(r.Spec.String(), want))) {
			err = errors.New(r.Spec.String())
		}
		return err
	})
}

// drift waits until a manifest has that drift.
func (n *realNode) drift(id, want string) {
	n.t.Helper()
	eventually.That(n.t, 90*time.Second, "the drift of "+id+" to be "+want, func() error {
		d, err := ManifestDrifts.Get(n.store, id)
		if err == nil && d.Spec.String() != want {
			err = errors.New(d.Spec.String())
		}
		return err
	})
}
