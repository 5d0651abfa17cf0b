package rootfs

import (
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/boot"
)

// hostPathRow is a row of docs/host-paths.md.
type hostPathRow struct{ path, what, writable string }

func hostPathRows(t *testing.T) (rows []hostPathRow) {
	t.Helper()
	text, err := os.ReadFile("../../docs/host-paths.md")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if cells := strings.Split(line, " | "); strings.HasPrefix(line, "| `/") && len(cells) == 4 {
			rows = append(rows, hostPathRow{strings.Trim(cells[0], "| `"), cells[1], cells[2]})
		}
	}
	return rows
}

// below reports whether path is one of places, or below one.
func below(path string, places ...string) bool {
	return slices.ContainsFunc(places, func(place string) bool { return path == place || strings.HasPrefix(path, place+"/") })
}

// The table of docs/host-paths.md is that of the node: what is in the root file system is there, empty directories are
// empty, links lead where the table says, and what is writable is where pods may write.
func TestHostPaths(t *testing.T) {
	root := lay(t, parts(t))
	rows := hostPathRows(t)
	for _, p := range boot.HostPaths {
		if !slices.ContainsFunc(rows, func(r hostPathRow) bool { return r.path == p.Path && strings.Contains(r.what, p.At) }) {
			t.Errorf("docs/host-paths.md has no row for %s with %s", p.Path, p.At)
		}
		if link, err := os.Readlink(filepath.Join(root, p.Path)); p.At != "" && (err != nil || link != p.At) {
			t.Errorf("%s is a link to %q, want %s (%v)", p.Path, link, p.At, err)
		}
	}
	for _, r := range rows {
		at := r.path
		if first := strings.Split(r.what, "`"); strings.HasPrefix(r.what, "`/") {
			at = first[1]
		}
		want := "no"
		switch {
		case below(at, "/run", "/var/run", "/var/opt/cni/bin", "/tmp", "/dev", "/sys/fs/bpf", "/etc"):
			want = "memory"
		case below(at, "/var"):
			want = "yes"
		}
		if r.writable != want {
			t.Errorf("%s is writable: %s, want %s", r.path, r.writable, want)
		}
		made := []string{"/etc/hostname"} // PID 1 and its services make these, and what is below them
		for _, covered := range Covered {
			made = append(made, "/"+covered)
		}
		if below(at, made...) {
			continue
		}
		entries, err := os.ReadDir(filepath.Join(root, at))
		if err != nil {
			if info, statErr := os.Stat(filepath.Join(root, at)); statErr != nil || info.Mode().Type() != 0 {
				t.Errorf("%s: %v", r.path, err)
			}
		}
		if empty := strings.HasPrefix(r.what, "an empty directory"); empty != (len(entries) == 0 && err == nil) && at == r.path && !below(at, "/etc/cni", "/etc/kubernetes") {
			t.Errorf("%s has %d entries, and the table says %s", r.path, len(entries), r.what)
		}
	}
}

// A pod that mounts /etc/localtime gets a time zone, in the form of tzfile(5): it must be a file.
func TestLocalTime(t *testing.T) {
	root := lay(t, parts(t))
	data, err := os.ReadFile(filepath.Join(root, "etc/localtime"))
	if err != nil {
		t.Fatal(err)
	}
	zone, err := time.LoadLocationFromTZData("local", data)
	if err != nil {
		t.Fatal(err)
	}
	if name, offset := time.Unix(0, 0).In(zone).Zone(); name != "UTC" || offset != 0 || len(data) != 114 {
		t.Errorf("%s, %d s, %d bytes", name, offset, len(data))
	}
	if info, err := os.Lstat(filepath.Join(root, "etc/localtime")); err != nil || info.Mode()&fs.ModeType != 0 {
		t.Errorf("%v, %v", info, err)
	}
}
