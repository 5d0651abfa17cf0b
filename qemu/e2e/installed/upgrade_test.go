//go:build e2e && long

package installed

import (
	"strings"
	"testing"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

// The machine becomes a cluster, and is upgraded from an image of a registry. Its data is kept: that of Kubernetes, and
// the images. From its disk at a random moment of that, the node runs, with either firmware. (S-190, S-192)
func TestUpgradeKeepsData(t *testing.T) {
	layout, upgrade := e2etest.Installer(t, second)
	m := start(t, qemu.QEMU, layout)
	m.Gbctl("bootstrap", "-n", m.Node())
	m.Ready(m.Mark)
	m.Kubectl("create", "configmap", "mine", "--from-literal=kept=yes")
	m.pulled(false)
	ready := len(writesOf(t, m.disk()))
	m.Gbctl("-n", m.Node(), "upgrade", "--image", upgrade)
	m.slots("A good v1.0.0 no no", "B good v2.0.0 yes yes")
	if got := m.Kubectl("get", "configmap", "mine", "-o", "jsonpath={.data.kept}"); got != "yes" {
		t.Errorf("the data is %q", got)
	}
	m.pulled(false)
	m.Ready(m.Mark)
	m.Reached("the machine is upgraded")
	m.survives(first, second)
	if err := m.Cut(t.Context(), m.Node()); err != nil {
		t.Fatal(err)
	}
	runsAfterACut(t, m.base, writesOf(t, m.disk()), ready, diskGiB<<30)
}

// The machine goes back to the former system, and forward again. (S-190)
func TestRollbackOfAMachine(t *testing.T) {
	layout, upgrade := e2etest.Installer(t, second)
	m := start(t, qemu.QEMU, layout)
	upgraded := func() {
		t.Helper()
		m.Gbctl("-n", m.Node(), "upgrade", "--image", upgrade)
		m.slots("A good v1.0.0 no no", "B good v2.0.0 yes yes")
	}
	upgraded()
	m.Reached("the machine is upgraded")
	m.Gbctl("-n", m.Node(), "rollback")
	m.slots("A good v1.0.0 yes yes", "B good v2.0.0 no no")
	m.Reached("the former system runs")
	upgraded()
	m.Reached("the machine is upgraded again")
	m.survives(first, second)
}

// A system that was staged is started by the next ordinary reboot, and becomes good. (S-193)
func TestStagedSystem(t *testing.T) {
	layout, upgrade := e2etest.Installer(t, second)
	m := start(t, qemu.QEMU, layout)
	before := len(m.Text())
	m.Gbctl("-n", m.Node(), "upgrade", "--stage", "--image", upgrade)
	m.slots("A good v1.0.0 yes no", "B trying v2.0.0 no yes")
	if text := m.Text()[before:]; strings.Contains(text, "runs from slot") {
		t.Errorf("the machine has restarted:\n%s", text)
	}
	m.Reached("the system is staged, and doesn't run")
	m.Gbctl("-n", m.Node(), "reboot")
	m.Says(2*bootBudget, before, "Garboard v2.0.0 runs from slot B, which is trying")
	m.Reached("the reboot starts it")
	m.slots("A good v1.0.0 no no", "B good v2.0.0 yes yes")
	m.Reached("it is good")
	m.survives(first, second)
}
