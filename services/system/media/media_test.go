package media

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Volumes of pods aren't media, whatever their labels are.
func TestMediaArePluggedIn(t *testing.T) {
	t.Parallel()
	for path, want := range map[string]struct {
		removable string
		is        bool
	}{
		"devices/pci0000:00/0000:00:1f.2/ata3/host2/target2:0:0/2:0:0:0/block/sr0":                          {"1", true},
		"devices/pci0000:00/0000:00:14.0/usb1/1-1/1-1:1.0/host6/target6:0:0/6:0:0:0/block/sdb":              {"0", true},
		"devices/pci0000:00/0000:00:14.0/usb1/1-1/1-1:1.0/host6/target6:0:0/6:0:0:0/block/sdb/sdb1":         {"1", true},
		"devices/LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00/f8b3781a/host0/target0:0:0/0:0:0:1/block/sr0": {"1", true},
		"devices/pci0000:00/0000:00:05.0/virtio2/block/vdb":                                                 {"0", false},
		"devices/pci0000:00/0000:00:06.0/nvme/nvme1/nvme1n1":                                                {"0", false},
		"devices/platform/host4/session1/target4:0:0/4:0:0:0/block/sr1":                                     {"1", false},
		"devices/pci0000:00/0000:00:07.0/host5/session2/target5:0:0/5:0:0:0/block/sr1":                      {"1", false},
		"devices/pci0000:00/0000:00:08.0/host7/rport-7:0-0/target7:0:0/7:0:0:0/block/sdc":                   {"1", false},
		"devices/platform/vhci_hcd.0/usb3/3-1/3-1:1.0/host8/target8:0:0/8:0:0:0/block/sdd":                  {"1", false},
		"devices/virtual/block/loop0": {"1", false},
		"devices/virtual/block/nbd0":  {"1", false},
	} {
		full := filepath.Join(t.TempDir(), path)
		whole := full
		if filepath.Base(path) == "sdb1" {
			whole = filepath.Dir(full)
		}
		if err := os.MkdirAll(full, 0o700); err != nil {
			t.Fatal(err)
		}
		if whole != full {
			if err := os.WriteFile(filepath.Join(full, "partition"), []byte("1\n"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(filepath.Join(whole, "removable"), []byte(want.removable+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := pluggedIn(full); got != want.is {
			t.Errorf("%s: %v", path, got)
		}
	}
}

// What isn't a file of the volume is no file, and isn't waited for.
func TestFilesOfAVolume(t *testing.T) {
	t.Parallel()
	dir, outside := t.TempDir(), filepath.Join(t.TempDir(), "secret")
	for _, path := range []string{outside, filepath.Join(dir, "config.yaml")} {
		if err := os.WriteFile(path, []byte("text"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mkfifo(filepath.Join(dir, "pipe"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, to := range map[string]string{"out": outside, "in": "config.yaml"} {
		if err := os.Symlink(to, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	err := withFiles(dir, func(volume fs.FS) error {
		for name, want := range map[string]string{"config.yaml": "", "in": "", "pipe": "it is no file", "out": "escapes", "none": "no such file"} {
			text, err := fs.ReadFile(volume, name)
			if want == "" && (err != nil || string(text) != "text") || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
				t.Errorf("%s: %q, %v", name, text, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}
