//go:build e2e

// Package clients tests programs of users: one that is written with client-go
// (folder clientgo, a separate module), and the kubectl and etcdctl that were
// built. Each runs on its own machine in the nodes' network.
package clients

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/osthread"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	podsBudget  = 60 * time.Second // for pods on nodes that have to pull their image first
	drainBudget = 90 * time.Second
)

func TestClients(t *testing.T) {
	program := clientgo(t)
	c, m := e2etest.Ready(t, "clients", qemu.Container, e2etest.Nodes(1, 2))
	network := c.Network()

	t.Run("client-go", func(t *testing.T) { runs(t, c.In(t), network, program) })
	m.Reached("the program with client-go has ended")
	t.Run("kubectl", func(t *testing.T) { drains(t, c.In(t)) })
	m.Reached("kubectl has drained a node")
	t.Run("etcdctl", func(t *testing.T) { members(t, c.In(t)) })
	m.Reached("etcdctl has asked etcd")
}

// clientgo builds the tests of the module clientgo.
func clientgo(t *testing.T) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "clientgo.test")
	build := exec.CommandContext(t.Context(), "go", "test", "-c", "-tags=e2e", "-o", program, ".")
	build.Dir = "clientgo"
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the program with client-go: %v\n%s", err, out)
	}
	return program
}

// runs runs the program in the nodes' network, where the API is at the control
// plane's address, not at a port of this machine's loopback.
func runs(t *testing.T, c *e2etest.Cluster, network *osthread.Thread, program string) {
	text, err := os.ReadFile(c.Kubeconfig())
	if err != nil {
		t.Fatal(err)
	}
	here, there := fmt.Sprintf("https://127.0.0.1:%d", c.KubernetesPort), "https://"+c.Nodes[0].Address.String()+":6443"
	if !bytes.Contains(text, []byte(here)) {
		t.Fatalf("%s doesn't say %s", c.Kubeconfig(), here)
	}
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, bytes.ReplaceAll(text, []byte(here), []byte(there)), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), program, "-test.v")
	cmd.Dir = t.TempDir()
	cmd.Env = append(os.Environ(),
		"KUBECONFIG="+kubeconfig,
		"GARBOARD_WEB_IMAGE="+config.DefaultAPIServerImage,
		"GARBOARD_ETCD_IMAGE="+config.DefaultEtcdImage,
		fmt.Sprintf("GARBOARD_SLOWDOWN=%g", eventually.Slowdown()))
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := network.Do(cmd.Start); err != nil {
		t.Fatal(err)
	}
	err = cmd.Wait()
	t.Logf("%s", out.String())
	if err != nil {
		t.Error(err)
	}
}

// pinned is a pod without a controller, beside one of a Deployment.
const pinned = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: plain, namespace: default}
spec:
  replicas: 2
  selector: {matchLabels: {app: plain}}
  template:
    metadata: {labels: {app: plain}}
    spec:
      terminationGracePeriodSeconds: 1
      containers: [{name: plain, image: IMAGE, command: [/usr/local/bin/kubectl, proxy, --port=8001]}]
---
apiVersion: v1
kind: Pod
metadata: {name: alone, namespace: default}
spec:
  nodeName: NODE
  terminationGracePeriodSeconds: 1
  containers: [{name: alone, image: IMAGE, command: [/usr/local/bin/kubectl, proxy, --port=8001]}]
`

// drains: kubectl drains a node, but refuses to delete a pod without a controller.
func drains(t *testing.T, c *e2etest.Cluster) {
	node := c.Nodes[2].Name
	c.Apply(strings.NewReplacer("IMAGE", config.DefaultAPIServerImage, "NODE", node).Replace(pinned))
	c.Eventually(podsBudget, "the pods run", func() error { return running(c, 3) })
	_, err := c.Try("drain", node, "--ignore-daemonsets")
	if err == nil || !strings.Contains(err.Error(), "default/alone") {
		t.Fatalf("a drain of a node with a pod of its own: %v", err)
	}
	c.Kubectl("delete", "pod", "alone")
	c.Eventually(drainBudget, "the node is drained", func() error {
		_, err := c.Try("drain", node, "--ignore-daemonsets", "--timeout=20s")
		return err
	})
	if left := c.Kubectl("get", "pods", "--field-selector", "spec.nodeName="+node, "-o", "name"); left != "" {
		t.Errorf("on %s are still:\n%s", node, left)
	}
	c.Eventually(podsBudget, "the pods run elsewhere", func() error { return running(c, 2) })
	c.Kubectl("uncordon", node)
}

func running(c *e2etest.Cluster, want int) error {
	out, err := c.Try("get", "pods", "--field-selector=status.phase=Running", "-o", "name")
	if n := strings.Count(out, "pod/"); err == nil && n != want {
		err = fmt.Errorf("%d of %d do: %q", n, want, out)
	}
	return err
}

// keys is a pod on the control plane with the keys of its etcd. Processes in it
// end with the pod.
const keys = `
apiVersion: v1
kind: Pod
metadata: {name: etcdctl, namespace: kube-system}
spec:
  nodeName: NODE
  hostNetwork: true
  terminationGracePeriodSeconds: 1
  containers:
  - name: etcdctl
    image: IMAGE
    command: [/usr/local/bin/etcdctl, watch, /nothing]
    env:
    - {name: ETCDCTL_CACERT, value: /keys/ca.crt}
    - {name: ETCDCTL_CERT, value: /keys/peer.crt}
    - {name: ETCDCTL_KEY, value: /keys/peer.key}
    volumeMounts: [{name: keys, mountPath: /keys, readOnly: true}]
  volumes:
  - name: keys
    hostPath: {path: /system/secrets/etcd}
`

// members: etcdctl shows the same as gbctl, and nothing without keys.
func members(t *testing.T, c *e2etest.Cluster) {
	node := c.Nodes[0]
	c.Apply(strings.NewReplacer("IMAGE", config.DefaultEtcdImage, "NODE", node.Name).Replace(keys))
	etcdctl := func(arguments ...string) (string, error) {
		return c.Try(append([]string{"exec", "-n", "kube-system", "etcdctl", "--", "/usr/local/bin/etcdctl"}, arguments...)...)
	}
	var list struct {
		Members []struct {
			ID         uint64
			Name       string
			ClientURLs []string
		}
	}
	c.Eventually(podsBudget, "etcdctl lists the members", func() error {
		out, err := etcdctl("member", "list", "-w", "json")
		if err != nil {
			return err
		}
		return json.Unmarshal([]byte(out), &list)
	})
	url := fmt.Sprintf("https://%s:2379", node.Address)
	if len(list.Members) != 1 || list.Members[0].Name != node.Name || strings.Join(list.Members[0].ClientURLs, " ") != url {
		t.Fatalf("members: %+v", list.Members)
	}
	if out := c.Gbctl("-n", node.Address.String(), "etcd", "members"); !strings.Contains(out, fmt.Sprintf("%x", list.Members[0].ID)) {
		t.Errorf("gbctl says otherwise than %x:\n%s", list.Members[0].ID, out)
	}
	// At the address that other members use.
	out, err := etcdctl("--endpoints="+url, "endpoint", "status", "-w", "json")
	var statuses []struct {
		Status struct {
			Leader, DBSize uint64
			Header         struct {
				MemberID uint64 `json:"member_id"`
			}
		}
	}
	if err := errors.Join(err, json.Unmarshal([]byte(out), &statuses)); err != nil {
		t.Fatalf("endpoint status: %v: %s", err, out)
	}
	if s := statuses[0].Status; len(statuses) != 1 || s.Leader != list.Members[0].ID || s.Header.MemberID != s.Leader || s.DBSize == 0 {
		t.Errorf("endpoint status: %s", out)
	}
	if out, err := etcdctl("--endpoints="+url, "--cert=", "--key=", "--command-timeout=2s", "endpoint", "health"); err == nil {
		t.Errorf("without keys, etcd says %q", out)
	}
}
