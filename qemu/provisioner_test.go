package qemu

import (
	"errors"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu/container"
	"github.com/garboard-os/garboard/qemu/network"
	"github.com/garboard-os/garboard/qemu/vm"
	"github.com/google/go-cmp/cmp"
)

func TestChoice(t *testing.T) {
	t.Parallel()
	absent, hangs := errors.New("not found"), errors.New("no hardware virtualisation: it hangs")
	for _, tc := range []struct {
		name      string
		want      string
		root      bool
		qemu, kvm error
		text      string
		docker    error
	}{
		{"KVM works", Auto, false, nil, nil, "nodes run in QEMU (kvm): KVM ran a test guest", absent},
		{"KVM works, root", Auto, true, nil, nil, "nodes run in QEMU (kvm): KVM ran a test guest", absent},
		{"KVM hangs, root", Auto, true, nil, hangs, "nodes run as containers: no hardware virtualisation: it hangs", absent},
		{"KVM hangs, user", "", false, nil, hangs, "nodes run in QEMU (tcg): emulated, ten times slower; no hardware virtualisation: it hangs, and containers need root", absent},
		{"no QEMU, root", Auto, true, absent, nil, "nodes run as containers: no QEMU here (not found)", absent},
		{"no QEMU, user", Auto, false, absent, nil, "error: not found; install qemu-system-x86 or Docker, or run as root to have nodes as containers", absent},
		{"container", Container, true, nil, nil, "nodes run as containers: asked for", absent},
		{"container, user", Container, false, nil, nil, "error: nodes as containers need root, for namespaces and cgroups: run as root (sudo), or take the provisioner docker or qemu", absent},
		{"QEMU", QEMU, true, nil, hangs, "nodes run in QEMU (tcg): asked for; emulated in software, as there is no hardware virtualisation: it hangs", absent},
		{"QEMU with KVM", QEMU, true, nil, nil, "nodes run in QEMU (kvm): asked for; KVM ran a test guest", absent},
		{"unknown", "podman", true, nil, nil, `error: provisioner "podman": must be qemu, container, docker or auto`, absent},
		{"KVM hangs, user, Docker", Auto, false, nil, hangs, "nodes run as containers of Docker: no hardware virtualisation: it hangs", nil},
		{"no QEMU, user, Docker", Auto, false, absent, nil, "nodes run as containers of Docker: no QEMU here (not found)", nil},
		{"no QEMU, root, Docker", Auto, true, absent, nil, "nodes run as containers: no QEMU here (not found)", nil},
		{"Docker", Docker, true, nil, nil, "nodes run as containers of Docker: asked for", nil},
		{"Docker, which isn't there", Docker, true, nil, nil, "error: not found", absent},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c, err := chooser{
				root:   tc.root,
				qemu:   func() error { return tc.qemu },
				kvm:    func() error { return tc.kvm },
				docker: func() error { return tc.docker },
			}.choose(tc.want)
			got := c.String()
			if err != nil {
				got = "error: " + err.Error()
			}
			if got != tc.text {
				t.Errorf("got  %s\nwant %s", got, tc.text)
			}
		})
	}
}

// All settings of a plan for a virtual machine are in its configuration.
func TestMachineOfAPlan(t *testing.T) {
	t.Parallel()
	p := testPlan(QEMU)
	p.Accelerator, p.Nodes[0].ClockOffset = "kvm", -time.Hour
	const dir = "/home/me/.garboard/clusters/a,b/test-controlplane-1/"
	want := vm.Config{
		Name: "test/test-controlplane-1", Accelerator: "kvm", CPUs: 2, MemoryMiB: 2048,
		Kernel: "/cache/vmlinuz", Initramfs: "/cache/initramfs", Cmdline: "garboard.debug=1",
		Console: dir + "console.log", Chart: dir + "boot-chart.svg", Configuration: dir + "config.yaml",
		Disk: dir + "disk.img", DiskGiB: 20, HardwareAddr: network.HardwareAddress("test", "test-controlplane-1"), ClockOffset: -time.Hour,
	}
	m := machines{plan: p, dir: "/home/me/.garboard/clusters/a,b"}
	if diff := cmp.Diff(want, m.config(p.Nodes[0])); diff != "" {
		t.Error(diff)
	}
	m.plan.Unplugged, m.plan.Unconfigured = true, true
	want.Unplugged, want.Configuration = true, ""
	if diff := cmp.Diff(want, m.config(p.Nodes[0])); diff != "" {
		t.Errorf("without network and configuration:\n%s", diff)
	}
}

func TestContainerOfAPlan(t *testing.T) {
	t.Parallel()
	p := testPlan(Container)
	p.Boot = Boot{Rootfs: "/cache/root.sqsh", Init: "/cache/init", Sandbox: "/cache/sandbox"}
	c := containers{plan: p, dir: "/home/me/.garboard/clusters/test"}
	const dir = "/home/me/.garboard/clusters/test/test-controlplane-1/"
	want := container.Config{
		ID: "test.test-controlplane-1", Hostname: "test-controlplane-1",
		Sandbox: "/cache/sandbox", Rootfs: "/cache/root.sqsh", Init: "/cache/init",
		Work: dir + "work", State: dir + "state", Ephemeral: dir + "var", Configuration: dir + "config.yaml", Console: dir + "console.log",
		Cgroup: c.dir.nodeCgroup("test-controlplane-1"), CPUs: 2, MemoryMiB: 2048,
	}
	if diff := cmp.Diff(want, c.config(p.Nodes[0])); diff != "" {
		t.Error(diff)
	}
}
