package disk

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/config"
)

// All properties that are given must fit, and those that don't are named.
func TestSelectedDisk(t *testing.T) {
	t.Parallel()
	disk := Disk{Identity: Identity{Size: 500_000_000_000, Model: "Samsung SSD 980", Serial: "S64D", WWID: "eui.0025"}, BusPath: "/pci0000:00/0000:00:1d.0/nvme/nvme0", Type: config.DiskNVMe}
	size := func(text string) config.DiskSize {
		var s config.DiskSize
		if err := s.UnmarshalText([]byte(text)); err != nil {
			t.Fatal(err)
		}
		return s
	}
	for _, tt := range []struct {
		selector config.DiskSelector
		want     string
	}{
		{config.DiskSelector{}, ""},
		{config.DiskSelector{Size: size(">= 500GB"), Model: "Samsung*", Serial: "S64D", WWID: "eui.*", BusPath: "*/nvme/nvme?", Type: config.DiskNVMe}, `its busPath is "/pci0000:00/0000:00:1d.0/nvme/nvme0"`},
		{config.DiskSelector{Size: size("==500GB"), Model: "*SSD*", BusPath: "/pci0000:00/0000:00:1d.0/*"}, ""},
		{config.DiskSelector{Size: size("> 500GB")}, "its size isn't > 500000000000 bytes"},
		{config.DiskSelector{Size: size("< 400 GiB")}, "its size isn't < 429496729600 bytes"},
		{config.DiskSelector{Size: size("<= 1TB"), Type: config.DiskHDD}, "its type is nvme"},
		{config.DiskSelector{Size: size("< 400GB"), Type: config.DiskHDD, Model: "WD*", Serial: "S64D", WWID: "naa.*"},
			`its size isn't < 400000000000 bytes, its type is nvme, its model is "Samsung SSD 980", its wwid is "eui.0025"`},
		{config.DiskSelector{Model: "Samsung"}, `its model is "Samsung SSD 980"`},
		{config.DiskSelector{Serial: "s64d"}, `its serial is "S64D"`},
		{config.DiskSelector{WWID: "naa.*"}, `its wwid is "eui.0025"`},
	} {
		if got := disk.Misfit(tt.selector); got != tt.want {
			t.Errorf("%+v: %q, want %q", tt.selector, got, tt.want)
		}
	}
}

// A disk on the other side of a network is known by its place in sysfs.
func TestDisksOverANetwork(t *testing.T) {
	t.Parallel()
	sys := t.TempDir()
	for path, transport := range map[string]string{
		"platform/host2/session1/target2:0:0/2:0:0:0/block/sdb": "", "virtual/nvme-fabrics/ctl/nvme0/nvme0n1": "",
		"pci0000:00/0000:00:1f.2/ata1/host0/target0:0:0/0:0:0:0/block/sda": "", "pci0000:00/0000:00:1d.0/nvme/nvme1/nvme1n1": "",
		"virtual/nvme-subsystem/nvme-subsys2/nvme2n1": "pcie", "virtual/nvme-subsystem/nvme-subsys3/nvme3n1": "tcp",
	} {
		dir := filepath.Join(sys, path)
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if transport != "" {
			controller := filepath.Join(filepath.Dir(dir), "nvme9")
			if err := errors.Join(os.Mkdir(controller, 0o700), os.WriteFile(filepath.Join(controller, "transport"), []byte(transport+"\n"), 0o600)); err != nil {
				t.Fatal(err)
			}
		}
		if got, want := isRemote(dir), strings.Contains(path, "session") || strings.Contains(path, "fabrics") || transport == "tcp"; got != want {
			t.Errorf("%s is remote: %v", path, got)
		}
	}
	if isDisk("rbd0") || isDisk("drbd1") || !isDisk("sda") {
		t.Error("network devices count as disks")
	}
}
