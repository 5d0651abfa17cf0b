package files

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/config"
	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// tree is what a directory holds: files with content and mode.
func tree(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	must(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		content := ""
		if info.Mode().IsRegular() {
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			content = string(data)
		}
		out[strings.TrimPrefix(path, dir)] = info.Mode().String() + " " + content
		return nil
	}))
	return out
}

// Whatever was configured before, and whenever the node was booted in between:
// the files are those of a node that was only ever configured as it is now.
func TestOnlyTheLastConfigurationCounts(t *testing.T) {
	image := map[string]string{"/etc/a": "image a\n", "/etc/dir/b": "image b", "/etc/link": "-> a"}
	paths := []string{"/etc/a", "/etc/dir/b", "/etc/link", "/etc/new", "/etc/new/deep", "/run/x", "/var/x", "/var/deep/y", "/usr/no", "/etc/hosts"}
	entries := rapid.Custom(func(r *rapid.T) []config.File {
		var all []config.File
		for _, path := range rapid.SliceOfNDistinct(rapid.SampledFrom(paths), 0, 6, rapid.ID).Draw(r, "paths") {
			all = append(all, config.File{
				Path:        path,
				Content:     rapid.SampledFrom([]string{"", "1\n", "2"}).Draw(r, "content"),
				Op:          rapid.SampledFrom([]config.FileOp{config.FileCreate, config.FileAppend, config.FileOverwrite}).Draw(r, "op"),
				Permissions: rapid.SampledFrom([]config.FileMode{0o644, 0o600}).Draw(r, "permissions"),
			})
		}
		return all
	})
	rapid.Check(t, func(r *rapid.T) {
		changed, fresh := newBench(t, image), newBench(t, image)
		for range rapid.IntRange(0, 4).Draw(r, "changes") {
			changed.lay(entries.Draw(r, "before")...)
			if rapid.Bool().Draw(r, "reboot") {
				changed.boot()
			}
		}
		last := entries.Draw(r, "last")
		changed.lay(last...)
		fresh.lay(last...)
		got, want := tree(t, changed.root), tree(t, fresh.root)
		// An empty list of what was laid is the same as none.
		for _, files := range []map[string]string{got, want} {
			if strings.HasSuffix(files[recordFile], " {}\n") {
				delete(files, recordFile)
			}
		}
		if d := cmp.Diff(want, got); d != "" {
			r.Errorf("after changes (-fresh +changed):\n%s", d)
		}
	})
}
