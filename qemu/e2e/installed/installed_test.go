//go:build e2e && long

// Package installed tests what becomes of an installed machine: upgrades, systems that fail, power cuts, a reset. One
// machine with UEFI installs itself from a CD, with all writes to its disk recorded, and each test starts a copy of it
// (e2etest.Keep). It is a control plane that waits for its bootstrap: an emulated API server takes minutes, and most
// claims aren't about Kubernetes. What waits doesn't count when a new system proves itself, but all other services do,
// the kubelet among them.
package installed

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/network/registry"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	// bootBudget is for firmware, boot loader and kernel, as on real hardware, until the machine is on the network.
	bootBudget = 40 * time.Second
	// systemBudget is for an operation that restarts a machine, until its services are up again.
	systemBudget = 3 * time.Minute
	// diskGiB is the size of the disk, in GiB.
	diskGiB   = 10
	memoryMiB = 3072 // also for the control plane of TestUpgradeKeepsData
)

var (
	args = e2etest.SerialArgs()
	// The systems of the tests, and the medium of the first one.
	first, second = media.Options{Args: args, Version: "v1.0.0"}, media.Options{Args: args, Version: "v2.0.0"}
	// its kernel panics
	third = media.Options{Args: append([]string{"rdinit=/nothing"}, args...), Version: "v3.0.0"}
)

// kept is the machine of all tests, once it is there.
var kept *e2etest.Kept

// original installs the machine, unless it is there.
func original(t *testing.T, provisioner string) *e2etest.Kept {
	t.Helper()
	e2etest.RecordWrites(t)
	if kept != nil {
		return kept
	}
	kept = e2etest.Keep(t, "installed", provisioner, "the kubelet runs, and all images are there", func(c *e2etest.Cluster, m *e2etest.Mark) {
		c.Says(bootBudget, 0, "installing Garboard v1.0.0 on the medium GARBOARD")
		m.Reached("the machine installs itself")
		c.Says(2*bootBudget, 0, "runs from slot A, which is trying")
		m.Reached("the disk boots")
		c.Says(bootBudget, 0, "slot A is good")
		m.Reached("its system is good")
		runsKubelet(c)
		m.Reached("the kubelet runs")
		first := machine{c.Patient(systemBudget), m, t, ""}
		first.pulled(true)
		for _, image := range config.DefaultImages() { // otherwise each upgrade pulls them
			first.Gbctl("-n", c.Node(), "images", "pull", "--kubernetes", image)
		}
		m.Reached("all images are there")
	}, e2etest.Nodes(1, 0), e2etest.Medium(t, first), func(o *qemu.Options) {
		o.Boot.UEFI, o.DiskGiB, o.MemoryMiB = true, diskGiB, memoryMiB
		// copies have another one in its place
		o.Mirrors = map[string][]string{e2etest.InstallerHost: {"http://127.0.0.1:1"}}
		o.ControlPlanePatches = [][]byte{[]byte("machine: {type: controlplane}\n")}
	})
	return kept
}

func runsKubelet(c *e2etest.Cluster) {
	c.Eventually(bootBudget, "the kubelet runs", func() error {
		out, err := c.TryGbctl("-n", c.Node(), "services")
		if err == nil && !e2etest.Row(out, "kubelet", "Running", "OK") {
			err = errors.New(out)
		}
		return err
	})
}

// A machine is a copy of the original, whose writes are recorded, too.
type machine struct {
	*e2etest.Cluster
	*e2etest.Mark
	t    *testing.T
	base string // the disk of the original
}

// start starts a copy. Its network has a registry with these installer images.
func start(t *testing.T, provisioner string, installers ...string) machine {
	t.Helper()
	k := original(t, provisioner)
	images := httptest.NewServer(registry.New(installers...))
	t.Cleanup(images.Close)
	c, m := k.Start(t, func(o *qemu.Options) { o.Mirrors = map[string][]string{e2etest.InstallerHost: {images.URL}} })
	c.Says(2*bootBudget, 0, "runs from slot A, which is good")
	c.Says(bootBudget, 0, "machined", "configuration from state")
	runsKubelet(c)
	m.Reached("a copy of the installed machine runs")
	return machine{c.Patient(systemBudget), m, t, originalDisk(k)}
}

// pulled checks whether the node has pulled the images of etcd and of the kubelet in this boot. They are kept on its
// disk.
func (m machine) pulled(want bool) {
	m.t.Helper()
	for _, service := range []string{"etcd", "kubelet"} {
		if out := m.Gbctl("-n", m.Node(), "service", service); strings.Contains(out, "Pulling image") != want {
			m.t.Errorf("in this boot, the image of %s was pulled: %v, want %v:\n%s", service, !want, want, out)
		}
	}
}

// originalDisk is the disk with which all copies begin.
func originalDisk(c *e2etest.Kept) string {
	return filepath.Join(c.Dir, "installed-controlplane-1", "disk.img")
}

func (m machine) disk() string { return filepath.Join(m.Dir(), m.Node(), "disk.img") }

// slots waits until a slot is as it should be: its name, state, version, and whether it runs and boots next; and the
// beginning of the reason.
func (m machine) slots(want ...string) {
	m.t.Helper()
	for _, want := range want {
		m.Eventually(bootBudget, "a slot is "+want, func() error {
			out, err := m.TryGbctl("-n", m.Node(), "get", "slots")
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
}

// fails runs a command that must fail with these words.
func (m machine) fails(budget time.Duration, words []string, args ...string) {
	m.t.Helper()
	out, err := m.Patient(budget).TryGbctl(append([]string{"-n", m.Node()}, args...)...)
	for _, want := range words {
		if err == nil || !strings.Contains(out+err.Error(), want) {
			m.t.Errorf("gbctl %s says %v, want %q\n%s", strings.Join(args, " "), err, want, out)
		}
	}
}

// survives checks that wherever the power of the machine had been cut in this test, a whole one of these systems would
// have started, with its configuration.
func (m machine) survives(systems ...media.Options) {
	m.t.Helper()
	survives(m.t, m.base, writesOf(m.t, m.disk()), systems...)
	m.Reached("wherever the power had been cut, a whole system would have started, with its configuration")
}

// survives is that of a machine whose disk had this content before all of the writes; "": none.
func survives(t *testing.T, base string, all []write, systems ...media.Options) {
	t.Helper()
	known := map[string]string{}
	for _, o := range systems {
		known[fmt.Sprintf("%x", sha256.Sum256(e2etest.System(t, o)))] = o.Version
	}
	for _, lossy := range []bool{false, true} {
		powerIsCut(t, lossy, base, all, known, e2etest.SystemdBoot(t), diskGiB<<30)
	}
	stateSurvives(t, base, all, diskGiB<<30)
}

// The machine installs itself from a CD. While it does, it may start no system from its disk, but never a broken one.
// (S-340)
func TestInstallation(t *testing.T) {
	survives(t, "", writesOf(t, originalDisk(original(t, qemu.QEMU))), first)
}
