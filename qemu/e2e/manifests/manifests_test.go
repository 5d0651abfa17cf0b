//go:build e2e && long

// Package manifests tests a cluster with more than Garboard's own parts: a pod network of
// the owner's choice, from a URL or by hand, and objects from the configuration. Missing
// objects are created. Objects that a user has changed or deleted stay as they are.
package manifests

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"gopkg.in/yaml.v3"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	// here is this machine's address for nodes: it serves the manifests.
	here = "10.5.0.1:8080"
	// apiBudget is for Kubernetes to answer on a new node.
	apiBudget = 60 * time.Second
	// networkBudget is for two images to be pulled, and for pods to have addresses.
	networkBudget = 60 * time.Second
	// madeBudget is for objects to be made, or made again after a boot.
	madeBudget = 60 * time.Second
	// driftBudget is for a change to be detected: the comparison is once a minute.
	driftBudget = 90 * time.Second
	// tellBudget is for doctor to have the kubelet's report.
	tellBudget = 30 * time.Second

	cniImage = "registry.example/garboard/cni:1" // RFC 2606
	// pods is flannel's default, and so the cluster's.
	pods = "10.244."
)

// onNode are the parts that flannel leaves to the node, and this network does itself.
const onNode = `
name: on-node
image: ` + cniImage + `
command: [/cni, install, /run/flannel/subnet.env, /plugins, /configurations]
volumeMounts:
- {name: run, mountPath: /run/flannel}
- {name: plugins, mountPath: /plugins}
- {name: configurations, mountPath: /configurations}
`

// hostDirectories are the directories that all pod networks use.
const hostDirectories = `
- {name: plugins, hostPath: {path: /opt/cni/bin, type: DirectoryOrCreate}}
- {name: configurations, hostPath: {path: /etc/cni/net.d, type: DirectoryOrCreate}}
`

const inline = `
apiVersion: v1
kind: Namespace
metadata: {name: inline}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: kept, namespace: inline}
data: {word: first}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: lost, namespace: inline}
data: {word: first}
`

// changed is inline with another content of one object.
const changed = "{apiVersion: v1, kind: ConfigMap, metadata: {name: lost, namespace: inline}, data: {word: second}}"

// extra has an object before the kind that defines it, and documents that are wrong.
const extra = `
apiVersion: example.org/v1
kind: Boat
metadata: {name: dinghy}
spec: {planks: 12}
---
kind: Twice
kind: Twice
--- # no namespace, and a key that is a number
apiVersion: v1
kind: ConfigMap
metadata: {name: ports, annotations: {day: 2024-05-01}}
data: {9000: first}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {name: nobody}
webhooks:
- name: nobody.example.org
  admissionReviewVersions: [v1]
  sideEffects: None
  clientConfig: {service: {name: nobody, namespace: default, path: /}}
  rules: [{apiGroups: [""], apiVersions: ["*"], operations: [CREATE], resources: [pods, configmaps]}]
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: boats.example.org}
spec:
  group: example.org
  names: {kind: Boat, plural: boats, singular: boat}
  scope: Cluster
  versions:
  - name: v1
    served: true
    storage: true
    schema: {openAPIV3Schema: {type: object, properties: {spec: {type: object, properties: {planks: {type: integer}}}}}}
`

// S-218, S-265: a pod network and more from URLs, and inline.
func TestManifestsFromElsewhere(t *testing.T) {
	network := ownNetwork(t)
	c, m := cluster(t, "manifests", map[string]any{
		"network":         map[string]any{"cni": map[string]any{"name": "custom", "urls": []string{"http://" + here + "/cni.yaml"}}},
		"inlineManifests": []any{map[string]any{"name": "e2e", "contents": strings.TrimSpace(inline)}},
		"extraManifests":  []string{"http://" + here + "/extra.yaml"},
	})
	// The negative twin: while the server doesn't answer, the node has no network, and reports why.
	notReady(c)
	doctor(c, "http://"+here+"/cni.yaml")
	content(c, "first", "-n", "inline", "configmap", "lost", "-o", "jsonpath={.data.word}")
	m.Reached("all but what comes from the silent server is there")
	serve(t, c, map[string]string{"/cni.yaml": network, "/extra.yaml": extra})
	c.Ready(m)
	podsHaveAddresses(c)
	content(c, "12", "boat", "dinghy", "-o", "jsonpath={.spec.planks}")
	content(c, "first", "-n", "default", "configmap", "ports", "-o", "jsonpath={.data.9000}")
	m.Reached("objects from URLs are there")
	drift(c, "extra.yaml", `key "kind" already set in map`, "ValidatingWebhookConfiguration/nobody waits for a ready pod of Service default/nobody")
	if _, err := c.Try("get", "validatingwebhookconfiguration", "nobody"); err == nil {
		t.Error("a webhook is there without its pods")
	}
	namespaces(c)

	c.Kubectl("patch", "-n", "inline", "configmap", "kept", "--type=merge", "-p", `{"data":{"word":"mine"}}`)
	c.Kubectl("delete", "-n", "inline", "configmap", "lost")
	c.Kubectl("delete", "boat", "dinghy")
	c.Kubectl("delete", "-n", "kube-system", "service", "kube-dns")
	drift(c, "20-e2e", "/v1/ConfigMap/kept: data.word", "/v1/ConfigMap/lost: missing")
	drift(c, "extra.yaml", "Boat/dinghy: missing")
	m.Reached("gbctl shows what differs")

	if err := c.Cut(t.Context(), c.Node()); err != nil {
		t.Fatal(err)
	}
	if err := c.On(t.Context(), c.Node()); err != nil {
		t.Fatal(err)
	}
	const deleted = ": deleted by an administrator, and not made again"
	drift(c, "20-e2e", "/v1/ConfigMap/lost"+deleted, "/v1/ConfigMap/kept: data.word")
	drift(c, "extra.yaml", "Boat/dinghy"+deleted)
	if out, err := c.Try("get", "-n", "inline", "configmap", "lost"); err == nil {
		t.Errorf("what was deleted is made again: %s", out)
	}
	// the node's own is
	content(c, "", "-n", "kube-system", "service", "kube-dns", "-o", "jsonpath={.spec.externalName}")
	content(c, "mine", "-n", "inline", "configmap", "kept", "-o", "jsonpath={.data.word}")
	m.Reached("what was deleted stays so after a boot")
	c.Gbctl("-n", c.Node(), "patch", "mc", "-p", "cluster: {inlineManifests: [{name: e2e, contents: '"+changed+"'}]}")
	content(c, "second", "-n", "inline", "configmap", "lost", "-o", "jsonpath={.data.word}")
	m.Reached("a changed manifest is made again")
	drift(c, "20-e2e", "made")
	if out, err := c.TryGbctl("-n", c.Node(), "patch", "mc", "-p", "cluster: {inlineManifests: [{name: e2e, contents: 'kind: A'}]}"); err == nil || !strings.Contains(out+err.Error(), "apiVersion is missing") {
		t.Errorf("a manifest that can't be read is taken: %s, %v", out, err)
	}
	c.Ready(m)
	podsHaveAddresses(c)
}

// With cni: none the node waits for the user to install one, and reports that.
func TestNoNetwork(t *testing.T) {
	network := ownNetwork(t)
	c, m := cluster(t, "none", map[string]any{"network": map[string]any{"cni": map[string]any{"name": "none"}}})
	notReady(c)
	doctor(c, "cluster.network.cni.name is none")
	if _, err := c.Try("get", "daemonset", "-n", "kube-system", "kube-flannel"); err == nil {
		t.Error("flannel is there all the same")
	}
	m.Reached("the node waits for a pod network")
	c.Apply(network)
	c.Ready(m)
	podsHaveAddresses(c)
}

// cluster makes a cluster of one node, with this in its configuration.
func cluster(t *testing.T, name string, patch map[string]any) (*e2etest.Cluster, *e2etest.Mark) {
	t.Helper()
	text, err := yaml.Marshal(map[string]any{"cluster": patch})
	if err != nil {
		t.Fatal(err)
	}
	return e2etest.Start(t, name, qemu.Container, e2etest.WithImage(t, cniImage, "cni"), func(o *qemu.Options) {
		o.Network = netip.MustParsePrefix("10.5.0.0/24")
		o.Patches = [][]byte{text}
	})
}

// ownNetwork is flannel as Garboard renders it, with the other parts that a node needs.
func ownNetwork(t *testing.T) string {
	t.Helper()
	path := filepath.Join("..", "..", "..", "services", "kubernetes", "controlplane", "testdata", "manifests", "05-flannel.yaml")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var objects []map[string]any
	var container map[string]any
	var directories []any
	if err := errors.Join(yaml.Unmarshal(text, &objects), yaml.Unmarshal([]byte(onNode), &container), yaml.Unmarshal([]byte(hostDirectories), &directories)); err != nil {
		t.Fatal(err)
	}
	for _, o := range objects {
		if o["kind"] != "DaemonSet" {
			continue
		}
		pod := o["spec"].(map[string]any)["template"].(map[string]any)["spec"].(map[string]any)
		pod["containers"] = append(pod["containers"].([]any), container)
		pod["volumes"] = append(pod["volumes"].([]any), directories...)
	}
	list, err := yaml.Marshal(map[string]any{"apiVersion": "v1", "kind": "List", "items": objects})
	if err != nil {
		t.Fatal(err)
	}
	return string(list)
}

// serve serves files on this machine, by path.
func serve(t *testing.T, c *e2etest.Cluster, files map[string]string) {
	t.Helper()
	listener, err := c.Network().Listen(here)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		text, ok := files[r.URL.Path]
		if !ok {
			http.NotFound(w, r)
			return
		}
		_, _ = w.Write([]byte(text)) // a client that has disconnected needs no error
	})}
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		_ = server.Close()
		serving.Wait()
	})
}

// notReady waits until the node reports that it has no network.
func notReady(c *e2etest.Cluster) {
	c.T().Helper()
	c.Eventually(apiBudget, "the node isn't Ready, for want of a network", func() error {
		out, err := c.Try("get", "nodes", "-o", `jsonpath={.items[*].status.conditions[?(@.type=="Ready")].status} {.items[*].status.conditions[?(@.type=="Ready")].message}`)
		if err == nil && (!strings.HasPrefix(out, "False ") || !strings.Contains(out, "NetworkPluginNotReady")) {
			err = fmt.Errorf("its condition is %q", out)
		}
		return err
	})
}

// doctor waits until doctor reports these words.
func doctor(c *e2etest.Cluster, words string) {
	c.T().Helper()
	c.Eventually(tellBudget, "the doctor says "+words, func() error {
		out, _ := c.TryGbctl("doctor") // it exits with 1 if it finds something
		if !strings.Contains(out, words) {
			return fmt.Errorf("it says: %s", out)
		}
		return nil
	})
}

// content waits until an object has this content.
func content(c *e2etest.Cluster, want string, object ...string) {
	c.T().Helper()
	c.Eventually(madeBudget, strings.Join(object, " ")+" says "+want, func() error {
		out, err := c.Try(append([]string{"get"}, object...)...)
		if err == nil && out != want {
			err = fmt.Errorf("it says %q", out)
		}
		return err
	})
}

// podsHaveAddresses: those of CoreDNS, which aren't on the node's own network.
func podsHaveAddresses(c *e2etest.Cluster) {
	c.T().Helper()
	c.Eventually(networkBudget, "pods have addresses", func() error {
		out, err := c.Try("get", "pods", "-n", "kube-system", "-l", "k8s-app=kube-dns", "-o", "jsonpath={.items[*].status.podIP}")
		if err == nil && !strings.HasPrefix(out, pods) {
			err = fmt.Errorf("they have %q", out)
		}
		return err
	})
}

// namespaces: gbctl shows the manifests that come from URLs, or the others, alone (S-006).
func namespaces(c *e2etest.Cluster) {
	c.T().Helper()
	const ours, extra = "10-kube-proxy", "/extra.yaml"
	for namespace, shown := range map[string][]string{"controlplane": {ours}, "extras": {extra}, "": {ours, extra}} {
		out := c.Gbctl("get", "manifests", "--namespace", namespace)
		for _, name := range []string{ours, extra} {
			if want := slices.Contains(shown, name); strings.Contains(out, name) != want {
				c.T().Errorf("get manifests --namespace %q shows %s: %v, want %v:\n%s", namespace, name, !want, want, out)
			}
		}
	}
	if out := c.Gbctl("get", "manifests", ours, "--namespace", "controlplane", "-o", "yaml"); !strings.Contains(out, "namespace: controlplane") {
		c.T().Errorf("%s of its namespace is\n%s", ours, out)
	}
	if out, err := c.TryGbctl("get", "manifests", ours, "--namespace", "extras"); err == nil {
		c.T().Errorf("%s is in another namespace, too:\n%s", ours, out)
	}
}

// drift waits until the line of a manifest has these words.
func drift(c *e2etest.Cluster, manifest string, words ...string) {
	c.T().Helper()
	c.Eventually(driftBudget, fmt.Sprintf("the drift of %s is %q", manifest, words), func() error {
		out, err := c.TryGbctl("get", "manifests")
		if err != nil {
			return err
		}
		for line := range strings.Lines(out) {
			if !strings.Contains(line, manifest) {
				continue
			}
			for _, w := range words {
				if !strings.Contains(line, w) {
					return fmt.Errorf("it is %s", line)
				}
			}
			return nil
		}
		return fmt.Errorf("it isn't there:\n%s", out)
	})
}
