package disks

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/garboard-os/garboard/tools/testing/cis"
)

// The modes are exact, also of directories that an earlier release has made.
func TestDirectories(t *testing.T) {
	d := &Disks{o: Options{varDir: t.TempDir()}}
	if err := os.MkdirAll(filepath.Join(d.o.varDir, "lib/etcd"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := d.makeDirectories(); err != nil {
		t.Fatal(err)
	}
	node := cis.Node{Files: map[string]cis.File{}}
	for _, dir := range directories {
		info, err := os.Stat(filepath.Join(d.o.varDir, dir.path))
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode()&^os.ModeDir != dir.mode {
			t.Errorf("%s has the mode %s", dir.path, info.Mode())
		}
		node.Files["/var/"+dir.path] = cis.File{Mode: info.Mode()}
	}
	cis.Check(t, "disks", node)
}
