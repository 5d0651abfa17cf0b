//go:build e2e && long

package media

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/network/registry"
)

// systemBudget is for an operation that restarts a machine, until its node is Ready again.
const systemBudget = 3 * time.Minute

// diskGiB is the size of a disk whose writes are recorded, in GiB.
const diskGiB = 10

// A machine with UEFI installs itself from a CD, and is a Ready node from its disk. It is upgraded from an image of a registry, with its
// data kept. A system whose kubelet never runs, and that of another CD, whose kernel panics, don't stay: the machine boots the former one, which
// says why. All writes to its disk are recorded: wherever the power had been cut, a whole system would have started, with its configuration. From a disk
// of such a moment, the node runs, with either firmware. (S-190, S-192, S-193, S-340)
func TestInstalledMachine(t *testing.T) {
	first, second := media.Options{Args: args, Version: "v1.0.0"}, media.Options{Args: args, Version: "v2.0.0"}
	third := media.Options{Args: append([]string{"rdinit=/nothing"}, args...), Version: "v3.0.0"}
	systems := map[string]string{}
	sick := e2etest.Without(t, media.Options{Args: args, Version: "v2.5.0"}, "usr/lib/os-release") // the kubelet's container mounts it
	for _, o := range []media.Options{first, second, third, sick} {
		systems[fmt.Sprintf("%x", sha256.Sum256(e2etest.System(t, o)))] = o.Version
	}
	disk := record(t)
	layout, upgrade := e2etest.Installer(t, second)
	sickLayout, sickImage := e2etest.Installer(t, sick)
	images := httptest.NewServer(registry.New(layout, sickLayout))
	t.Cleanup(images.Close)
	c, m := e2etest.Start(t, "installed", qemu.QEMU, e2etest.Medium(t, first), func(o *qemu.Options) {
		o.Boot.UEFI, o.DiskGiB, o.Mirrors = true, diskGiB, map[string][]string{e2etest.InstallerHost: {images.URL}}
	})
	c.Says(bootBudget, 0, "installing Garboard v1.0.0 on the medium GARBOARD")
	m.Reached("the machine installs itself")
	c.Says(2*bootBudget, 0, "runs from slot A, which is trying")
	m.Reached("the disk boots")
	c.Ready(m)
	c.Says(bootBudget, 0, "slot A is good")
	m.Reached("the node is Ready, from its disk")
	pulls(t, c, true)
	c.Kubectl("create", "configmap", "mine", "--from-literal=kept=yes")
	c = c.Patient(systemBudget)
	panics(t, c)
	m.Reached("the kernel has panicked, and the next boot has its last words")

	slots := func(want string) {
		t.Helper()
		c.Eventually(bootBudget, "the slots are as they should be", func() error {
			out, err := c.TryGbctl("-n", c.Node(), "get", "slots")
			if err != nil {
				return err
			}
			for line := range strings.Lines(out) {
				// The columns of all resources: node, namespace, type, ID, version; and the time of the slot's state.
				if f := strings.Fields(line); len(f) > 9 && strings.HasPrefix(f[3]+" "+strings.Join(append(f[5:9], f[10:]...), " "), want) {
					return nil
				}
			}
			return fmt.Errorf("%s, want %s", out, want)
		})
	}

	upgraded := func() {
		t.Helper()
		c.Gbctl("-n", c.Node(), "upgrade", "--image", upgrade)
		slots("A good v1.0.0 no no")
		slots("B good v2.0.0 yes yes")
		if got := c.Kubectl("get", "configmap", "mine", "-o", "jsonpath={.data.kept}"); got != "yes" {
			t.Errorf("the data is %q", got)
		}
	}
	upgraded()
	pulls(t, c, false)
	m.Reached("the machine is upgraded")

	// The machine sees another medium after its next start.
	var made qemu.Options
	e2etest.Medium(t, third)(&made)
	if err := os.Rename(made.Boot.Medium, c.Boot.Medium); err != nil {
		t.Fatal(err)
	}
	c.Gbctl("-n", c.Node(), "rollback")
	slots("A good v1.0.0 yes yes")
	slots("B good v2.0.0 no no")
	m.Reached("the former system runs, and another medium is in the machine")
	upgraded()
	m.Reached("the machine is upgraded again")
	well := disk.writes(t)
	out, err := c.Patient(proveBudget+systemBudget).TryGbctl("-n", c.Node(), "upgrade", "--image", sickImage)
	if err == nil || !strings.Contains(out+err.Error(), "slot A is bad") || !strings.Contains(out+err.Error(), "kubelet") {
		t.Errorf("%s, %v", out, err)
	}
	m.Reached("a system whose kubelet doesn't run has failed")
	slots("A bad v2.5.0 no no not healthy within 10m0s: ")
	slots("B good v2.0.0 yes yes")
	c.Ready(m)
	c.Gbctl("-n", c.Node(), "upgrade", "--stage")
	slots("A trying v3.0.0 no yes")
	slots("B good v2.0.0 yes no")
	m.Reached("its system is written, and doesn't run")
	out, err = c.TryGbctl("-n", c.Node(), "upgrade")
	if err == nil || !strings.Contains(out+err.Error(), "slot A is bad") {
		t.Errorf("%s, %v", out, err)
	}
	m.Reached("a system that panics has failed")
	slots("A bad v3.0.0 no no it was started, and didn't become healthy before the machine restarted")
	slots("B good v2.0.0 yes yes")
	c.Ready(m)
	for _, lossy := range []bool{false, true} {
		powerIsCut(t, lossy, disk.writes(t), systems, e2etest.SystemdBoot(t), diskGiB<<30)
	}
	m.Reached("wherever the power had been cut, a whole system would have started")
	stateSurvives(t, disk.writes(t), diskGiB<<30)
	m.Reached("and it would have had its configuration")
	if err := c.Cut(t.Context(), c.Nodes[0].Name); err != nil {
		t.Fatal(err)
	}
	runsAfterACut(t, well, diskGiB<<30) // later, a sick system may have its ten minutes
}

// pulls checks whether the node has pulled the images of etcd and of the kubelet in this boot. They are kept on its disk.
func pulls(t *testing.T, c *e2etest.Cluster, want bool) {
	t.Helper()
	for _, service := range []string{"etcd", "kubelet"} {
		if out := c.Gbctl("-n", c.Node(), "service", service); strings.Contains(out, "Pulling image") != want {
			t.Errorf("in this boot, the image of %s was pulled: %v, want %v:\n%s", service, !want, want, out)
		}
	}
}

// panics lets the kernel die. Firmware keeps its last messages, and the node has them after its next boot, with the
// logs of the boot before (duty 13).
func panics(t *testing.T, c *e2etest.Cluster) {
	t.Helper()
	const setting = "/proc/sys/kernel/unknown_nmi_panic"
	c.Gbctl("-n", c.Node(), "patch", "mc", "-p", `machine: {sysctls: {kernel.unknown_nmi_panic: "1"}}`)
	c.Eventually(bootBudget, "the kernel takes the setting", func() error {
		out, err := c.TryGbctl("-n", c.Node(), "read", setting)
		if err == nil && strings.TrimSpace(out) != "1" {
			err = fmt.Errorf("%s has %q", setting, out)
		}
		return err
	})
	if err := c.Interrupt(t.Context(), c.Nodes[0].Name); err != nil {
		t.Fatal(err)
	}
	c.Says(2*bootBudget, 0, "the kernel died in an earlier boot: NMI: Not continuing; gbctl logs crash")
	for want, args := range map[string][]string{
		"the kernel panicked: NMI: Not continuing":        {"reboots"},
		"Kernel panic - not syncing: NMI: Not continuing": {"logs", "crash"},
		"Linux version": {"logs", "kernel", "--boot", "-1"},
		// What was logged a second before the panic isn't on the disk.
		"configuration from state": {"logs", "machined", "--boot", "-1"},
	} {
		c.Eventually(bootBudget, "the node says "+want, func() error {
			out, err := c.TryGbctl(append([]string{"-n", c.Node()}, args...)...)
			if err == nil && !strings.Contains(out, want) {
				err = errors.New(out)
			}
			return err
		})
	}
}
