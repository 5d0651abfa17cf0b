package vm

import (
	"bytes"
	"flag"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/zstd"
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

// A disk begins with the image, and has its own size.
func TestDiskBeginsWithTheImage(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	content := make([]byte, 5<<20+3)
	content[0], content[3<<20], content[len(content)-1] = 1, 2, 3
	encoder, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	image, path := filepath.Join(dir, "image"), filepath.Join(dir, "disk")
	if err := os.WriteFile(image, encoder.EncodeAll(content, nil), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := makeDisk(path, image, 4<<20); err == nil {
		t.Error("a disk that is smaller than its image")
	}
	if err := makeDisk(path, image, 8<<20); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(path)
	if err != nil || !bytes.Equal(got, append(content, make([]byte, 8<<20-len(content))...)) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

// Further disks are devices of their own, with a serial number of their own.
func TestDisks(t *testing.T) {
	t.Parallel()
	args := strings.Join(Config{Name: "c/n", Disk: "/d/disk.img", Disks: 3}.arguments(time.Time{}), "\n")
	for _, want := range []string{"file=/d/disk.img\n", "file=/d/disk.img-2\n", "file=/d/disk.img-3\n"} {
		if strings.Count(args, want) != 1 {
			t.Errorf("not once %q:\n%s", want, args)
		}
	}
	serials := map[string]bool{}
	for _, found := range regexp.MustCompile(`drive=disk.*serial=(\S+)`).FindAllStringSubmatch(args, -1) {
		serials[found[1]] = true
	}
	if len(serials) != 3 {
		t.Errorf("serial numbers %v", serials)
	}
}

func TestDiskIsMadeOnce(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "disk.img")
	if err := makeDisk(path, "", 1<<20); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("data"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := makeDisk(path, "", 1<<20); err != nil {
		t.Fatal(err)
	}
	if data, _ := os.ReadFile(path); string(data) != "data" {
		t.Errorf("disk is now %q", data)
	}
}
