//go:build e2e

package bootstrap

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

// settleBudget is for a program that is started anew.
const settleBudget = 60 * time.Second

// users are those of the programs (docs/hardening.md).
var users = map[string]uint32{"etcd": 60, "kube-apiserver": 61, "kube-controller-manager": 62, "kube-scheduler": 63}

const etcdData = "/var/lib/etcd"

// The programs of a control plane are users of their own, without any capability and without a way
// to one. Their secrets are theirs alone. Data of a release in which etcd was root is given to it.
func programsAreUsers(t *testing.T, c *e2etest.Cluster) {
	t.Helper()
	for program, secrets := range map[string]string{
		"etcd": "/system/secrets/etcd", "kube-apiserver": "/system/secrets/kubernetes/kube-apiserver",
		"kube-controller-manager": "/system/secrets/kubernetes/kube-controller-manager", "kube-scheduler": "/system/secrets/kubernetes/kube-scheduler",
	} {
		pid := only(t, c, program)
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			t.Fatal(err)
		}
		uid := strconv.Itoa(int(users[program]))
		for field, want := range map[string]string{
			"Uid": strings.Repeat(uid+" ", 4), "Gid": strings.Repeat(uid+" ", 4), "Groups": "", "Seccomp": "2", "NoNewPrivs": "1",
			"CapEff": none, "CapPrm": none, "CapInh": none, "CapAmb": none,
		} {
			want := strings.TrimSpace(want)
			if got := lineOf(string(status), field); got != want && !(field == "Groups" && got == uid) {
				t.Errorf("%s: %s is %q, want %q", program, field, got, want)
			}
		}
		// What the program sees is what the node has. Nothing of it is for another user.
		owned(t, fmt.Sprintf("/proc/%d/root%s", pid, secrets), program)
	}
	data := fmt.Sprintf("/proc/%d/root%s", only(t, c, "etcd"), etcdData)
	owned(t, data, "etcd")

	// The former layout, and a start of etcd.
	former := only(t, c, "etcd")
	each(t, data, func(path string, _ fs.FileInfo) {
		if err := os.Lchown(path, 0, 0); err != nil {
			t.Error(err)
		}
	})
	c.Gbctl("service", "etcd", "restart", "--force")
	c.Eventually(settleBudget, "etcd starts with data of root", func() error {
		if out, err := c.TryGbctl("service", "etcd"); err != nil || !strings.Contains(out, "Running") {
			return errors.Join(err, errors.New(out))
		}
		if out, err := c.TryGbctl("etcd", "status"); err != nil || !strings.Contains(out, "leader") {
			return errors.Join(err, errors.New(out))
		}
		if pids, err := c.Processes("etcd"); err != nil || len(pids) != 1 || pids[0] == former {
			return fmt.Errorf("processes of etcd are %v: %w", pids, err)
		}
		return nil
	})
	owned(t, fmt.Sprintf("/proc/%d/root%s", only(t, c, "etcd"), etcdData), "etcd")
	c.Eventually(settleBudget, "Kubernetes works", func() error {
		_, err := c.Try("get", "nodes")
		return err
	})
}

const none = "0000000000000000"

func only(t *testing.T, c *e2etest.Cluster, program string) int {
	t.Helper()
	pids, err := c.Processes(program)
	if err != nil || len(pids) != 1 {
		t.Fatalf("processes %s: %v, %v", program, pids, err)
	}
	return pids[0]
}

// lineOf is the value of a field of /proc/PID/status, with single blanks.
func lineOf(status, field string) string {
	for line := range strings.Lines(status) {
		if value, ok := strings.CutPrefix(line, field+":"); ok {
			return strings.Join(strings.Fields(value), " ")
		}
	}
	return "missing"
}

func each(t *testing.T, dir string, do func(path string, info fs.FileInfo)) {
	t.Helper()
	files := 0
	err := filepath.WalkDir(dir+"/", func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // etcd has removed it
		}
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err == nil {
			do(path, info)
			files++
		}
		return nil
	})
	if err != nil || files < 3 {
		t.Fatalf("%d files in %s: %v", files, dir, err)
	}
}

// owned checks that a tree is a program's alone.
func owned(t *testing.T, dir, program string) {
	t.Helper()
	each(t, dir, func(path string, info fs.FileInfo) {
		st := info.Sys().(*syscall.Stat_t)
		if want := users[program]; st.Uid != want || st.Gid != want || info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s of %s belongs to %d:%d, with the mode %s", path, program, st.Uid, st.Gid, info.Mode())
		}
	})
}
