//go:build e2e && long

package create

import (
	"errors"
	"regexp"
	"testing"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

const (
	// emulatedBudget is for a machine to be ready whose processor may be emulated, and slowBudget for a request to it.
	emulatedBudget = 12 * createBudget
	slowBudget     = 4 * askBudget
)

// S-333: a machine of a user's development cluster has its system on its disk, and is ready when gbctl says so. It has
// a BIOS.
func TestS333CreateFromDisk(t *testing.T) {
	created(t, "from-disk", "/dev/vda .* Garboard", "--boot", "disk")
}

// S-333: such a machine boots over the network, with a BIOS, and is installed from the registry of the cluster. It has
// a second disk, which stays as it is, and a clock that is ten years behind.
func TestS333CreateFromNetwork(t *testing.T) {
	created(t, "from-network", `/dev/vda .* Garboard\n(?s:.*)/dev/vdb .* nothing\n`, "--boot", "pxe", "--disks", "2", "--bad-rtc")
}

// created makes a cluster of a machine with these flags, looks whether it is what was promised, with such disks, and
// removes it.
func created(t *testing.T, name, disks string, flags ...string) {
	t.Helper()
	u := newUser(t, name)
	m := e2etest.Marks(t)
	out := u.gbctl(emulatedBudget, append([]string{"cluster", "create", "--provisioner", qemu.QEMU, "--name", name, "--memory", "2560", "--disk", "8"}, flags...)...)
	t.Attr(e2etest.Booted, qemu.QEMU)
	m.Reached("the cluster is created")
	t.Log(out)
	inOrder(t, out, "nodes run in QEMU", "creating control plane nodes", "waiting for API", "cluster "+name+" serves, ")
	// What exit code 0 promises is checked once, without a wait.
	node := name + "-controlplane-1"
	if got := u.ask("get", "nodes", "-o", `jsonpath={.items[*].metadata.name} {.items[*].status.conditions[?(@.type=="Ready")].status}`); got != node+" True" {
		t.Errorf("the node is %s", got)
	}
	if out := u.gbctl(slowBudget, "-n", node, "disks"); !regexp.MustCompile(disks).MatchString(out) {
		t.Errorf("disks, want %s:\n%s", disks, out)
	}
	// It runs from its disk. Its system is proved a moment after the node is ready.
	eventually.That(t, slowBudget, "its system is good", func() error {
		out, err := e2etest.UserGbctl(t, slowBudget, "-n", node, "get", "slots")
		if err == nil && !regexp.MustCompile(` A +\d+ +good +\S+ +yes +yes`).MatchString(out) {
			err = errors.New(out)
		}
		return err
	})
	m.Reached("its system is good")
	u.destroy(name, "")
}
