//go:build e2e

// Package bootstrap tests a control plane that waits until a user bootstraps
// the cluster on it, once.
package bootstrap

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

// waitBudget is for the node to boot, and to pull the image of etcd.
const waitBudget = 60 * time.Second

// S-212, S-213, S-223, S-244, S-355: it waits and reports for what, begins on request,
// and reports a repeated request; a request that would end the cluster is refused.
func TestBootstrap(t *testing.T) {
	c := e2etest.New(t, "bootstrap", qemu.Container, controlPlane)
	c.Says(waitBudget, 0, "etcd: Preparing", "Waiting for bootstrap, or for a control plane to join at https://")
	c.Eventually(waitBudget, "the kubelet is up while etcd isn't", func() error {
		out := c.Gbctl("services")
		if !e2etest.Row(out, "etcd", "Preparing") {
			t.Fatalf("etcd doesn't wait:\n%s", out)
		}
		if !e2etest.Row(out, "kubelet", "Running", "OK") {
			return errors.New(out)
		}
		return nil
	})
	says := func(part string, args ...string) {
		t.Helper()
		if out := c.Gbctl(args...); !strings.Contains(out, part) {
			t.Errorf("gbctl %s: %s", strings.Join(args, " "), out)
		}
	}
	refuses := func(part string, args ...string) {
		t.Helper()
		if out, err := c.TryGbctl(args...); err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("gbctl %s: %v: %s", strings.Join(args, " "), err, out)
		}
	}
	access, here := filepath.Join(t.TempDir(), "kubeconfig"), fmt.Sprintf("--server=https://127.0.0.1:%d", c.KubernetesPort)
	mayAll := func() error {
		_, err := c.Try("--kubeconfig="+access, here, "auth", "can-i", "*", "*")
		return err
	}
	merged := fmt.Sprintf("merged into %s; kubectl's context is ", access)
	says(merged, "kubeconfig", access) // S-223: before there is a cluster
	// The context has the way to the endpoint, which is a port of this machine.
	if text, err := os.ReadFile(access); err != nil || !strings.Contains(string(text), fmt.Sprintf("server: https://127.0.0.1:%d\n", c.KubernetesPort)) ||
		!strings.Contains(string(text), "tls-server-name: "+c.Nodes[0].Address.String()+"\n") {
		t.Errorf("%v: it doesn't lead to the endpoint:\n%s", err, text)
	}
	if mayAll() == nil {
		t.Error("Kubernetes answers before the cluster has begun")
	}
	began := clusterID(t, "the cluster begins on this node; cluster ID ", c.Gbctl("bootstrap"))
	c.Ready(e2etest.Marks(t))
	programsAreUsers(t, c)
	again := c.Gbctl("bootstrap")
	if id := clusterID(t, "begun on this node already: nothing is to be done; cluster ID ", again); id != began {
		t.Errorf("the cluster's ID was %s, and is %s", began, id)
	}
	_, etcds, ok := strings.Cut(strings.TrimSpace(again), ", in etcd ")
	if !ok {
		t.Errorf("the ID that etcd has made isn't in %q", again)
	}
	if err := mayAll(); err != nil {
		t.Errorf("with the access of before: %v", err)
	}
	says(merged, "kubeconfig", access)
	if err := mayAll(); err != nil {
		t.Errorf("with the access renewed: %v", err)
	}
	says(c.Node(), "etcd", "members")
	says(" "+etcds+"\n", "etcd", "members")
	says("leader", "etcd", "status")
	refuses("the last voting member", "etcd", "leave")
	database := filepath.Join(t.TempDir(), "etcd.db")
	c.Gbctl("etcd", "snapshot", database)
	if info, err := os.Stat(database); err != nil || info.Size() < 100<<10 {
		t.Errorf("a snapshot of %v, %v", info, err)
	}
}

// clusterID is the ID after these words in the output of bootstrap.
func clusterID(t *testing.T, words, said string) string {
	t.Helper()
	m := regexp.MustCompile(regexp.QuoteMeta(words) + "([0-9a-f]{32})").FindStringSubmatch(said)
	if m == nil {
		t.Fatalf("bootstrap said %q, without %q and an ID", said, words)
	}
	return m[1]
}

// S-213: with two control planes. The one that boots first waits, and reports for what.
// The cluster begins on the other one, and it joins. A second beginning is refused, by the
// one that began, by the other, and by both if they get the requests at the same time.
func TestBootstrapTwice(t *testing.T) {
	c := e2etest.New(t, "twice", qemu.Container, controlPlane, e2etest.Nodes(2, 0))
	first, second := c.Nodes[0].Address.String(), c.Nodes[1].Address.String()
	for _, node := range []string{first, second} {
		c.Eventually(waitBudget, node+" waits", func() error {
			out, err := c.TryGbctl("-n", node, "service", "etcd")
			if err == nil && !strings.Contains(out, "Waiting for bootstrap, or for a control plane to join at https://") {
				err = errors.New(out)
			}
			return err
		})
	}
	said := map[string]string{}
	var mu sync.Mutex // guards said
	var wg sync.WaitGroup
	for _, node := range []string{first, second} {
		wg.Go(func() {
			out, err := c.TryGbctl("-n", node, "bootstrap")
			mu.Lock()
			defer mu.Unlock()
			if said[node] = out; err != nil {
				said[node] = err.Error()
			}
		})
	}
	wg.Wait()
	began := ""
	for node, words := range said {
		t.Logf("%s: %s", node, words)
		switch {
		case strings.Contains(words, "the cluster begins on this node") && began == "":
			began = node
		case strings.Contains(words, "begins the cluster, or was asked to at this moment"):
		case strings.Contains(words, "the cluster begins on this node"):
			t.Fatalf("both began a cluster: %q", said)
		// If one request came a little later.
		case strings.Contains(words, "is a member of the cluster already"), strings.Contains(words, "etcd of this cluster answers at"):
		default:
			t.Errorf("%s: %s", node, words)
		}
	}
	if began == "" { // each found the other
		began = second
		if out := c.Gbctl("-n", began, "bootstrap"); !strings.Contains(out, "the cluster begins on this node") {
			t.Fatalf("bootstrap of %s: %s", began, out)
		}
	}
	joins := first
	if began == first {
		joins = second
	}
	// During the beginning only the other control plane knows about it.
	if out, err := c.TryGbctl("-n", joins, "bootstrap"); err == nil || !strings.Contains(err.Error(), began) && !strings.Contains(err.Error(), "isn't empty") {
		t.Errorf("bootstrap of the joiner: %v: %s", err, out)
	}
	c.Ready(e2etest.Marks(t))
	c.Eventually(waitBudget, "two members vote", func() error {
		out, err := c.TryGbctl("-n", began, "etcd", "members")
		if err == nil && (strings.Count(out, " yes ") != 2 || !strings.Contains(out, joins)) {
			err = errors.New(out)
		}
		return err
	})
	if out, err := c.TryGbctl("-n", joins, "bootstrap"); err == nil || !strings.Contains(err.Error(), "isn't empty") {
		t.Errorf("bootstrap of a member: %v: %s", err, out)
	}
	if out := c.Gbctl("-n", began, "bootstrap"); !strings.Contains(out, "begun on this node already") {
		t.Errorf("bootstrap again: %s", out)
	}
}

// controlPlane makes the node one that doesn't begin by itself.
func controlPlane(o *qemu.Options) {
	o.Prepare = func(dir string) error {
		path := filepath.Join(dir, "config.yaml")
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(path, bytes.Replace(data, []byte(" type: init\n"), []byte(" type: controlplane\n"), 1), 0o600)
	}
}
