//go:build e2e && long

package installed

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

// proveBudget is what a system has to become healthy in. It isn't scaled: the node measures it.
const proveBudget = 10 * time.Minute

// A system whose kubelet never runs doesn't stay: the machine boots the former one, which says why. (S-190)
func TestSystemWithoutKubelet(t *testing.T) {
	// the kubelet's container mounts it
	sick := e2etest.Without(t, media.Options{Args: args, Version: "v2.5.0"}, "usr/lib/os-release")
	layout, image := e2etest.Installer(t, sick)
	m := start(t, qemu.QEMU, layout)
	m.fails(proveBudget+systemBudget, []string{"slot B is bad", "kubelet"}, "upgrade", "--image", image)
	m.Reached("it has failed")
	m.slots("A good v1.0.0 yes yes", "B bad v2.5.0 no no not healthy within 10m0s: ")
	runsKubelet(m.Cluster)
	m.survives(first, sick)
}

// A system whose kernel panics, from another medium that is in the machine, doesn't stay either, and the medium isn't
// booted. (S-190, S-193)
func TestSystemThatPanics(t *testing.T) {
	k := original(t, qemu.QEMU)
	c, mark := k.Start(t, e2etest.Medium(t, third))
	c.Says(2*bootBudget, 0, "runs from slot A, which is good")
	runsKubelet(c)
	m := machine{c.Patient(systemBudget), mark, t, originalDisk(k)}
	m.Gbctl("-n", m.Node(), "upgrade", "--stage")
	m.slots("A good v1.0.0 yes no", "B trying v3.0.0 no yes")
	m.Reached("it is written, and doesn't run")
	m.fails(systemBudget, []string{"slot B is bad"}, "upgrade")
	m.Reached("it has failed")
	m.slots("A good v1.0.0 yes yes", "B bad v3.0.0 no no it was started, and didn't become healthy before the machine restarted")
	runsKubelet(m.Cluster)
	m.survives(first, third)
}

// The kernel dies. Firmware keeps its last messages, and the node has them after its next boot, with the logs of the
// boot before (duty 13).
func TestKernelThatDies(t *testing.T) {
	m := start(t, qemu.QEMU)
	const setting = "/proc/sys/kernel/unknown_nmi_panic"
	m.Gbctl("-n", m.Node(), "patch", "mc", "-p", `machine: {sysctls: {kernel.unknown_nmi_panic: "1"}}`)
	m.Eventually(bootBudget, "the kernel takes the setting", func() error {
		out, err := m.TryGbctl("-n", m.Node(), "read", setting)
		if err == nil && strings.TrimSpace(out) != "1" {
			err = fmt.Errorf("%s has %q", setting, out)
		}
		return err
	})
	if err := m.Interrupt(t.Context(), m.Node()); err != nil {
		t.Fatal(err)
	}
	m.Says(2*bootBudget, 0, "the kernel died in an earlier boot: NMI: Not continuing; gbctl logs crash")
	for want, args := range map[string][]string{
		"the kernel panicked: NMI: Not continuing":        {"reboots"},
		"Kernel panic - not syncing: NMI: Not continuing": {"logs", "crash"},
		"Linux version": {"logs", "kernel", "--boot", "-1"},
		// What was logged a second before the panic isn't on the disk.
		"configuration from state": {"logs", "machined", "--boot", "-1"},
	} {
		m.Eventually(bootBudget, "the node says "+want, func() error {
			out, err := m.TryGbctl(append([]string{"-n", m.Node()}, args...)...)
			if err == nil && !strings.Contains(out, want) {
				err = errors.New(out)
			}
			return err
		})
	}
	m.Reached("the next boot has its last words")
	stateSurvives(t, m.base, writesOf(t, m.disk()), diskGiB<<30) // nothing else was written that a boot needs
}
