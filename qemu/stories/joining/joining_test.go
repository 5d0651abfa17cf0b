//go:build story

// Package joining is the story of a worker that has joined: its labels follow the
// configuration, it gets its certificate from another control plane when the one that
// signed is gone, and it can be reached after a boot when all of them are.
package joining

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/stories/story"
)

func TestMain(m *testing.M) { story.Main(m) }

const (
	// labelBudget is for a label of the configuration to be on the node.
	labelBudget = 10 * time.Second
	// answerBudget is for a worker to boot, to get its certificate, from the second or
	// third control plane that it asks, and to serve.
	answerBudget = 30 * time.Second
	// silence is how long a worker without a certificate is watched.
	silence = 15 * time.Second
)

func TestWorkerAndItsPeers(t *testing.T) {
	story.Built(t, qemu.Container)
	m := story.Marks(t)
	c := story.New(t, "joining", qemu.Container, func(o *qemu.Options) { o.ControlPlanes, o.Workers = 3, 1 })
	m.Reached("power is on")
	c.Ready(m)
	worker := c.Nodes[3]
	kept := filepath.Join(c.Dir(), worker.Name, "state", "machine-api.pem")
	c.Eventually(answerBudget, "the worker serves, and has kept its certificate", func() error {
		if _, err := os.Stat(kept); err != nil {
			return err
		}
		_, err := c.TryGbctl("-n", worker.Address.String(), "version")
		return err
	})
	m.Reached("the worker's machine API serves")

	t.Run("logs", func(t *testing.T) { logs(t, c.In(t)) })
	// S-221
	t.Run("labels", func(t *testing.T) { labels(t, c.In(t), worker) })
	m.Reached("labels follow the configuration")

	signer := signedBy(t, c, worker)
	t.Run("who signed dies", func(t *testing.T) {
		c := c.In(t)
		if err := c.Cut(t.Context(), signer.Name); err != nil {
			t.Fatal(err)
		}
		began := reboot(t, c, worker, func() error { return os.Remove(kept) })
		c.Eventually(answerBudget, "the worker has a certificate of another control plane", func() error {
			_, err := os.Stat(kept)
			return err
		})
		t.Logf("%7.1fs  from power on to a certificate of another one, %s being dead", time.Since(began).Seconds(), signer.Name)
		signedBy(t, c, worker, signer.Name)
	})
	m.Reached("another control plane signed")

	t.Run("all are dead", func(t *testing.T) {
		c := c.In(t)
		for _, n := range c.Nodes[:3] {
			if n.Name == signer.Name {
				continue // it is dead already
			}
			if err := c.Cut(t.Context(), n.Name); err != nil {
				t.Fatal(err)
			}
		}
		began := reboot(t, c, worker, func() error { return nil })
		c.Eventually(answerBudget, "the worker answers", func() error {
			_, err := c.TryGbctl("-n", worker.Address.String(), "get", "apiservers")
			return err
		})
		t.Logf("%7.1fs  from power on to an answer, with all control planes dead", time.Since(began).Seconds())
		// The negative twin: it is what was kept that it serves with.
		began = reboot(t, c, worker, func() error { return os.Remove(kept) })
		c.Eventually(2*silence, "a worker that kept nothing stays silent", func() error {
			if _, err := c.TryGbctl("-n", worker.Address.String(), "version"); err == nil {
				t.Fatal("it answers")
			}
			if time.Since(began) < silence {
				return errors.New("it does so far")
			}
			return nil
		})
	})
}

// reboot takes the worker off, does something, and turns it on.
func reboot(t *testing.T, c *story.Cluster, worker qemu.Node, meanwhile func() error) (on time.Time) {
	t.Helper()
	if err := c.Off(t.Context(), worker.Name); err != nil {
		t.Fatal(err)
	}
	if err := meanwhile(); err != nil {
		t.Fatal(err)
	}
	on = time.Now()
	if err := c.On(t.Context(), worker.Name); err != nil {
		t.Fatal(err)
	}
	return on
}

// signedBy is the control plane whose trustd signed for the worker, by its log, among
// those that aren't dead.
func signedBy(t *testing.T, c *story.Cluster, worker qemu.Node, dead ...string) qemu.Node {
	t.Helper()
	for _, n := range c.Nodes[:3] {
		if strings.Contains(strings.Join(dead, " "), n.Name) {
			continue
		}
		if out := c.Gbctl("-n", n.Address.String(), "logs", "trustd"); strings.Contains(out, "signed name="+worker.Name) {
			return n
		}
	}
	t.Fatal("no trustd says that it has signed")
	return qemu.Node{}
}

// logs of pods on every node can be read: the API server believes all kubelets.
func logs(t *testing.T, c *story.Cluster) {
	for _, n := range c.Nodes {
		c.Eventually(labelBudget, "the kubelet of "+n.Name+" shows a log", func() error {
			pod, err := c.Try("get", "pods", "-n", "kube-system", "-l", "k8s-app=kube-proxy", "--field-selector", "spec.nodeName="+n.Name, "-o", "name")
			if err == nil {
				_, err = c.Try("logs", "-n", "kube-system", strings.TrimSpace(pod))
			}
			return err
		})
	}
}

// labels of the configuration come and go while the node runs; so do a control plane's
// taints.
func labels(t *testing.T, c *story.Cluster, worker qemu.Node) {
	for _, n := range []qemu.Node{worker, c.Nodes[2]} {
		patch := func(text string) { c.Gbctl("-n", n.Address.String(), "patch", "mc", "--patch", text) }
		has := func(want string) func() error {
			return func() error {
				out, err := c.Try("get", "node", n.Name, "-o", `jsonpath={.metadata.labels.example\.org/rack} {.spec.taints[?(@.key=="example.org/gpu")].effect}`)
				if err == nil && strings.TrimSpace(out) != want {
					err = fmt.Errorf("it has %q", out)
				}
				return err
			}
		}
		taint := ""
		if n.Name != worker.Name {
			taint = " NoSchedule"
		}
		patch(`[{"op": "add", "path": "/machine/kubelet/nodeLabels", "value": {"example.org/rack": "r12"}}, {"op": "add", "path": "/machine/kubelet/nodeTaints", "value": {"example.org/gpu": "NoSchedule"}}]`)
		c.Eventually(labelBudget, n.Name+" has its label", has("r12"+taint))
		patch(`[{"op": "remove", "path": "/machine/kubelet/nodeLabels"}, {"op": "remove", "path": "/machine/kubelet/nodeTaints"}]`)
		c.Eventually(labelBudget, n.Name+" hasn't it any more", has(""))
	}
}
