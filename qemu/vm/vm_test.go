package vm

import (
	"flag"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the golden files")

func TestQEMUArguments(t *testing.T) {
	t.Parallel()
	for _, accelerator := range []string{"tcg", "kvm"} {
		const dir = "/home/me/.garboard/clusters/a,b/test-controlplane-1/"
		c := Config{
			Name: "test/test-controlplane-1", Accelerator: accelerator, CPUs: 2, MemoryMiB: 2048,
			Kernel: "/cache/vmlinuz", Initramfs: "/cache/initramfs", Cmdline: "garboard.debug=1",
			Console: dir + "console.log", Chart: dir + "boot-chart.svg", Configuration: dir + "config.yaml",
			Disk: dir + "disk.img", DiskGiB: 20, HardwareAddr: net.HardwareAddr{0x02, 0x67, 0x5a, 0x86, 0x00, 0xe6},
		}
		if accelerator == "kvm" {
			c.ClockOffset = -365 * 24 * time.Hour
			c.Hardware = Hardware{NIC: "e1000e", Disk: NVMe}
		}
		got := strings.Join(c.arguments(time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)), "\n") + "\n"
		golden := filepath.Join("testdata", "arguments-"+accelerator)
		if *update {
			if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(golden)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), got); diff != "" {
			t.Errorf("%s (-want +got; -update writes it):\n%s", golden, diff)
		}
	}
}

// A machine without a medium boots from its network card: in a UEFI with the firmware's own
// network, not with QEMU's.
func TestNetworkBoot(t *testing.T) {
	t.Parallel()
	c := Config{Hardware: Hardware{Medium: Network}, HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 1}}
	const card = "virtio-net-pci,netdev=net,mac=02:00:00:00:00:01,bootindex=0"
	args := c.arguments(time.Time{})
	if !slices.Contains(args, card) || slices.Contains(args, "-kernel") {
		t.Errorf("BIOS: %q", args)
	}
	c.Variables = "variables"
	if args = c.arguments(time.Time{}); !slices.Contains(args, card+",romfile=") {
		t.Errorf("UEFI: %q", args)
	}
}

func TestUUIDIsStable(t *testing.T) {
	t.Parallel()
	if a, b := machineUUID("a/n"), machineUUID("a/n"); a != b || len(a) != 36 || a == machineUUID("b/n") {
		t.Errorf("UUIDs %s, %s", a, b)
	}
}

func TestDiskIsMadeOnce(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "disk.img")
	if err := makeDisk(path, 1<<20); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("data"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := makeDisk(path, 1<<20); err != nil {
		t.Fatal(err)
	}
	if data, _ := os.ReadFile(path); string(data) != "data" {
		t.Errorf("disk is now %q", data)
	}
}
