package controlplane

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// A program reads its volumes, and writes to those that it may write to, also with files of a release in
// which it was root. The log names those that it can't use. What a pod has put there isn't given away,
// nor what belongs to another program.
func TestVolumesOfPrograms(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: files are given to users")
	}
	dir, err := os.MkdirTemp("/var/tmp", "volumes")
	put(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	at := func(name string) string { return filepath.Join(dir, name) }
	for _, d := range []string{"audit", "deep/below", "attacked", "etcd", "shared"} {
		put(t, os.MkdirAll(at(d), 0o700))
	}
	put(t, os.WriteFile(at("audit/old.log"), []byte("x"), 0o600))
	put(t, os.WriteFile(at("secret"), []byte("x"), 0o600))
	put(t, os.WriteFile(at("private"), []byte("x"), 0o600))
	put(t, os.MkdirAll(at("keys"), 0o755))
	put(t, os.WriteFile(at("keys/key"), []byte("x"), 0o600))
	put(t, os.Symlink(at("secret"), at("keys/link")))
	put(t, os.WriteFile(at("public"), []byte("x"), 0o644))
	put(t, os.Link(at("secret"), at("attacked/x.log")))
	put(t, os.WriteFile(at("etcd/db"), []byte("x"), 0o600))
	put(t, os.WriteFile(at("shared/a"), []byte("x"), 0o600))
	put(t, os.WriteFile(at("shared/of-etcd"), []byte("x"), 0o600))
	for _, name := range []string{"etcd", "etcd/db", "shared/of-etcd"} {
		put(t, os.Lchown(at(name), boot.User("etcd"), boot.User("etcd")))
	}
	c := testConfig(t)
	for _, v := range []struct {
		name     string
		readOnly bool
	}{{"audit", false}, {"new", false}, {"deep", false}, {"attacked", false}, {"etcd", false}, {"shared", false}, {"secret", true}, {"private", true}, {"keys", true}, {"public", true}, {"missing", true}} {
		c.Cluster.APIServer.ExtraVolumes = append(c.Cluster.APIServer.ExtraVolumes, config.Volume{HostPath: at(v.name), MountPath: at(v.name), ReadOnly: v.readOnly})
	}
	f := start(t, c)
	f.etcd(true)
	eventually.That(t, patience, "the pod", func() error { _, err := os.Stat(f.file(apiServer)); return err })
	for name, want := range map[string]int{
		"audit": boot.User(apiServer), "audit/old.log": boot.User(apiServer), "new": boot.User(apiServer),
		"private": boot.User(apiServer), "keys": 0, "keys/key": boot.User(apiServer), "deep": 0, "deep/below": 0, "attacked/x.log": 0, "secret": 0, "public": 0,
		"etcd": boot.User("etcd"), "etcd/db": boot.User("etcd"), "shared/of-etcd": boot.User("etcd"), "shared/a": boot.User(apiServer),
	} {
		info, err := os.Stat(at(name))
		put(t, err)
		if uid := int(info.Sys().(*syscall.Stat_t).Uid); uid != want {
			t.Errorf("%s belongs to user %d, want %d", name, uid, want)
		}
	}
	log := strings.Join(f.logs.Tail(controllerLog, 1000), "\n")
	for name, want := range map[string]bool{"audit": false, "new": false, "deep": true, "attacked": true, "etcd": true, "shared": true, "secret": true, "private": false, "keys": false, "public": false, "missing": false} {
		if said := strings.Contains(log, "may not use "+at(name)+" of its extraVolumes"); said != want {
			t.Errorf("the log names %s: %v, want %v\n%s", name, said, want, log)
		}
	}
	if want := at("secret") + " can't be given to user 61: it is neither a directory nor a file with one name, or it is of another program"; !strings.Contains(log, want) {
		t.Errorf("no %q in\n%s", want, log)
	}
}
