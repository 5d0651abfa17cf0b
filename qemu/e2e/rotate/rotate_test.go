//go:build e2e && long

// Package rotate tests the replacement of all authorities of a running cluster.
package rotate

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	writeBudget  = 30 * time.Second
	askBudget    = 20 * time.Minute // until the operation asks
	rotateBudget = 40 * time.Minute
	refuseBudget = 30 * time.Second
	// promise is the longest time without an answer (docs/rotating-authorities.md).
	promise = 2 * time.Second
)

// rotation is a rotation that asks its question, and the credentials of before.
type rotation struct {
	*e2etest.Cluster
	node          string
	kubeconfig    string // of before
	clientConfig  string // the path of a copy of before
	user          *e2etest.Session
	renewedConfig string
}

// begin runs gbctl rotate-ca until it asks.
func begin(t *testing.T, c *e2etest.Cluster, m *e2etest.Mark) *rotation {
	t.Helper()
	r := &rotation{Cluster: c, node: c.Nodes[0].Address.String(), clientConfig: filepath.Join(t.TempDir(), "config")}
	r.kubeconfig = c.Gbctl("-n", r.node, "kubeconfig", "-")
	text, err := os.ReadFile(c.ClientConfig())
	if err == nil {
		err = os.WriteFile(r.clientConfig, text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Log(c.Patient(writeBudget).Gbctl("-n", r.node, "rotate-ca", "--dry-run"))
	if after := c.Gbctl("-n", r.node, "kubeconfig", "-"); authority(t, after) != authority(t, r.kubeconfig) {
		t.Error("the dry run has replaced an authority")
	}
	r.user = c.Session("-n", r.node, "rotate-ca")
	r.user.Asks(askBudget, "")
	m.Reached("asked")
	if now, err := os.ReadFile(c.ClientConfig()); err != nil || string(now) == string(text) {
		t.Errorf("gbctl has no new credentials: %v", err)
	}
	r.renewedConfig = c.Gbctl("-n", r.node, "kubeconfig", "-")
	r.renewFile(t, r.renewedConfig)
	return r
}

func authority(t *testing.T, kubeconfig string) string {
	ca, _, _ := e2etest.Credentials(t, kubeconfig)
	return string(ca)
}

// renewFile gives the cluster's own kubeconfig new credentials: its load balancer reads it.
func (r *rotation) renewFile(t *testing.T, now string) {
	t.Helper()
	text, err := os.ReadFile(r.Kubeconfig())
	if err != nil {
		t.Fatal(err)
	}
	oldCA, oldCrt, oldKey := e2etest.Credentials(t, string(text))
	ca, crt, key := e2etest.Credentials(t, now)
	b64 := base64.StdEncoding.EncodeToString
	renewed := strings.NewReplacer(b64(oldCA), b64(ca), b64(oldCrt), b64(crt), b64(oldKey), b64(key)).Replace(string(text))
	if err := os.WriteFile(r.Kubeconfig()+".new", []byte(renewed), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(r.Kubeconfig()+".new", r.Kubeconfig()); err != nil {
		t.Fatal(err)
	}
}

// finish answers with yes, and checks that everything old is refused.
func (r *rotation) finish(t *testing.T, m *e2etest.Mark) {
	t.Helper()
	r.user.Type("yes")
	if err := r.user.End(rotateBudget); err != nil {
		t.Fatalf("%v\n%s", err, r.user.Text())
	}
	m.Reached("rotated")
	old := r.EndpointAs(r.kubeconfig)
	r.Eventually(refuseBudget, "the old kubeconfig is refused", func() error {
		ctx, cancel := context.WithTimeout(t.Context(), refuseBudget)
		defer cancel()
		if _, err := old.Get(ctx, "/api/v1/nodes"); err == nil {
			return errors.New("it is accepted")
		}
		return nil
	})
	if out, err := r.TryGbctlWith("", []string{"GARBOARDCONFIG=" + r.clientConfig}, "-n", r.node, "version"); err == nil {
		t.Errorf("the old context is accepted: %s", out)
	}
	fresh := r.Gbctl("-n", r.node, "kubeconfig", "-")
	if strings.Count(authority(t, fresh), "BEGIN") != 1 || strings.Contains(authority(t, fresh), strings.TrimSpace(authority(t, r.kubeconfig))) {
		t.Errorf("the new kubeconfig has other authorities than the new one:\n%s", authority(t, fresh))
	}
	ctx, cancel := context.WithTimeout(t.Context(), refuseBudget)
	defer cancel()
	if _, err := r.EndpointAs(fresh).Get(ctx, "/api/v1/nodes"); err != nil {
		t.Errorf("the new kubeconfig: %v", err)
	}
	if out, err := r.Patient(writeBudget).TryGbctl("-n", r.node, "health"); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	r.Eventually(writeBudget, "all nodes are ready", func() error { return r.NodesReady(r.Nodes...) })
	for _, n := range r.Nodes {
		if text := r.Gbctl("-n", n.Address.String(), "get", "mc", "-o", "yaml"); strings.Contains(text, "accepted") {
			t.Errorf("node %s still accepts others:\n%s", n.Name, text)
		}
	}
}

// One node: its only API server and etcd restart, and everything comes back with other
// authorities, also after a reboot.
func TestRotateOneNode(t *testing.T) {
	c, m := e2etest.Ready(t, "rotate1", qemu.Container)
	c.Healthy()
	r := begin(t, c, m)
	r.finish(t, m)
	c.Golden("rotate-ca", r.user.Text())
	c.Gbctl("-n", r.node, "reboot", "--wait")
	m.Reached("rebooted")
	c.Eventually(writeBudget, "the node is healthy", func() error {
		out, err := c.TryGbctl("-n", r.node, "health")
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		return err
	})
}

// kept checks the promise to clients since the last check.
func kept(t *testing.T, c *e2etest.Cluster, load *e2etest.Writer, when string) {
	t.Helper()
	longest := load.Longest()
	t.Logf("%s, the longest time without an acknowledged write was %s, from %s on", when, longest.Took, longest.From.Format(time.TimeOnly))
	if err := c.Promised(longest.From, longest.From.Add(longest.Took), promise); err != nil {
		t.Errorf("%s, without an acknowledged write: %v", when, err)
	}
}

// Three control planes and a worker get other authorities while clients write: no client
// waits for longer than promised, and nothing that was acknowledged is lost.
func TestRotateUnderLoad(t *testing.T) {
	c, m := e2etest.Ready(t, "rotate", qemu.Container, e2etest.Nodes(3, 1))
	c.Healthy()
	m.Reached("all control planes serve")
	var use atomic.Pointer[e2etest.Store] // the credentials with which it writes
	with := func(s e2etest.Store) { use.Store(&s) }
	with(e2etest.KubernetesStore(c.Endpoint()))
	load := c.Write(e2etest.Store{
		Name:  "Kubernetes",
		Write: func(ctx context.Context, key, value string) error { return use.Load().Write(ctx, key, value) },
		Read:  func(ctx context.Context) (map[string]string, error) { return use.Load().Read(ctx) },
	})
	load.Goes(writeBudget, "before the rotation")
	r := begin(t, c, m)
	kept(t, c, load, "until the question")
	load.Goes(writeBudget, "with old credentials, while the operation asks")
	with(e2etest.KubernetesStore(c.EndpointAs(r.renewedConfig)))
	load.Goes(writeBudget, "with new credentials, before the answer")
	r.finish(t, m)
	kept(t, c, load, "after the question")
	load.Goes(writeBudget, "after the rotation")
	load.Stop()
	load.Complete(writeBudget, map[string]func(context.Context) (map[string]string, error){"the API server": load.Read})
}
