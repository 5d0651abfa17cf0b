package files

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/config"
)

// file is what is to be laid at one path.
type file struct {
	names   []string // the paths of the entries that made it, as they are written
	op      config.FileOp
	mode    config.FileMode
	content []byte
}

// plan says what is to be laid where, in the order of the entries. What can't be
// laid at all has its status already.
func (d *Daemon) plan(img image, entries []config.File) (wanted map[string]*file, order []string, statuses map[string]Status) {
	wanted, statuses = map[string]*file{}, map[string]Status{}
	for _, e := range entries {
		path, err := d.resolve(e.Path)
		if err == nil {
			err = add(wanted, img, path, e)
		}
		if err != nil {
			statuses[e.Path] = Status{Op: e.Op, Permissions: e.Permissions, Problem: err.Error()}
			continue
		}
		if !slices.Contains(order, path) {
			order = append(order, path)
		}
	}
	return wanted, order, statuses
}

// add takes one entry into the plan.
func add(wanted map[string]*file, img image, path string, e config.File) error {
	if f := wanted[path]; f != nil {
		if f.op != config.FileAppend || e.Op != config.FileAppend {
			return fmt.Errorf("is the same file as %s, which an earlier entry lays", f.names[0])
		}
		f.mode, f.names = e.Permissions, append(f.names, e.Path)
		f.content = appended(f.content, e.Content)
		return nil
	}
	for other, f := range wanted {
		if config.Within(path, other) || config.Within(other, path) {
			return fmt.Errorf("can't be beside %s, which an earlier entry lays: one would be a directory", f.names[0])
		}
	}
	f := &file{names: []string{e.Path}, op: e.Op, mode: e.Permissions, content: []byte(e.Content)}
	if e.Op != config.FileOverwrite {
		base, _, there, err := img.file(path)
		switch {
		case err != nil:
			return err
		case there && e.Op != config.FileAppend:
			return errors.New("is in the image already: use op overwrite to replace it, or append to add to it")
		case there:
			f.content = appended(base, e.Content)
		}
	}
	wanted[path] = f
	return nil
}

// appended begins the content on a line of its own: a certificate that follows
// another on the same line is lost.
func appended(base []byte, content string) []byte {
	out := slices.Clone(base)
	if len(out) > 0 && out[len(out)-1] != '\n' {
		out = append(out, '\n')
	}
	return append(out, content...)
}

// resolve is the path that an entry means, with the links on the way followed:
// they must not lead out of where files may be laid.
func (d *Daemon) resolve(path string) (string, error) {
	path = filepath.Clean(path)
	if err := config.FilePlace(path); err != nil {
		return "", err
	}
	root, err := filepath.EvalSymlinks(d.o.root)
	if err != nil {
		return "", err
	}
	real, err := follow(filepath.Join(root, d.standing(path)))
	if err != nil {
		return "", err
	}
	real, inside := strings.CutPrefix(real, strings.TrimSuffix(root, "/"))
	if !inside {
		return "", fmt.Errorf("leads to %s, through a link", real)
	}
	real += strings.TrimPrefix(path, d.standing(path))
	if err := config.FilePlace(real); err != nil {
		return "", fmt.Errorf("leads to %s, through a link: %w", real, err)
	}
	return real, nil
}

// standing is the part of a path that stays: a file of ours on the way to it is
// one that goes.
func (d *Daemon) standing(path string) string {
	stays := path
	for dir := filepath.Dir(path); dir != "/"; dir = filepath.Dir(dir) {
		if d.laid[dir] != "" {
			stays = filepath.Dir(dir)
		}
	}
	return stays
}

// follow is filepath.EvalSymlinks for a path whose last parts needn't exist.
func follow(path string) (string, error) {
	real, err := filepath.EvalSymlinks(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return real, err
	}
	if info, err := os.Lstat(path); err == nil && info.Mode()&fs.ModeSymlink != 0 {
		return "", fmt.Errorf("%s is a link to nothing", path)
	}
	dir, base := filepath.Split(path)
	real, err = follow(filepath.Clean(dir))
	return filepath.Join(real, base), err
}
