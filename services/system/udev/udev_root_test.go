package udev

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// A write to a device's uevent file makes the kernel send an event, the same as
// for a new device.
func TestListenReceivesEventsOfTheKernel(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: writes to /sys/class/mem/null/uevent")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	events, err := Listen(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile("/sys/class/mem/null/uevent", []byte("add"), 0); err != nil {
		t.Fatal(err)
	}
	for e := range events {
		if e.DevName == "null" && e.Action == "add" && e.Seq > 0 {
			cancel()
			for range events { // closed after ctx has ended
			}
			return
		}
	}
	t.Error("no event for /dev/null")
}

func TestMakeStaticNodes(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: mknod")
	}
	dir, dev := t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "modules.devname"), []byte("# nodes\ntun net/tun c10:200\ndm_mod mapper/control c10:236\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for range 2 { // an existing node isn't changed
		if err := makeStaticNodes(dir, dev); err != nil {
			t.Fatal(err)
		}
	}
	info, err := os.Stat(filepath.Join(dev, "net/tun"))
	if err != nil || info.Mode() != os.ModeDevice|os.ModeCharDevice|0o666 {
		t.Errorf("%v, %v", info, err)
	}
	if info, err := os.Stat(filepath.Join(dev, "mapper/control")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
}
