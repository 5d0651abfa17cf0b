//go:build e2e

package e2etest

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/garboard-os/garboard/image"
	"github.com/garboard-os/garboard/image/customize"
	"github.com/garboard-os/garboard/image/initramfs"
	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/qemu"
)

// Extensions builds the examples of extensions, and returns their directories by name.
func Extensions(t testing.TB) map[string]string {
	t.Helper()
	made, err := image.BuildExtensions(t.Context(), t.Output())
	if err != nil {
		t.Fatal(err)
	}
	return made
}

// Customized changes the system. The option makes containers run it.
func Customized(t testing.TB, change customize.Change) Option {
	t.Helper()
	root, err := repository()
	if err != nil {
		t.Fatal(err)
	}
	o, err := image.BuildMedia(t.Context(), root, t.Output(), image.Cloud)
	if err != nil {
		t.Fatal(err)
	}
	dir, file := t.TempDir(), filepath.Join(t.TempDir(), "rootfs")
	if err := o.Directory(dir); err != nil {
		t.Fatal(err)
	}
	if err := change.Apply(t.Context(), dir, func(line string) { t.Log(line) }); err != nil {
		t.Fatal(err)
	}
	if err := extract(dir, file); err != nil {
		t.Fatal(err)
	}
	return func(o *qemu.Options) { o.Boot.Rootfs = file }
}

// extract writes the root file system of an installer directory to a file.
func extract(dir, file string) (err error) {
	installer, err := media.ReadInstaller(dir)
	if err != nil {
		return err
	}
	parts, err := initramfs.Open(installer.Initramfs)
	if err != nil {
		return err
	}
	out, err := os.Create(file)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	_, err = io.Copy(out, parts.RootFS)
	return err
}
