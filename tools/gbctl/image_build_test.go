package main

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/image/customize"
	"github.com/garboard-os/garboard/image/initramfs"
	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/image/squashfs"
	"github.com/spf13/pflag"
)

// Each kind has its usual file, or the one that is named.
func TestImageBuildOutputs(t *testing.T) {
	t.Parallel()
	got, err := parseOutputs([]string{"iso", "pxe=/srv/tftp", "uki", "installer=own.tar", "disk"})
	want := []medium{{media.ISO, "garboard.iso"}, {media.PXE, "/srv/tftp"}, {media.UKI, media.UKIFile}, {media.InstallerKind, "own.tar"}, {media.Disk, "garboard.raw.zst"}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v, want %v", got, err, want)
	}
	for _, bad := range []string{"", "cd", "iso=", "=file"} {
		if got, err := parseOutputs([]string{bad}); err == nil {
			t.Errorf("%q: %v", bad, got)
		}
	}
}

// The image to build from isn't overwritten, under whichever name.
func TestImageBuildKeepsItsBase(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	from, link := filepath.Join(dir, "garboard-installer.tar"), filepath.Join(dir, "link")
	if err := errors.Join(os.WriteFile(from, []byte("base"), 0o600), os.Symlink(from, link)); err != nil {
		t.Fatal(err)
	}
	b := imageBuild{from: link}
	err := b.run(t.Context(), []medium{{media.InstallerKind, from}}, func(string) {}, func(string) {})
	if text, _ := os.ReadFile(from); err == nil || !strings.Contains(err.Error(), "is the image to build from") || string(text) != "base" {
		t.Errorf("%v, %q", err, text)
	}
}

// A line break, for one, ends a line of the scripts of GRUB and iPXE.
func TestKernelArgs(t *testing.T) {
	t.Parallel()
	var args []string
	f := pflag.NewFlagSet("", pflag.ContinueOnError)
	var notes strings.Builder
	kernelArgsVar(f, &notes, &args)
	if err := f.Parse([]string{"--extra-kernel-arg", "console=ttyS1", "--extra-kernel-arg=quiet"}); err != nil || !slices.Equal(args, []string{"console=ttyS1", "quiet"}) {
		t.Errorf("%q, %v", args, err)
	}
	if err := f.Parse([]string{"--extra-kernel-arg", "garboard.config=https://jo:hush@10.0.0.1/w.yaml"}); err != nil || strings.Count(notes.String(), "\n") != 1 || !strings.Contains(notes.String(), "has credentials in it: garboard.config=https://jo:xxxxx@") {
		t.Errorf("%v, and it says %q", err, &notes)
	}
	for _, bad := range []string{"a\nb", "a b", `a="b"`, "", "garboard.slot=A"} {
		if err := f.Parse([]string{"--extra-kernel-arg", bad}); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}

// Other modules replace those that are there, firmware is added, and other files come last. Arguments of the kernel and
// paths to remove are kept.
func TestImageBuildChanges(t *testing.T) {
	t.Parallel()
	b := imageBuild{modules: "new/modules", firmware: "new/firmware", overlays: []string{"one", "two"}, change: customize.Change{Remove: []string{"/etc/motd"}, Args: []string{"console=ttyS1"}}}
	c := b.changes()
	if !slices.Equal(c.Remove, []string{"/etc/motd", "lib/modules"}) || !slices.Equal(c.Args, []string{"console=ttyS1"}) {
		t.Errorf("%+v", c)
	}
	var at []string
	for _, o := range c.Overlays {
		at = append(at, o.Dir+" "+o.At)
	}
	if want := []string{"new/modules lib/modules", "new/firmware lib/firmware", "one ", "two "}; !slices.Equal(at, want) {
		t.Errorf("%q, want %q", at, want)
	}
	if c := new(imageBuild).changes(); len(c.Remove)+len(c.Overlays) > 0 {
		t.Errorf("nothing: %+v", c)
	}
}

// The size is that with the microcode, which isn't in the installer image.
func TestImageBuildCountsMicrocode(t *testing.T) {
	t.Parallel()
	dir := mediaDir(t)
	for _, name := range []string{esp.SystemdBoot, esp.GRUBRecord, esp.GRUBProgram} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var files [2]*os.File
	for i, name := range []string{"rootfs", "initramfs"} {
		f, err := os.Create(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		files[i] = f
	}
	if err := (squashfs.Tree{}).Write(t.Context(), files[0]); err != nil {
		t.Fatal(err)
	}
	if err := initramfs.Write(t.Context(), files[1], initramfs.Contents{Init: filepath.Join(dir, "vmlinuz"), RootFS: files[0].Name()}); err != nil {
		t.Fatal(err)
	}
	b := imageBuild{from: filepath.Join(dir, "installer.tar"), mediaParts: mediaParts{Options: media.Options{Microcode: dir}}}
	if err := partsIn(t, dir).Build(t.Context(), media.InstallerKind, b.from); err != nil {
		t.Fatal(err)
	}
	var said []string
	err := b.run(t.Context(), []medium{{media.UKI, filepath.Join(dir, "uki")}}, func(line string) { said = append(said, line) }, func(string) {})
	if err != nil || !slices.Contains(said, "the system has 0 MB") {
		t.Errorf("%q, %v", said, err)
	}
}
