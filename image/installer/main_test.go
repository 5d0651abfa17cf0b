package main

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/garboard-os/garboard/image/customize"
)

// RM is a list of paths. Each directory in the folder of extensions is one, and no file of the root file system.
func TestChange(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, name := range []string{"one", "two"} {
		if err := os.MkdirAll(filepath.Join(dir, customize.StageExtensions, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	c, err := change(dir, " /lib/modules\n/usr/sbin/cryptsetup  /etc/motd ")
	if err != nil || !slices.Equal(c.Remove, []string{"/lib/modules", "/usr/sbin/cryptsetup", "/etc/motd"}) {
		t.Errorf("%q, %v", c.Remove, err)
	}
	if at := filepath.Join(dir, customize.StageExtensions); !slices.Equal(c.Extensions, []string{filepath.Join(at, "one"), filepath.Join(at, "two")}) {
		t.Errorf("%q", c.Extensions)
	}
	if len(c.Overlays) != 1 || c.Overlays[0].Dir != dir || !slices.Equal(c.Overlays[0].Without, []string{customize.StageExtensions}) || !c.KernelLater {
		t.Errorf("%+v", c)
	}
	if c, err := change(t.TempDir(), ""); err != nil || len(c.Remove)+len(c.Extensions) > 0 {
		t.Errorf("nothing: %+v, %v", c, err)
	}
}
