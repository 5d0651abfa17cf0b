package customize

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/image/rootfs"
	"github.com/garboard-os/garboard/image/squashfs"
	"github.com/garboard-os/garboard/kernel"
)

// overlay adds the files of all overlays.
func (w *work) overlay() error {
	for _, o := range w.Overlays {
		noted := Added{Name: o.Name}
		if err := w.walk(&noted, o.Dir, o.At, o.Without...); err != nil {
			return err
		}
		if len(noted.Files) == 0 && len(o.Without) > 0 {
			continue
		}
		w.step.Added = append(w.step.Added, noted)
		w.say(fmt.Sprintf("added %s: %s", o.Name, count(len(noted.Files), "file")))
	}
	return nil
}

// walk adds what is in a directory, without what is named.
func (w *work) walk(noted *Added, dir, to string, without ...string) error {
	w.makeDirectory(w.end(to))
	dir, err := filepath.EvalSymlinks(dir) // WalkDir doesn't follow a link
	if err != nil {
		return err
	}
	if _, err := os.ReadDir(dir); err != nil {
		return err // a file has none
	}
	return filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil || name == dir {
			return err
		}
		if w.ctx.Err() != nil {
			return w.ctx.Err()
		}
		relative, err := filepath.Rel(dir, name)
		if err != nil {
			return err
		}
		if slices.Contains(without, relative) {
			return filepath.SkipDir
		}
		at := path.Join(to, filepath.ToSlash(relative))
		if err := w.add(noted, name, at, d); err != nil {
			return fmt.Errorf("add /%s: %w", at, err)
		}
		return nil
	})
}

// add adds one file, link or directory. A directory stays as it is if it is there.
func (w *work) add(noted *Added, from, at string, d fs.DirEntry) error {
	info, err := d.Info()
	if err != nil {
		return err
	}
	if at = w.tree.Resolve(at); info.IsDir() {
		at = w.end(at) // through a link to a directory
	}
	old, there := w.tree[at]
	if info.IsDir() {
		if there && !old.Mode.IsDir() {
			return fmt.Errorf("it is a directory, and %s there", describe(old))
		}
		if !there {
			w.tree[at] = squashfs.Directory(info.Mode().Perm() | info.Mode()&fs.ModeSticky)
		}
		return nil
	}
	if there && old.Mode.IsDir() {
		return fmt.Errorf("a directory is there: name it in what is removed")
	}
	if slices.ContainsFunc(rootfs.Covered, func(dir string) bool { return strings.HasPrefix(at, dir+"/") }) {
		return fmt.Errorf("a node mounts something over /%s: it would never see the file", strings.SplitN(at, "/", 2)[0])
	}
	f := File{Path: "/" + at, Replaced: there}
	switch info.Mode().Type() {
	case fs.ModeSymlink:
		target, err := os.Readlink(from)
		if err != nil {
			return err
		}
		w.tree[at], f.Target = squashfs.Link(target), target
	case 0:
		if at, err = w.addFile(&f, from, at, info); err != nil {
			return err
		}
	default:
		return fmt.Errorf("it is neither file, directory nor link (%s)", info.Mode().Type())
	}
	w.modules = w.modules || isModule(at)
	noted.Files = append(noted.Files, f)
	return nil
}

func describe(f squashfs.File) string {
	if f.Mode&fs.ModeSymlink != 0 {
		return "a link to " + f.Target + " is"
	}
	return "a file is"
}

// addFile adds a file. A module of the kernel is decompressed.
func (w *work) addFile(f *File, from, at string, info fs.FileInfo) (string, error) {
	in, err := os.Open(from)
	if err != nil {
		return at, err
	}
	defer in.Close()
	if isModule(at) {
		plainName, plain, err := kernel.PlainModule(at, in)
		if err != nil {
			return at, err
		}
		if w.SignModule != nil && !kernel.Signed(plain) {
			if plain, err = w.SignModule(plain); err != nil {
				return at, err
			}
		}
		_, f.Replaced = w.tree[plainName]
		w.tree[plainName] = squashfs.Content(plain, 0o644)
		sum := sha256.Sum256(plain)
		f.Path, f.SHA256, f.Size = "/"+plainName, hex.EncodeToString(sum[:]), int64(len(plain))
		return plainName, nil
	}
	sum := sha256.New()
	size, err := io.Copy(sum, in)
	if err != nil {
		return at, err
	}
	f.SHA256, f.Size = hex.EncodeToString(sum.Sum(nil)), size
	w.tree[at] = squashfs.File{Mode: info.Mode().Perm(), Size: size, Open: func() (io.ReadCloser, error) { return os.Open(from) }}
	return at, nil
}

const modulesDir = "usr/lib/modules"

// isModule reports whether a path is that of a module, compressed or not.
func isModule(name string) bool {
	base := path.Base(name)
	return strings.HasPrefix(name, modulesDir+"/") && (strings.HasSuffix(base, ".ko") || strings.Contains(base, ".ko."))
}

// indexModules makes the indexes of the modules anew if some were added or removed, and finds out which kernel they are
// for.
func (w *work) indexModules() error {
	files := map[string][]string{} // by release
	for name, f := range w.tree {
		if release, file, ok := strings.Cut(strings.TrimPrefix(name, modulesDir+"/"), "/"); ok && strings.HasPrefix(name, modulesDir+"/") && f.Mode.IsRegular() {
			files[release] = append(files[release], file)
		}
	}
	releases := slices.Sorted(maps.Keys(files))
	switch {
	case len(releases) == 0:
		return fmt.Errorf("the root file system has no modules for the kernel: add those of Linux %s as /lib/modules/%[1]s", w.installer.Release)
	case len(releases) > 1:
		return fmt.Errorf("the root file system has the modules of several kernels (%s), and an image has one kernel: remove the others", strings.Join(releases, ", "))
	}
	if w.release = releases[0]; w.release != w.installer.Release {
		if !w.KernelLater {
			return otherKernel(w.release, w.installer.Release)
		}
		w.say(fmt.Sprintf("the modules are those of Linux %s, and the kernel is Linux %s: the image is complete once it has the other kernel as /usr/install/vmlinuz", w.release, w.installer.Release))
	}
	if !w.modules {
		return nil
	}
	slices.Sort(files[w.release])
	base := modulesDir + "/" + w.release + "/"
	read := func(name string) ([]byte, error) { return w.tree.ReadFile(base + name) }
	for _, name := range files[w.release] {
		if !isModule(base + name) {
			continue
		}
		content, err := read(name)
		if err != nil {
			return err
		}
		if magic, err := kernel.Magic(content); err != nil || magic != w.release {
			return fmt.Errorf("module %s is for Linux %q, and lies in the folder of Linux %s (%v)", name, magic, w.release, err)
		}
		if !kernel.Signed(content) && w.unsigned == "" {
			w.unsigned = name
		}
	}
	indexes, err := kernel.Index(files[w.release], read)
	if err != nil {
		return fmt.Errorf("modules of Linux %s: %w", w.release, err)
	}
	for name, content := range indexes {
		w.tree[base+name] = squashfs.Content(content, 0o644)
	}
	w.say(fmt.Sprintf("indexed the modules of Linux %s: %d", w.release, bytes.Count(indexes["modules.dep"], []byte("\n"))))
	return w.parts.SetModules(w.release, read)
}

func otherKernel(modules, kernel string) error {
	return fmt.Errorf("the modules are those of Linux %s, and the kernel is Linux %s", modules, kernel)
}
