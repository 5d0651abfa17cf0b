//go:build e2e

package e2etest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/image"
	"github.com/garboard-os/garboard/image/initramfs"
	"github.com/garboard-os/garboard/image/squashfs"
)

// Linux is the release of the kernel of media.
func Linux(t testing.TB) string {
	t.Helper()
	return Parts(t).Release
}

// OtherKernel writes another kernel as /boot/vmlinuz and /lib/modules below a directory, and returns its release.
func OtherKernel(t testing.TB, dir string) string {
	t.Helper()
	root, err := repository()
	if err != nil {
		t.Fatal(err)
	}
	o, err := image.BuildMedia(t.Context(), root, t.Output(), image.Cloud)
	if err != nil {
		t.Fatal(err)
	}
	archive, err := os.ReadFile(o.Initramfs)
	if err != nil {
		t.Fatal(err)
	}
	p, err := initramfs.Open(archive)
	if err != nil {
		t.Fatal(err)
	}
	tree, err := squashfs.Read(p.RootFS, p.RootFS.Size())
	if err != nil {
		t.Fatal(err)
	}
	linux, err := os.ReadFile(o.Kernel)
	if err != nil {
		t.Fatal(err)
	}
	WriteFile(t, filepath.Join(dir, "boot/vmlinuz"), linux)
	for name, f := range tree {
		if inside, ok := strings.CutPrefix(name, "usr/"); ok && strings.HasPrefix(inside, "lib/modules/") && f.Mode.IsRegular() {
			content, err := tree.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			WriteFile(t, filepath.Join(dir, inside), content)
		}
	}
	return o.Release
}

// WriteFile writes a file, and the directories above it.
func WriteFile(t testing.TB, path string, content []byte) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, content, 0o644); err != nil {
		t.Fatal(err)
	}
}
