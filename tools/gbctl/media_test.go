package main

import (
	"archive/tar"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/config"
	bootloader "github.com/garboard-os/garboard/image/loader"
	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/tools/testing/uki"
	"github.com/spf13/cobra"
)

// mediaDir has the parts of a medium, as small as they can be, and what users add to them.
func mediaDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	var bundle bytes.Buffer
	archive := tar.NewWriter(&bundle)
	const index = `{"schemaVersion": 2, "manifests": []}`
	if err := archive.WriteHeader(&tar.Header{Name: "index.json", Typeflag: tar.TypeReg, Size: int64(len(index))}); err != nil {
		t.Fatal(err)
	}
	if _, err := archive.Write([]byte(index)); err != nil {
		t.Fatal(err)
	}
	if err := archive.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "intel-ucode"), 0o700); err != nil {
		t.Fatal(err)
	}
	c, err := config.Generate(config.Options{Type: config.Worker, Endpoint: "https://10.5.0.2:6443"})
	if err != nil {
		t.Fatal(err)
	}
	worker, err := c.Encode()
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{
		"vmlinuz": string(uki.Linux(uki.Release)), "initramfs": "the initramfs", "intel-ucode/06-00-00": "the microcode",
		"worker.yaml": string(worker), "broken.yaml": "nonsense: true\n", "cluster.tar": bundle.String(),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func partsIn(t *testing.T, dir string) media.Options {
	t.Helper()
	return media.Options{
		Loader:  bootloader.Loader{Stub: uki.Stub(t, 1024), BIOS: bytes.Repeat([]byte("grub"), 4000), BootHybrid: make([]byte, 512), Disk: dir},
		Version: "v1.2.3", Release: uki.Release, Kernel: filepath.Join(dir, "vmlinuz"), Initramfs: filepath.Join(dir, "initramfs"), Program: filepath.Join(dir, "vmlinuz"),
	}
}

// buildMedia runs media build with the parts of a directory. It returns what was asked of their builder, and adds the
// output to the error.
func buildMedia(t *testing.T, dir string, args ...string) (asked string, err error) {
	t.Helper()
	var out bytes.Buffer
	cmd := (&app{out: &out, err: &out}).mediaBuildCommand(func(_ *cobra.Command, source, flavour string, o *media.Options) error {
		asked = source + " " + flavour
		*o = partsIn(t, dir).With(*o)
		return nil
	})
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	cmd.SetArgs(args)
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		return asked, fmt.Errorf("%w: %s", err, &out)
	}
	return asked, nil
}

// What each flag of media build says is in the medium.
func TestFlagsOfMediaBuild(t *testing.T) {
	t.Parallel()
	dir := mediaDir(t)
	to, worker := filepath.Join(dir, "medium"), filepath.Join(dir, "worker.yaml")
	read := func(name string) string {
		content, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		return string(content)
	}
	for _, tc := range []struct {
		args       []string
		asked      string
		with, less []string
	}{
		{[]string{"uki"}, ". generic", []string{"quiet panic=10\x00", "the initramfs"}, []string{"the microcode", "garboard.config="}},
		{[]string{"uki", "--flavour", "cloud", "--source", "there"}, "there cloud", nil, nil},
		{[]string{"uki", "--extra-kernel-arg", "a=1,2", "--extra-kernel-arg", "console=ttyS1"}, ". generic", []string{"quiet panic=10 a=1,2 console=ttyS1\x00"}, nil},
		{[]string{"uki", "--microcode", dir}, ". generic", []string{"kernel/x86/microcode/GenuineIntel.bin", "the microcode"}, nil},
		{nil, ". generic", []string{"CD001", "GARBOARD"}, []string{read(worker), "images.tar", "garboard.config="}},
		{[]string{"--config", worker}, ". generic", []string{"CD001", read(worker), "panic=10 garboard.config=metal-iso\x00"}, nil},
		{[]string{"iso", "--incomplete", "--images", filepath.Join(dir, "cluster.tar")}, ". generic", []string{"CD001", read(filepath.Join(dir, "cluster.tar"))}, nil},
	} {
		asked, err := buildMedia(t, dir, append(tc.args, "-o", to)...)
		if err != nil || asked != tc.asked {
			t.Errorf("%q: %v; built %q", tc.args, err, asked)
			continue
		}
		made := read(to)
		for _, want := range tc.with {
			if !strings.Contains(made, want) {
				t.Errorf("%q: no %.60q", tc.args, want)
			}
		}
		for _, other := range tc.less {
			if strings.Contains(made, other) {
				t.Errorf("%q: there is %.60q", tc.args, other)
			}
		}
		if info, err := os.Stat(to); err != nil || info.Mode().Perm() == 0o600 != slices.Contains(tc.args, "--config") {
			t.Errorf("%q: %v, %v", tc.args, info.Mode(), err)
		}
	}
}

// What can't be in a medium is said before anything is built.
func TestMediaThatCantBe(t *testing.T) {
	t.Parallel()
	dir := mediaDir(t)
	for args, want := range map[string]string{
		"pxe --config worker.yaml":   "--config: only an iso and a disk can have a configuration; otherwise, use --extra-kernel-arg garboard.config=URL",
		"pxe --images cluster.tar":   "--images: only an iso and a disk can have images",
		"--config broken.yaml":       "broken.yaml:1",
		"--images cluster.tar":       "cluster.tar lacks what a node needs: registry.k8s.io/",
		"--images worker.yaml":       "is no archive of container images",
		"--flavour tiny":             "must be one of generic, cloud",
		"floppy":                     `invalid argument "floppy"`,
		"iso --images DIR/nosuch.ta": "no such file",
	} {
		args = strings.NewReplacer("worker.yaml", dir+"/worker.yaml", "broken.yaml", dir+"/broken.yaml", "cluster.tar", dir+"/cluster.tar", "DIR", dir).Replace(args)
		asked, err := buildMedia(t, dir, append(strings.Fields(args), "-o", filepath.Join(dir, "medium"))...)
		if err == nil || !strings.Contains(err.Error(), want) || asked != "" {
			t.Errorf("%s: %v, want %q; built %q", args, err, want, asked)
		}
	}
	if _, err := buildMedia(t, dir, "uki", "--microcode", filepath.Join(dir, "nosuch"), "-o", filepath.Join(dir, "medium")); err == nil || !strings.Contains(err.Error(), "has no microcode") {
		t.Errorf("a directory without microcode: %v", err)
	}
	if err := os.Truncate(filepath.Join(dir, "vmlinuz"), 300<<20); err != nil {
		t.Fatal(err)
	}
	if _, err := buildMedia(t, dir, "uki", "--microcode", dir, "-o", filepath.Join(dir, "medium")); err == nil || !strings.Contains(err.Error(), "a disk has room for 264 MB") {
		t.Errorf("a large system: %v", err)
	}
	if _, err := os.Stat(filepath.Join(dir, "medium")); err == nil {
		t.Error("there is a medium")
	}
}
