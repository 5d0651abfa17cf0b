package disks

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/tools/testing/cis"
)

// The modes are exact, also of directories that an earlier release has made.
func TestDirectories(t *testing.T) {
	at := t.TempDir()
	if err := os.MkdirAll(filepath.Join(at, "lib/etcd"), 0o755); err != nil {
		t.Fatal(err)
	}
	// A pod of an earlier boot has described a device that isn't there.
	if err := os.MkdirAll(filepath.Join(at, "run/cdi"), 0o755); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second time, all is there
		if err := makeDirectories(at); err != nil {
			t.Fatal(err)
		}
	}
	// So has it put other things in the place of directories, and in the place where they are moved to.
	for _, path := range []string{"log", "lib/docker", "lib/kubelet", "run"} {
		path = filepath.Join(at, path)
		err := errors.Join(os.MkdirAll(path+".aside/deep", 0o755), os.Rename(path, path+".pod"))
		if strings.HasSuffix(path, "kubelet") {
			err = errors.Join(err, os.WriteFile(path, []byte("of a pod"), 0o600))
		} else {
			err = errors.Join(err, os.Symlink("/", path))
		}
		if err := errors.Join(err, makeDirectories(at)); err != nil {
			t.Fatal(err)
		}
	}
	if text, err := os.ReadFile(filepath.Join(at, "lib/kubelet.aside")); err != nil || string(text) != "of a pod" {
		t.Errorf("what was in the place of a directory: %q, %v", text, err)
	}
	if to, err := os.Readlink(filepath.Join(at, "run/cdi")); err != nil || to != "/run/cdi" {
		t.Errorf("/var/run/cdi is a link to %q, %v", to, err)
	}
	for _, p := range boot.HostPaths {
		below, ok := strings.CutPrefix(p.At, "/var/")
		if info, err := os.Stat(filepath.Join(at, below)); ok && (err != nil || info.Mode() != os.ModeDir|0o755) {
			t.Errorf("where %s leads to: %v, %v", p.Path, info, err)
		}
	}
	node := cis.Node{Files: map[string]cis.File{}}
	for _, dir := range directories {
		info, err := os.Stat(filepath.Join(at, dir.path))
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
