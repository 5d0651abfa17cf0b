package rootfs

import (
	"encoding/json"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/image/debian"
	"github.com/garboard-os/garboard/image/sbom"
)

// The list of software has the modules of PID 1 and of the programs in the tree, the packages of Debian in it, and
// those of the kernel.
func TestSoftware(t *testing.T) {
	t.Parallel()
	info, ok := debug.ReadBuildInfo()
	if !ok || len(info.Deps) == 0 {
		t.Skip("this test's program doesn't say what it is made of")
	}
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	keys, other := filepath.Join(folder, "tools"), filepath.Join(folder, "text")
	for path, content := range map[string]string{keys: "xfsprogs=6.13.0-2@abc\ne2fsprogs=1.47.2-3@def\n", other: "no program"} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	entries := []Entry{{Path: debian.PackagesFolder + "/tools", From: keys}, {Path: "/usr/share/text", From: other}, dir("/run", 0o755)}
	list := func(src Sources, entries []Entry) []string {
		t.Helper()
		entry, err := software(src, entries)
		if err != nil {
			t.Fatal(err)
		}
		var l sbom.List
		if err := json.Unmarshal([]byte(entry.Text), &l); err != nil || entry.Path != "/"+sbom.File {
			t.Fatalf("%s: %v", entry.Path, err)
		}
		var names []string
		for _, p := range l.Packages {
			names = append(names, p.Name+" "+p.Version)
		}
		return names
	}
	module := info.Deps[slices.IndexFunc(info.Deps, func(m *debug.Module) bool { return m.Replace == nil && m.Version != "" })]
	own := module.Path + " " + module.Version
	base := Sources{Version: "v1.2.3", KernelPackages: []string{"linux-image=6.12.1@0"}, Init: program}
	for _, want := range []string{"xfsprogs 6.13.0-2", "e2fsprogs 1.47.2-3", "linux-image 6.12.1", own} {
		if got := list(base, entries); !slices.Contains(got, want) {
			t.Errorf("%q isn't in %q", want, got)
		}
	}
	base.Init = other
	if got := list(base, entries); slices.Contains(got, own) {
		t.Errorf("modules of no program: %q", got)
	}
	if got := list(base, append(entries, Entry{Path: "/usr/bin/containerd", From: program})); !slices.Contains(got, own) {
		t.Errorf("the modules of a program aren't in %q", got)
	}
	if _, err := software(Sources{Init: filepath.Join(folder, "absent")}, nil); err == nil || !strings.Contains(err.Error(), "absent") {
		t.Errorf("without PID 1: %v", err)
	}
}
