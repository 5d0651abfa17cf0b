package etcd

import (
	"net/netip"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/tools/testing/cis"
)

func TestCIS(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: files are given to etcd's user")
	}
	args := arguments(self{"cp-1", netip.MustParseAddr("10.5.0.2")}, record{}, nil)
	node := cis.Node{Commands: map[string][]string{ID: args}, Files: map[string]cis.File{}}
	n := former(t)
	must(t, n.prepare(t.Context(), silent, silent))
	must(t, filepath.WalkDir(n.o.DataDir, func(path string, entry os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		user := ""
		if st := info.Sys().(*syscall.Stat_t); int(st.Uid) == boot.User(ID) && int(st.Gid) == boot.User(ID) {
			user = ID
		}
		rest, err := filepath.Rel(n.o.DataDir, path)
		node.Files[filepath.Join(boot.EtcdDataDir, rest)] = cis.File{Mode: info.Mode(), User: user}
		if user != ID {
			t.Errorf("%s belongs to %+v", path, info.Sys())
		}
		return err
	}))
	cis.Check(t, "etcd", node)
	must(t, n.prepare(t.Context(), silent, silent)) // a second time there is nothing to do
}

// former is a member with data of a release in which etcd was root.
func former(t *testing.T) *node {
	n := newRig(t).node("cp-1", config.ControlPlane, netip.MustParseAddr("127.0.0.1"))
	for _, dir := range []string{"member/wal", "member/snap"} {
		must(t, os.MkdirAll(filepath.Join(n.o.DataDir, dir), 0o700))
		must(t, os.WriteFile(filepath.Join(n.o.DataDir, dir, "0.tmp"), []byte("x"), 0o600))
	}
	must(t, n.write(record{Phase: member}))
	return n
}

// A pod that can write to /var makes PID 1 give away no file of another program.
func TestNothingElseIsGivenToEtcd(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: files are given to etcd's user")
	}
	for name, attack := range map[string]func(secret, at string) error{"link": os.Symlink, "second name": os.Link} {
		n := former(t)
		secret := filepath.Join(filepath.Dir(n.o.DataDir), "secret")
		must(t, os.WriteFile(secret, []byte("key"), 0o600))
		must(t, attack(secret, filepath.Join(n.o.DataDir, "member/snap/db")))
		if err := n.prepare(t.Context(), silent, silent); err == nil {
			t.Errorf("%s: etcd starts", name)
		}
		info, err := os.Stat(secret)
		must(t, err)
		if uid := info.Sys().(*syscall.Stat_t).Uid; uid != 0 {
			t.Errorf("%s: the secret belongs to user %d", name, uid)
		}
	}
}

func silent(reason.Code, string) {}
