package rootfs

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// parts makes small sources on disk: a program, a CNI folder with a link, tools with a CA bundle, a module folder.
func parts(t *testing.T) Sources {
	t.Helper()
	dir := t.TempDir()
	for name, contents := range map[string]string{
		"containerd":                           "\x7fELF containerd",
		"cni/cni":                              "\x7fELF cni",
		"tools/etc/ssl/certs/ca-certificates":  "authorities",
		"tools/usr/sbin/mkfs.xfs":              "\x7fELF mkfs",
		"6.1.0-test/modules.dep":               "",
		"6.1.0-test/kernel/fs/squashfs.ko":     "module",
		"tools/usr/lib/x86_64-linux-gnu/ld.so": "\x7fELF ld",
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		perm := fs.FileMode(0o600)
		if strings.HasPrefix(contents, "\x7fELF") {
			perm = 0o700
		}
		if err := os.WriteFile(path, []byte(contents), perm); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("cni", filepath.Join(dir, "cni/bridge")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("containerd", filepath.Join(dir, "shim")); err != nil {
		t.Fatal(err)
	}
	return Sources{
		Version:    "v0.1.0",
		Programs:   map[string]string{"containerd": filepath.Join(dir, "containerd"), "shim": filepath.Join(dir, "shim")},
		CNI:        filepath.Join(dir, "cni"),
		Tools:      filepath.Join(dir, "tools"),
		ModulesDir: filepath.Join(dir, "6.1.0-test"),
	}
}

func lay(t *testing.T, src Sources) string {
	t.Helper()
	entries, err := Plan(src)
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	if err := Lay(root, entries); err != nil {
		t.Fatal(err)
	}
	return root
}

func TestTree(t *testing.T) {
	root := lay(t, parts(t))
	for path, want := range map[string]fs.FileMode{
		"/dev":                                  fs.ModeDir | 0o755,
		"/proc":                                 fs.ModeDir | 0o555,
		"/run":                                  fs.ModeDir | 0o755,
		"/sys":                                  fs.ModeDir | 0o555,
		"/system/state":                         fs.ModeDir | 0o700,
		"/system/run":                           fs.ModeDir | 0o755,
		"/system/secrets":                       fs.ModeDir | 0o700,
		"/tmp":                                  fs.ModeDir | fs.ModeSticky | 0o777,
		"/var":                                  fs.ModeDir | 0o755,
		"/etc/kubernetes/manifests":             fs.ModeDir | 0o700,
		"/usr/bin/containerd":                   0o755,
		"/usr/bin/shim":                         fs.ModeSymlink,
		"/usr/sbin/init":                        0o755,
		"/usr/lib/cni/cni":                      0o755,
		"/usr/lib/cni/bridge":                   fs.ModeSymlink,
		"/usr/lib/modules/6.1.0-test/kernel":    fs.ModeDir | 0o755,
		"/etc/ssl/certs/ca-certificates":        0o644,
		"/etc/machine-id":                       0o644,
		"/usr/lib/modules/6.1.0-test":           fs.ModeDir | 0o755,
		"/usr/lib/os-release":                   0o644,
		"/lib":                                  fs.ModeSymlink,
		"/etc/ssl/certs/ca-certificates.crt":    fs.ModeSymlink,
		"/lib/modules/6.1.0-test/modules.dep":   0o644,
		"/sbin/mkfs.xfs":                        0o755,
		"/usr/lib/x86_64-linux-gnu/ld.so":       0o755,
		"/usr/libexec/kubernetes":               fs.ModeDir | 0o755,
		"/etc/nsswitch.conf":                    0o644,
		"/usr/lib/modules/6.1.0-test/kernel/fs": fs.ModeDir | 0o755,
	} {
		info, err := os.Lstat(filepath.Join(root, path))
		if err != nil {
			t.Error(err)
			continue
		}
		got := info.Mode()
		if got&fs.ModeSymlink != 0 {
			got = fs.ModeSymlink
		}
		if got != want {
			t.Errorf("%s is %v, want %v", path, got, want)
		}
	}
}

// The modes of the tree are those of the table, whatever umask the build runs under.
func TestUmaskDoesNotShow(t *testing.T) {
	src := parts(t)
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	root := lay(t, src)
	for path, want := range map[string]fs.FileMode{"usr/bin": 0o755, "usr/bin/containerd": 0o755, "etc/hosts": 0o644} {
		info, err := os.Stat(filepath.Join(root, path))
		if err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: %v, %v; want %v", path, info.Mode(), err, want)
		}
	}
}

// S-307: what Kubernetes shows as OS image.
func TestS307OSRelease(t *testing.T) {
	root := lay(t, parts(t))
	got, err := os.ReadFile(filepath.Join(root, "etc/os-release"))
	if err != nil {
		t.Fatal(err)
	}
	want := "NAME=\"Garboard\"\nID=garboard\nVERSION_ID=\"0.1.0\"\nPRETTY_NAME=\"Garboard (v0.1.0)\"\n"
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// S-373: no shell, whatever part brings it along.
func TestS373NoShell(t *testing.T) {
	for name, contents := range map[string]string{
		"usr/bin/bash":         "\x7fELF",
		"bin/sh":               "\x7fELF",
		"usr/bin/busybox":      "\x7fELF",
		"usr/sbin/mkfs.script": "#!/bin/sh\n",
		"opt/hidden/thing":     "#!/usr/bin/env python3\n",
	} {
		root := t.TempDir()
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := Check(root); err != nil {
			t.Fatalf("an empty tree: %v", err)
		}
		if err := os.WriteFile(path, []byte(contents), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := Check(root); err == nil || !strings.Contains(err.Error(), "/"+name) {
			t.Errorf("%s: error %v doesn't name it", name, err)
		}
	}
}

func TestCheckReportsAll(t *testing.T) {
	root := t.TempDir()
	for name, target := range map[string]string{"sh": "mke2fs", "dangling": "/usr/nowhere", "later": "/run/later"} {
		if err := os.Symlink(target, filepath.Join(root, name)); err != nil {
			t.Fatal(err)
		}
	}
	err := Check(root)
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{"/sh: a node has no interpreter", "/dangling: link to /usr/nowhere"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %q lacks %q", err, want)
		}
	}
	if strings.Contains(err.Error(), "/later") {
		t.Errorf("a link to what is mounted later is fine: %v", err)
	}
}

func TestPlanRefuses(t *testing.T) {
	for name, entries := range map[string][]Entry{
		"two entries for":     {text("/etc/hosts", ""), text("/etc/hosts", "")},
		"clean absolute path": {text("etc/hosts", "")},
		"is no directory":     {link("/lib", "usr/lib"), text("/lib/x", "")},
	} {
		if _, err := arrange(entries); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
