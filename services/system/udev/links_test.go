package udev

import (
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/garboard-os/garboard/services/core/logs"
)

// Devices have the links that the rules of systemd's udev make, as long as they are there.
func TestLinks(t *testing.T) {
	t.Parallel()
	sysfs, dev := t.TempDir(), t.TempDir()
	for path, text := range map[string]string{
		"devices/pci0/virtio0/block/vda/serial":           "a b/c\n",
		"devices/pci0/virtio0/block/vda/vda2/partition":   "2\n",
		"devices/pci0/nvme/nvme0/nvme0n1/wwid":            "eui.0025385b71b00e5e\n",
		"devices/pci0/host0/sda/device/wwid":              "naa.5000c500a1b2c3d4\n",
		"devices/pci0/host0/sdb/device/wwid":              "t10.ATA     QEMU HARDDISK   QM00001\n",
		"devices/pci0/virtio1/virtio-ports/vport1p1/name": "org.qemu.guest_agent.0\n",
		"devices/pci0/virtio1/virtio-ports/vport1p2/name": "..\n",
		"devices/pci0/virtio1/virtio-ports/vport1p3/dev":  "1:2\n", // has no name yet
	} {
		path = filepath.Join(sysfs, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for class, devices := range map[string][]string{
		"block":        {"pci0/virtio0/block/vda", "pci0/virtio0/block/vda/vda2", "pci0/nvme/nvme0/nvme0n1", "pci0/host0/sda", "pci0/host0/sdb"},
		"virtio-ports": {"pci0/virtio1/virtio-ports/vport1p1", "pci0/virtio1/virtio-ports/vport1p2", "pci0/virtio1/virtio-ports/vport1p3"},
	} {
		dir := filepath.Join(sysfs, "class", class)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		for _, device := range devices {
			if err := os.Symlink(filepath.Join(sysfs, "devices", device), filepath.Join(dir, filepath.Base(device))); err != nil {
				t.Fatal(err)
			}
		}
	}
	d := &daemon{sysfs: sysfs, dev: dev, log: logs.New(io.Discard).Logger(ID)}
	links := map[string]string{
		"disk/by-id/virtio-a_b_c": "../../vda", "disk/by-id/virtio-a_b_c-part2": "../../vda2",
		"disk/by-id/nvme-eui.0025385b71b00e5e": "../../nvme0n1", "disk/by-id/wwn-0x5000c500a1b2c3d4": "../../sda",
		"virtio-ports/org.qemu.guest_agent.0": "../vport1p1",
	}
	check := func() {
		t.Helper()
		found := 0
		for _, pattern := range []string{"disk/by-id/*", "virtio-ports/*"} {
			all, _ := filepath.Glob(filepath.Join(dev, pattern))
			found += len(all)
		}
		if found != len(links) {
			t.Errorf("there are %d links, want %d", found, len(links))
		}
		for name, want := range links {
			if got, err := os.Readlink(filepath.Join(dev, name)); got != want {
				t.Errorf("%s leads to %q, want %q (%v)", name, got, want, err)
			}
		}
	}
	d.linkAll()
	d.linkAll()
	check()
	// The kernel has given the name to another device.
	d.take(Uevent{Action: "change", Subsystem: "block", DevPath: "/devices/pci0/virtio0/block/vda", DevName: "vdb"})
	links["disk/by-id/virtio-a_b_c"] = "../../vdb"
	check()
	// The other path to the same disk is still there.
	d.take(Uevent{Action: "remove", Subsystem: "block", DevPath: "/devices/pci0/virtio0/block/vdb", DevName: "vdb"})
	links["disk/by-id/virtio-a_b_c"] = "../../vda"
	check()
	if err := os.Remove(filepath.Join(sysfs, "class/block/vda")); err != nil {
		t.Fatal(err)
	}
	d.take(Uevent{Action: "remove", Subsystem: "block", DevPath: "/devices/pci0/virtio0/block/vda", DevName: "vda"})
	delete(links, "disk/by-id/virtio-a_b_c")
	check()
	d.take(Uevent{Action: "add", Subsystem: "tty", DevPath: "/devices/x", DevName: "tty9"})
	check()
}
