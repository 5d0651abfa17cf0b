// Package rootfs lays the root filesystem of a node: a tree of files on the build machine, which image/squashfs packs.
//
// The tree is a list of values. What every node has is in tables that can be read from top to bottom (layout.go), what
// comes from Debian's packages is another table (tools.go), and the programs that this project builds are named in
// Sources. Nothing is copied that isn't listed: there is no base image to strip down. There is no shell either, nor any
// script, and Check holds that true.
//
// PID 1 isn't in the tree, only its place is. It is /init of the initramfs anyway, and is bound from there: so it is in
// what a node boots once instead of twice, and an edit of it doesn't mean compressing the root filesystem anew. A
// container node gets it bound in the same way.
//
// The tree has one place for programs and libraries, /usr, and links from the old names (/bin, /sbin, /lib, /lib64) to
// it. The same tree serves machines and container nodes; the latter have no use for the kernel modules.
package rootfs

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/boot/signed"
	"github.com/garboard-os/garboard/image/debian"
	"github.com/garboard-os/garboard/image/sbom"
)

// Entry is one path in the tree: a directory, a symbolic link, or a file with a text or with a copy of another file's
// bytes.
type Entry struct {
	// Path is absolute and clean.
	Path string
	// Mode has the permission bits, and fs.ModeDir or fs.ModeSymlink.
	Mode fs.FileMode
	// Text is a file's contents or a link's target.
	Text string
	// From is the file on the build machine whose bytes are copied; then Text is empty.
	From string
}

func dir(path string, perm fs.FileMode) Entry { return Entry{Path: path, Mode: fs.ModeDir | perm} }
func text(path, contents string) Entry        { return Entry{Path: path, Mode: 0o644, Text: contents} }
func link(path, target string) Entry          { return Entry{Path: path, Mode: fs.ModeSymlink, Text: target} }

// Sources are the parts of a tree that were built or fetched before. Each is a path on the build machine.
type Sources struct {
	// Version is the release that os-release states, such as v0.1.0.
	Version string
	// Programs maps names in /usr/bin to files, or to links among them: containerd, its shim, runc, sandbox.
	Programs map[string]string
	// CNI is a folder with the CNI plugins: one program, and links to it under their names.
	CNI string
	// Tools is the folder that the set of the same name was built into.
	Tools string
	// Loaders is a folder with the boot loaders of installed machines; empty for none.
	Loaders string
	// ReleaseKeys are the public keys that the system trusts, as PEM.
	ReleaseKeys string
	// KernelPackages are the keys of the packages that the kernel was taken from.
	KernelPackages []string
	// Init is PID 1's program. It isn't in the tree, but what it is made of is in the list of all software.
	Init string
	// ModulesDir is the kernel's module folder, named after its release; empty for none.
	ModulesDir string
}

// Plan lists the tree for the sources, sorted by path.
func Plan(src Sources) ([]Entry, error) {
	files, err := configured()
	if err != nil {
		return nil, err
	}
	kernel := text(debian.PackagesFolder+"/kernel", strings.Join(src.KernelPackages, "\n")+"\n")
	entries := slices.Concat(directories, hostPaths(), links, files, []Entry{initPlace, osRelease(src.Version), kernel, text(signed.KeysFile, src.ReleaseKeys)})
	type copied struct{ from, to string }
	copies := []copied{
		{src.CNI, boot.CNIPlugins},
		{src.Tools, "/"},
		{src.Loaders, esp.LoaderDir},
		{src.ModulesDir, path.Join("/usr/lib/modules", filepath.Base(src.ModulesDir))},
	}
	for name, from := range src.Programs {
		copies = append(copies, copied{from, "/usr/bin/" + name})
	}
	for _, c := range copies {
		if c.from == "" {
			continue
		}
		copied, err := CopyOf(c.from, c.to)
		if err != nil {
			return nil, err
		}
		entries = append(entries, copied...)
	}
	list, err := software(src, entries)
	if err != nil {
		return nil, err
	}
	return arrange(append(entries, list))
}

// hostPaths are the places that only pods use: empty directories, and links to where they may write.
func hostPaths() (entries []Entry) {
	for _, p := range boot.HostPaths {
		if p.At == "" {
			entries = append(entries, dir(p.Path, 0o755))
		} else {
			entries = append(entries, link(p.Path, p.At))
		}
	}
	return entries
}

// software lists which software the tree has.
func software(src Sources, entries []Entry) (Entry, error) {
	list := sbom.New(src.Version)
	list.Debian(strings.Join(src.KernelPackages, "\n"))
	for _, e := range append(entries, Entry{From: src.Init}) {
		if e.From == "" {
			continue
		}
		f, err := os.Open(e.From)
		if err != nil {
			return Entry{}, err
		}
		if path.Dir(e.Path) == debian.PackagesFolder {
			var keys []byte
			keys, err = io.ReadAll(f)
			list.Debian(string(keys))
		} else {
			list.Program(f)
		}
		if err := errors.Join(err, f.Close()); err != nil {
			return Entry{}, err
		}
	}
	data, err := list.Text()
	return text("/"+sbom.File, string(data)), err
}

// Required are the files and directories that a node doesn't start without. The first one is the place of process 1.
func Required() []Entry {
	entries := append([]Entry{initPlace}, directories...)
	for _, name := range Programs {
		entries = append(entries, Entry{Path: "/usr/bin/" + name, Mode: 0o755})
	}
	return entries
}

// Programs are those that are built, besides PID 1's: Sources has a file for each.
var Programs = []string{"containerd", "containerd-shim-runc-v2", "runc", "sandbox"}

// Covered are the directories, without a leading slash, that a node mounts something over: it never sees files in them.
var Covered = []string{"dev", "proc", "run", "sys", "system", "tmp", "var"}

// CopyOf lists from, if it is a file or a link, or the files and links below it, as entries at or below to. Directories
// come by themselves.
func CopyOf(from, to string) ([]Entry, error) {
	var entries []Entry
	err := filepath.WalkDir(from, func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		relative, err := filepath.Rel(from, name)
		if err != nil {
			return err
		}
		e := Entry{Path: path.Join(to, relative)}
		info, err := d.Info()
		if err != nil {
			return err
		}
		switch info.Mode().Type() {
		case fs.ModeSymlink:
			e.Mode = fs.ModeSymlink
			e.Text, err = os.Readlink(name)
		case 0:
			// Only whether it is executable counts: the rest is the umask of whoever built it.
			e.Mode, e.From = 0o644, name
			if info.Mode()&0o100 != 0 {
				e.Mode = 0o755
			}
		default:
			err = fmt.Errorf("%s is neither file nor link", name)
		}
		entries = append(entries, e)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", from, err)
	}
	return entries, nil
}

// arrange adds the directories that entries lie in, sorts, and refuses two entries for one path.
func arrange(entries []Entry) ([]Entry, error) {
	byPath := make(map[string]Entry, len(entries))
	for _, e := range entries {
		if !path.IsAbs(e.Path) || path.Clean(e.Path) != e.Path || e.Path == "/" {
			return nil, fmt.Errorf("plan root filesystem: %q is no clean absolute path", e.Path)
		}
		if _, twice := byPath[e.Path]; twice {
			return nil, fmt.Errorf("plan root filesystem: two entries for %s", e.Path)
		}
		byPath[e.Path] = e
	}
	for _, e := range entries {
		for parent := path.Dir(e.Path); parent != "/"; parent = path.Dir(parent) {
			above, ok := byPath[parent]
			if !ok {
				byPath[parent] = dir(parent, 0o755)
			} else if !above.Mode.IsDir() {
				return nil, fmt.Errorf("plan root filesystem: %s lies in %s, which is no directory", e.Path, parent)
			}
		}
	}
	return slices.SortedFunc(maps.Values(byPath), func(a, b Entry) int { return strings.Compare(a.Path, b.Path) }), nil
}

// Lay writes the entries below root, an empty directory, and checks the result.
func Lay(root string, entries []Entry) error {
	for _, e := range entries {
		if err := e.lay(filepath.Join(root, e.Path)); err != nil {
			return fmt.Errorf("lay %s: %w", e.Path, err)
		}
	}
	if err := os.Chmod(root, 0o755); err != nil {
		return err
	}
	return Check(root)
}

func (e Entry) lay(name string) error {
	switch {
	case e.Mode.IsDir():
		if err := os.Mkdir(name, 0o755); err != nil {
			return err
		}
	case e.Mode&fs.ModeSymlink != 0:
		return os.Symlink(e.Text, name)
	default:
		if err := e.write(name); err != nil {
			return err
		}
	}
	// The umask took part in the calls above.
	return os.Chmod(name, e.Mode&^fs.ModeDir)
}

func (e Entry) write(name string) error {
	var from io.Reader = strings.NewReader(e.Text)
	if e.From != "" {
		f, err := os.Open(e.From)
		if err != nil {
			return err
		}
		defer f.Close()
		from = f
	}
	to, err := os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	if _, err := io.Copy(to, from); err != nil {
		to.Close()
		return err
	}
	return to.Close()
}

// shells are names that a node must not have in any folder.
var shells = []string{"sh", "ash", "bash", "dash", "zsh", "ksh", "mksh", "busybox", "toybox", "perl", "python", "python3", "lua", "awk"}

// Check looks through a tree for anything that could run a script: shells and other interpreters by name, and files
// that start with
// #!. It also wants every link to lead somewhere inside the tree. It reports all that it finds.
func Check(root string) error {
	var found []error
	err := filepath.WalkDir(root, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		inside := strings.TrimPrefix(name, root)
		if slices.Contains(shells, d.Name()) && !d.IsDir() {
			found = append(found, fmt.Errorf("%s: a node has no interpreter", inside))
		}
		switch {
		case d.Type()&fs.ModeSymlink != 0:
			found = append(found, checkLink(root, inside))
		case d.Type().IsRegular():
			script, err := isScript(name)
			if err != nil {
				return err
			}
			if script {
				found = append(found, fmt.Errorf("%s: is a script", inside))
			}
		}
		return nil
	})
	if err := errors.Join(append(found, err)...); err != nil {
		return fmt.Errorf("check root filesystem: %w", err)
	}
	return nil
}

// mountedLater are places that are empty in the image: links into them are fine.
var mountedLater = []string{"/run/", "/proc/", "/var/"}

func checkLink(root, inside string) error {
	target, err := os.Readlink(filepath.Join(root, inside))
	if err != nil {
		return err
	}
	if !path.IsAbs(target) {
		target = path.Join(path.Dir(inside), target)
	}
	if slices.ContainsFunc(mountedLater, func(place string) bool { return strings.HasPrefix(target, place) }) {
		return nil
	}
	if _, err := os.Lstat(filepath.Join(root, target)); err != nil {
		return fmt.Errorf("%s: link to %s, which isn't there", inside, target)
	}
	return nil
}

func isScript(name string) (bool, error) {
	f, err := os.Open(name)
	if err != nil {
		return false, err
	}
	defer f.Close()
	var start [2]byte
	n, err := io.ReadFull(f, start[:])
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return false, err
	}
	return string(start[:n]) == "#!", nil
}
