package customize

import (
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/image/initramfs"
	"github.com/garboard-os/garboard/image/loader"
	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/image/rootfs"
	"github.com/garboard-os/garboard/image/sbom"
	"github.com/garboard-os/garboard/image/squashfs"
	"github.com/garboard-os/garboard/tools/testing/module"
	"github.com/garboard-os/garboard/tools/testing/uki"
)

const (
	release = "6.12.0-base"
	other   = "6.13.0-other"

	packagesOfKernel = "usr/share/garboard/packages/kernel"
)

func put(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, content := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		mode := os.FileMode(0o644)
		if strings.HasSuffix(filepath.Dir(path), "bin") {
			mode = 0o755
		}
		if err := os.WriteFile(path, []byte(content), mode); err != nil {
			t.Fatal(err)
		}
	}
}

// signature is what the kernel looks for at the end of a module.
const signature = "~Module signature appended~\n"

// A kernel is locked down where each module is signed, and not beside one that it would refuse.
func TestLockdownNeedsSignatures(t *testing.T) {
	t.Parallel()
	for of, want := range map[string]bool{signature: true, "": false} {
		dir, overlay := base(t), t.TempDir()
		before, _, _ := opened(t, dir)
		put(t, overlay, map[string]string{modulesDir + "/" + release + "/extra/x.ko": string(module.Module(release)) + of})
		var said []string
		c := Change{Overlays: []Overlay{{Name: "mine", Dir: overlay}}}
		if err := c.Apply(t.Context(), dir, func(line string) { said = append(said, line) }); err != nil {
			t.Fatal(err)
		}
		after, _, _ := opened(t, dir)
		cmdline := before.Cmdline
		if !want {
			cmdline = strings.Replace(cmdline, " lockdown=integrity", "", 1)
		}
		if !strings.Contains(before.Cmdline, " lockdown=integrity ") || after.Cmdline != cmdline {
			t.Errorf("%q became %q", before.Cmdline, after.Cmdline)
		}
		if told := strings.Contains(strings.Join(said, "\n"), "module extra/x.ko isn't signed"); told == want {
			t.Errorf("%q", said)
		}
	}
}

func modules(of string) map[string]string {
	dir := modulesDir + "/" + of + "/"
	return map[string]string{
		dir + "kernel/loop.ko": string(module.Module(of)) + signature, dir + "kernel/squashfs.ko": string(module.Module(of, "depends=")) + signature,
		dir + "kernel/usb.ko": string(module.Module(of, "alias=usb:v0001")) + signature, dir + "modules.builtin": "kernel/fs/overlay.ko\n", dir + "modules.order": "",
	}
}

// system is a tree with what a node needs, and modules.
func system(t *testing.T) squashfs.Tree {
	t.Helper()
	tree := squashfs.Tree{"lib": squashfs.Link("usr/lib"), "etc/motd": squashfs.Content([]byte("hello"), 0o644)}
	for _, e := range rootfs.Required() {
		if tree[e.Path[1:]] = squashfs.Directory(0o755); !e.Mode.IsDir() {
			tree[e.Path[1:]] = squashfs.Content(nil, 0o755)
		}
	}
	const packages = "linux-image-6.12.0=6.12.0-1@sha256:aa\n"
	list := sbom.New("v1.0.0")
	list.Debian(packages)
	text, err := list.Text()
	if err != nil {
		t.Fatal(err)
	}
	tree[sbom.File], tree[packagesOfKernel] = squashfs.Content(text, 0o644), squashfs.Content([]byte(packages), 0o644)
	for name, content := range modules(release) {
		tree[name] = squashfs.Content([]byte(content), 0o644)
	}
	return tree
}

// base is an installer directory.
func base(t *testing.T) string {
	t.Helper()
	dir, work := t.TempDir(), t.TempDir()
	image, err := os.Create(filepath.Join(work, "rootfs"))
	if err != nil {
		t.Fatal(err)
	}
	defer image.Close()
	tree := system(t)
	if err := tree.Write(t.Context(), image); err != nil {
		t.Fatal(err)
	}
	put(t, work, map[string]string{"init": "the program", "vmlinuz": string(uki.Linux(release)), esp.SystemdBoot: "s", esp.GRUBRecord: "r", esp.GRUBProgram: "p"})
	put(t, dir, map[string]string{"installer": "program"})
	folder := filepath.Join(work, release)
	put(t, folder, map[string]string{
		"modules.dep": "kernel/loop.ko:\nkernel/squashfs.ko:\n", "modules.builtin": "kernel/fs/overlay.ko\n",
		"kernel/loop.ko": "old loop", "kernel/squashfs.ko": "old squashfs",
	})
	archive, err := os.Create(filepath.Join(work, "initramfs"))
	if err != nil {
		t.Fatal(err)
	}
	defer archive.Close()
	if err := initramfs.Write(t.Context(), archive, initramfs.Contents{Init: filepath.Join(work, "init"), RootFS: image.Name(), ModulesDir: folder}); err != nil {
		t.Fatal(err)
	}
	o := media.Options{
		Loader: loader.Loader{Stub: uki.Stub(t, 1024), Disk: work}, Version: "v1.0.0", Release: release,
		Kernel: filepath.Join(work, "vmlinuz"), Initramfs: archive.Name(), Args: []string{"quiet"},
	}
	if err := o.Directory(dir); err != nil {
		t.Fatal(err)
	}
	return dir
}

// opened is a system that was read again.
func opened(t *testing.T, dir string) (media.Installer, squashfs.Tree, initramfs.Parts) {
	t.Helper()
	i, err := media.ReadInstaller(dir)
	if err != nil {
		t.Fatal(err)
	}
	parts, err := initramfs.Open(i.Initramfs)
	if err != nil {
		t.Fatal(err)
	}
	tree, err := squashfs.Read(parts.RootFS, parts.RootFS.Size())
	if err != nil {
		t.Fatal(err)
	}
	return i, tree, parts
}

func silent(string) {}

// The system has what was added, and not what was removed, and says so. The same change gives the same bytes. (S-202,
// S-203, S-204)
func TestS202Files(t *testing.T) {
	t.Parallel()
	overlay := t.TempDir()
	put(t, overlay, map[string]string{"etc/motd": "changed", "usr/local/bin/agent": "agent", "lib/firmware/a.bin": "firmware"})
	if err := os.Chmod(filepath.Join(overlay, "usr/local/bin/agent"), 0o755|fs.ModeSetuid); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("agent", filepath.Join(overlay, "usr/local/bin/link")); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(overlay, link); err != nil {
		t.Fatal(err)
	}
	c := Change{Remove: []string{"/lib/modules/" + release + "/kernel/usb.ko"}, Overlays: []Overlay{{Name: "mine", Dir: link}}, Args: []string{"nomodeset"}}
	dir, second := base(t), base(t)
	before, _, _ := opened(t, dir)
	if err := (Change{}).Apply(t.Context(), dir, silent); err != nil {
		t.Fatal(err)
	}
	if after, _, _ := opened(t, dir); after.SHA256 != before.SHA256 {
		t.Error("without a change, the system is another one")
	}
	for _, d := range []string{dir, second} {
		if err := c.Apply(t.Context(), d, silent); err != nil {
			t.Fatal(err)
		}
	}
	i, tree, parts := opened(t, dir)
	if again, _, _ := opened(t, second); again.SHA256 != i.SHA256 {
		t.Error("the same change gives other bytes")
	}
	if i.System.Version != "v1.0.0" || i.Release != release || i.Modules != release || i.Cmdline != before.Cmdline+" nomodeset" {
		t.Errorf("%s, Linux %s, modules of %s, %q", i.System.Version, i.Release, i.Modules, i.Cmdline)
	}
	for name, want := range map[string]string{"etc/motd": "changed", "usr/local/bin/agent": "agent", "usr/lib/firmware/a.bin": "firmware"} {
		if got, err := tree.ReadFile(name); string(got) != want {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	if f := tree["usr/local/bin/agent"]; f.Mode != 0o755 {
		t.Errorf("the program has the mode %v", f.Mode)
	}
	if tree["usr/local/bin/link"].Target != "agent" || tree["lib"].Target != "usr/lib" {
		t.Error("links have other targets")
	}
	folder := modulesDir + "/" + release + "/"
	if _, there := tree[folder+"kernel/usb.ko"]; there {
		t.Error("the module is still there")
	}
	if alias, err := tree.ReadFile(folder + "modules.alias"); err != nil || strings.Contains(string(alias), "usb") {
		t.Errorf("the removed module is still in the index: %s, %v", alias, err)
	}
	if program, err := parts.Program(); string(program) != "the program" {
		t.Errorf("process 1 is %q, %v", program, err)
	}
	text, err := tree.ReadFile(ProvenanceFile)
	var p Provenance
	if err == nil {
		err = json.Unmarshal(text, &p)
	}
	if err != nil || len(p.Steps) != 1 || p.Steps[0].System != before.SHA256 || len(p.Steps[0].Removed) != 1 || len(p.Steps[0].Added) != 1 || len(p.Steps[0].Added[0].Files) != 4 {
		t.Errorf("%s, %v", text, err)
	}
	if f := p.Steps[0].Added[0].Files[0]; f.Path != "/etc/motd" || !f.Replaced || f.Size != 7 || len(f.SHA256) != 64 {
		t.Errorf("%+v", f)
	}

	if text, err = tree.ReadFile(sbom.File); err != nil || !strings.Contains(string(text), `"name": "mine"`) {
		t.Errorf("%s, %v", text, err)
	}

	// A customized system can be customized.
	if err := (Change{Remove: []string{"/etc/motd"}}).Apply(t.Context(), dir, silent); err != nil {
		t.Fatal(err)
	}
	_, tree, _ = opened(t, dir)
	if text, err = tree.ReadFile(ProvenanceFile); err != nil || strings.Count(string(text), `"system"`) != 2 {
		t.Errorf("%s, %v", text, err)
	}
}

// A link may take the place of a file that an earlier overlay has added.
func TestLinkReplacesFile(t *testing.T) {
	t.Parallel()
	dir, first, second := base(t), t.TempDir(), t.TempDir()
	put(t, first, map[string]string{"etc/issue": "welcome"})
	put(t, second, map[string]string{"etc/other": "other"})
	if err := os.Symlink("motd", filepath.Join(second, "etc/issue")); err != nil {
		t.Fatal(err)
	}
	if err := (Change{Overlays: []Overlay{{Name: "first", Dir: first}, {Name: "second", Dir: second}}}).Apply(t.Context(), dir, silent); err != nil {
		t.Fatal(err)
	}
	if _, tree, _ := opened(t, dir); tree["etc/issue"].Target != "motd" {
		t.Error("the file is still there")
	}
}

// Another kernel comes with its modules, before or after the change. (S-200, S-201, S-207)
func TestS200Kernel(t *testing.T) {
	t.Parallel()
	overlay, linux := t.TempDir(), filepath.Join(t.TempDir(), "vmlinuz")
	put(t, overlay, modules(other))
	if err := os.WriteFile(linux, uki.Linux(other), 0o600); err != nil {
		t.Fatal(err)
	}
	c := Change{Remove: []string{"lib/modules"}, Overlays: []Overlay{{Name: "modules", Dir: filepath.Join(overlay, modulesDir), At: "lib/modules"}}, Kernel: linux}
	dir, second := base(t), base(t)
	if err := c.Apply(t.Context(), dir, silent); err != nil {
		t.Fatal(err)
	}
	i, tree, parts := opened(t, dir)
	if i.Release != other || i.Modules != other || !bytes.Equal(i.System.Kernel, uki.Linux(other)) {
		t.Errorf("Linux %s with the modules of %s", i.Release, i.Modules)
	}
	if _, there := tree[modulesDir+"/"+release]; there {
		t.Error("the former modules are still there")
	}
	_, listed := tree[packagesOfKernel]
	if text, err := tree.ReadFile(sbom.File); err != nil || strings.Contains(string(text), "linux-image") || !strings.Contains(string(text), other) || listed {
		t.Errorf("the former kernel is still listed: %v, %s, %v", listed, text, err)
	}
	// The modules that mount the root filesystem are the new ones.
	if program, err := parts.Program(); string(program) != "the program" {
		t.Errorf("process 1 is %q, %v", program, err)
	}

	// In a Dockerfile, the kernel comes last.
	c.Kernel, c.KernelLater = "", true
	if err := c.Apply(t.Context(), second, silent); err != nil {
		t.Fatal(err)
	}
	pending, _, _ := opened(t, second)
	if pending.Release != release || pending.Modules != other {
		t.Errorf("Linux %s with the modules of %s", pending.Release, pending.Modules)
	}
	if err := (Change{}).Apply(t.Context(), second, silent); err == nil || !strings.Contains(err.Error(), "the modules are those of Linux "+other) {
		t.Errorf("without the kernel of its modules: %v", err)
	}
	put(t, second, map[string]string{media.KernelFile: string(uki.Linux(other))})
	if err := (Change{}).Apply(t.Context(), second, silent); err != nil {
		t.Fatal(err)
	}
	if i, _, _ := opened(t, second); i.Release != other || i.Replacement != nil {
		t.Errorf("Linux %s", i.Release)
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	foreign := module.Module(other)
	for name, c := range map[string]struct {
		overlay map[string]string
		change  Change
		want    string
	}{
		"no init":           {nil, Change{Remove: []string{"/usr/sbin/init"}}, "/usr/sbin/init isn't there any more"},
		"another init":      {map[string]string{"usr/sbin/init": "mine"}, Change{}, "/usr/sbin/init has a content"},
		"init is a folder":  {map[string]string{"usr/sbin/init/x": "x"}, Change{Remove: []string{"/usr/sbin/init"}}, "/usr/sbin/init isn't there any more"},
		"unknown path":      {nil, Change{Remove: []string{"/nothing"}}, "remove /nothing: the root file system has no such path"},
		"two kernels":       {modules(other), Change{}, "modules of several kernels (6.12.0-base, 6.13.0-other)"},
		"no modules":        {nil, Change{Remove: []string{"/lib/modules"}}, "no modules for the kernel: add those of Linux 6.12.0-base"},
		"other modules":     {modules(other), Change{Remove: []string{"/lib/modules"}}, "the modules are those of Linux 6.13.0-other, and the kernel is Linux 6.12.0-base"},
		"foreign module":    {map[string]string{modulesDir + "/" + release + "/extra/x.ko": string(foreign)}, Change{}, `is for Linux "6.13.0-other"`},
		"lonely module":     {map[string]string{modulesDir + "/" + release + "/extra/x.ko": string(module.Module(release, "depends=y"))}, Change{}, "module x needs y"},
		"no squashfs":       {nil, Change{Remove: []string{"/lib/modules/" + release + "/kernel/squashfs.ko"}}, "don't include squashfs"},
		"never seen":        {map[string]string{"var/lib/x": "x"}, Change{}, "a node mounts something over /var"},
		"file on directory": {map[string]string{"usr/bin": "x"}, Change{}, "a directory is there"},
		"directory on file": {map[string]string{"etc/motd/x": "x"}, Change{}, "a file is there"},
	} {
		dir, overlay := base(t), t.TempDir()
		before, _, _ := opened(t, dir)
		put(t, overlay, c.overlay)
		c.change.Overlays = []Overlay{{Name: "mine", Dir: overlay}}
		if err := c.change.Apply(t.Context(), dir, silent); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
		if after, _, _ := opened(t, dir); after.SHA256 != before.SHA256 {
			t.Errorf("%s: the system has changed", name)
		}
	}
	plain := t.TempDir()
	put(t, plain, map[string]string{"usr/bin/containerd": "x"})
	if err := os.Chmod(filepath.Join(plain, "usr/bin/containerd"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := (Change{Overlays: []Overlay{{Name: "mine", Dir: plain}}}).Apply(t.Context(), base(t), silent); err == nil || !strings.Contains(err.Error(), "/usr/bin/containerd isn't executable: its permissions are 0644") {
		t.Errorf("a program without permission: %v", err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	linked, nowhere := base(t), t.TempDir()
	if err := errors.Join(os.Mkdir(filepath.Join(nowhere, "sbin"), 0o700), os.Symlink("/usr/bin/nothing", filepath.Join(nowhere, "sbin/init"))); err != nil {
		t.Fatal(err)
	}
	if err := (Change{Overlays: []Overlay{{Name: "mine", Dir: nowhere, At: "usr"}}}).Apply(t.Context(), linked, silent); err == nil || !strings.Contains(err.Error(), "/usr/sbin/init isn't there any more") {
		t.Errorf("a link that leads nowhere: %v", err)
	}
	if err := (Change{Overlays: []Overlay{{Name: "mine", Dir: file}}}).Apply(t.Context(), base(t), silent); err == nil || !strings.Contains(err.Error(), "not a directory") {
		t.Errorf("an overlay that is a file: %v", err)
	}
}

// A system that is too large isn't made, and the installer directory stays what it is.
func TestLargeSystem(t *testing.T) {
	t.Parallel()
	dir, linux := base(t), filepath.Join(t.TempDir(), "vmlinuz")
	before, _, _ := opened(t, dir)
	if err := os.WriteFile(linux, uki.Linux(release), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(linux, 300<<20); err != nil {
		t.Fatal(err)
	}
	if err := (Change{Kernel: linux}).Apply(t.Context(), dir, silent); err == nil || !strings.Contains(err.Error(), "the system has 314 MB, and a disk has room for 264 MB") {
		t.Errorf("%v", err)
	}
	if after, _, _ := opened(t, dir); after.SHA256 != before.SHA256 {
		t.Error("the system has changed")
	}
}
