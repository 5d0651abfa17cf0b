//go:build e2e

// Package rolling tests what goes from node to node where one of them isn't Ready: it stops there, says why, and goes
// on once that is mended.
package rolling

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	// noticeBudget is for Kubernetes to have a node as not Ready: it waits 50 s for a kubelet that doesn't report.
	noticeBudget = 90 * time.Second
	// mendBudget is for a node that was mended to serve, and refuseBudget for a plan, which waits for what has just
	// started.
	mendBudget   = 90 * time.Second
	refuseBudget = 2 * time.Minute
	// beginBudget is for an operation to begin with what it changes, after all images are there.
	beginBudget = 2 * time.Minute
)

// foreign is what an installer of another pod network leaves behind. Its name sorts before that of the node's own.
const foreign = "/etc/cni/net.d/00-foreign.conflist"

// An upgrade doesn't begin where a node's pod network is broken. The command says which node it is, its condition, the
// reason, and what tells more. That tells the cause, and once it is mended, the same command begins.
func TestUpgradeWaitsForASickNode(t *testing.T) {
	c, m := e2etest.Ready(t, "rollingsick", qemu.Container, e2etest.Nodes(1, 1), e2etest.RelinkedKubernetes(t))
	c.Healthy()
	sick := c.Nodes[1]
	mend := leaveForeign(c, sick)
	notReady(c, sick)
	m.Reached("a worker isn't Ready")
	refused(c, sick)
	tells(c, sick, "node-not-ready", foreign)
	m.Reached("an upgrade is refused, and doctor tells why")
	mend()
	c.Healthy()
	s := c.Session(upgrade(c)...)
	if !s.Await(beginBudget, "that it changes the first node", func(text string) bool { return strings.Contains(text, "… kube-apiserver "+c.Node()) }) {
		t.Errorf("the same command ended: %v\n%s", s.End(0), s.Text())
	}
	m.Reached("the same command has begun")
}

// upgrade is the command.
func upgrade(c *e2etest.Cluster) []string {
	return []string{"-n", c.Nodes[0].Address.String(), "upgrade-k8s", "--to", strings.TrimPrefix(config.KubernetesVersion, "v"), "--yes"}
}

// refused: the upgrade doesn't begin, and its message is complete.
func refused(c *e2etest.Cluster, sick qemu.Node) {
	c.T().Helper()
	out, err := c.Patient(refuseBudget).TryGbctl(upgrade(c)...)
	if err == nil {
		c.T().Fatalf("it wasn't refused:\n%s", out)
	}
	complete(c, sick, "network", err.Error())
	c.T().Log(err)
}

// complete checks a message: the node, its condition, its reason, and the next step.
func complete(c *e2etest.Cluster, sick qemu.Node, reason, said string) {
	c.T().Helper()
	for _, part := range []string{"node " + sick.Name, " is NotReady: ", reason, fmt.Sprintf("gbctl -n %s doctor", sick.Address)} {
		if !strings.Contains(said, part) {
			c.T().Errorf("it doesn't say %q:\n%s", part, said)
		}
	}
}

// leaveForeign leaves a file among the configurations of the pod network that isn't one.
func leaveForeign(c *e2etest.Cluster, n qemu.Node) (mend func()) {
	c.T().Helper()
	path := fmt.Sprintf("/proc/%d/root%s", c.NodeInit(n.Name, "--mode=container"), foreign)
	if err := os.WriteFile(path, []byte(`{"name":"other","plugins":`), 0o600); err != nil {
		c.T().Fatal(err)
	}
	return func() {
		c.T().Helper()
		if err := os.Remove(path); err != nil {
			c.T().Fatal(err)
		}
	}
}

// notReady waits until Kubernetes has a node as not Ready.
func notReady(c *e2etest.Cluster, n qemu.Node) {
	c.T().Helper()
	c.Eventually(noticeBudget, n.Name+" isn't Ready", func() error {
		out, err := c.Try("get", "node", n.Name, "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`)
		if err == nil && out == "True" {
			err = errors.New("it is Ready")
		}
		return err
	})
}

// tells: doctor on the node has a finding with the cause.
func tells(c *e2etest.Cluster, n qemu.Node, id, cause string) {
	c.T().Helper()
	c.Eventually(noticeBudget, "doctor on "+n.Name+" tells the cause", func() error {
		out, _ := c.TryGbctl("-n", n.Address.String(), "doctor")
		if !strings.Contains(out, id) || !strings.Contains(out, cause) {
			return fmt.Errorf("no %s with %s in\n%s", id, cause, out)
		}
		c.T().Log(out)
		return nil
	})
}
