//go:build e2e && long

package rolling

import (
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/image/components"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

const (
	// stopBudget is for an upgrade to come to the sick node, to give it its five minutes, and to undo the step.
	stopBudget = 15 * time.Minute
	// goBudget is for an upgrade that isn't disturbed.
	goBudget = 20 * time.Minute
)

// An upgrade of three control planes and a worker stops at a node that isn't Ready any more: before it changes the
// first program of that node, and after it has changed the last one. The nodes after it aren't touched, and the same
// command goes on.
func TestUpgradeStopsAtASickNode(t *testing.T) {
	c, m := e2etest.Ready(t, "rollingstop", qemu.Container, e2etest.Nodes(3, 1), e2etest.RelinkedKubernetes(t))
	c.Healthy()
	sick, next := c.Nodes[1], c.Nodes[2:]
	s := begins(c, "… kube-apiserver "+c.Node(), upgrade(c)...)
	c.Gbctl("-n", sick.Address.String(), "service", "containerd", "stop")
	stops(c, s, sick, "container runtime is down", "… kube-apiserver "+next[0].Name)
	versions(c, "kube-apiserver", components.RelinkedKubernetesVersion, c.ControlPlanes()...)
	tells(c, sick, "service-stopped", "containerd was stopped")
	m.Reached("it has stopped before it changed a node, whose containerd is stopped")
	c.Gbctl("-n", sick.Address.String(), "service", "containerd", "start")
	c.Healthy()

	s = begins(c, "… kubelets "+sick.Name, upgrade(c)...)
	mend := leaveForeign(c, sick)
	stops(c, s, sick, "network", "… kubelets "+next[0].Name)
	versions(c, "kube-scheduler", config.KubernetesVersion, c.ControlPlanes()...)
	versions(c, "kubelet", components.RelinkedKubernetesVersion, c.Nodes...)
	tells(c, sick, "node-not-ready", foreign)
	m.Reached("it has stopped after it changed a node, whose pod network is broken since")
	mend()
	c.Healthy()
	t.Log(c.Patient(goBudget).Gbctl(upgrade(c)...))
	versions(c, "kubelet", config.KubernetesVersion, c.Nodes...)
	m.Reached("the same command has upgraded all nodes")
}

// begins starts a command, and waits until it says so.
func begins(c *e2etest.Cluster, what string, command ...string) *e2etest.Session {
	c.T().Helper()
	s := c.Session(command...)
	if !s.Await(goBudget, what, func(text string) bool { return strings.Contains(text, what) }) {
		c.T().Fatalf("it ended before %s: %v\n%s", what, s.End(0), s.Text())
	}
	return s
}

// stops: the command ends with what is complete, and without a step.
func stops(c *e2etest.Cluster, s *e2etest.Session, sick qemu.Node, reason, without string) {
	c.T().Helper()
	if err := s.End(stopBudget); err == nil || strings.Contains(s.Text(), without) {
		c.T().Errorf("it went on: %v", err)
	}
	complete(c, sick, reason, s.Text())
	if strings.Contains(s.Text(), "isn't undone") {
		c.T().Error("the step isn't undone")
	}
	c.T().Log(s.Text())
}

// versions: these nodes have a version of a component in their configurations, and their kubelets run in it.
func versions(c *e2etest.Cluster, component, version string, nodes ...qemu.Node) {
	c.T().Helper()
	for _, n := range nodes {
		if text := c.Gbctl("-n", n.Address.String(), "get", "mc", "-o", "yaml"); !strings.Contains(text, "/"+component+":"+version+"\n") {
			c.T().Errorf("%s of %s isn't %s:\n%s", component, n.Name, version, text)
		}
		if component == "kubelet" {
			if got := c.Kubectl("get", "node", n.Name, "-o", "jsonpath={.status.nodeInfo.kubeletVersion}"); got != version {
				c.T().Errorf("the kubelet of %s is %s, want %s", n.Name, got, version)
			}
		}
	}
}
