// Package customize makes another system out of one: with other files in its root filesystem, another kernel, other
// kernel arguments. It works on an installer directory (package media), the content of an installer image, and needs no
// other program and no privileges.
//
//	garboard.efi ─▶ kernel, arguments, initramfs ─▶ root filesystem ─▶ tree of files
//	                                                remove, add, index modules, check, note what was changed
//	garboard.efi ◀─ kernel, arguments, initramfs ◀─ root filesystem ◀─┘
//
// What wasn't changed isn't compressed again: its bytes stay as they are. The same system and the same changes give the
// same bytes.
package customize

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/image/initramfs"
	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/image/squashfs"
)

// Change is what the other system has different.
type Change struct {
	// Remove are paths of the root filesystem that are removed first, with what is below them.
	Remove []string
	// Overlays are added in order.
	Overlays []Overlay
	// Extensions are directories (boot/extension), and added after the overlays.
	Extensions []string
	// Kernel is the file of another kernel; "": the one in the installer directory.
	Kernel string
	// KernelLater is true if the kernel for other modules may be put into the installer directory after this change.
	KernelLater bool
	// Args are added to the kernel's command line.
	Args []string
	// SignModule signs a module that has no signature; nil: a kernel with such a module isn't locked down.
	SignModule func(module []byte) ([]byte, error)
}

// Overlay is a directory with files for the root filesystem.
type Overlay struct {
	Name string // for people
	Dir  string
	At   string // where in the root filesystem; "": its top
	// Without are directories in Dir that aren't added.
	Without []string
}

// work is a change under way.
type work struct {
	Change
	ctx       context.Context
	say       func(line string)
	installer media.Installer
	parts     initramfs.Parts
	tree      squashfs.Tree
	step      Step // what is noted of it
	// modules is true if a module was added or removed.
	modules bool
	release string // of the kernel that the modules are for
	// unsigned is a module without a signature; "": each that was looked at has one.
	unsigned string
}

// Apply changes the system in an installer directory. Without a change, the system stays what it is.
func (c Change) Apply(ctx context.Context, dir string, say func(line string)) error {
	w := &work{Change: c, ctx: ctx, say: say}
	if err := w.open(dir); err != nil {
		return err
	}
	if len(c.Remove)+len(c.Overlays)+len(c.Extensions)+len(c.Args) == 0 && w.step.Kernel == "" {
		if i := w.installer; !c.KernelLater && i.Modules != "" && i.Modules != i.Release {
			return otherKernel(i.Modules, i.Release)
		}
		return nil
	}
	for _, step := range []func() error{w.remove, w.overlay, w.extend, w.indexModules, w.check, w.note} {
		if err := step(); err != nil {
			return err
		}
	}
	return w.write(dir)
}

// open takes the system apart.
func (w *work) open(dir string) (err error) {
	if w.installer, err = media.ReadInstaller(dir); err != nil {
		return err
	}
	if w.Kernel != "" {
		if w.installer.Replacement, err = os.ReadFile(w.Kernel); err != nil {
			return err
		}
	}
	w.step.System = w.installer.SHA256
	if w.SignModule != nil && slices.Contains(strings.Fields(w.installer.Cmdline), boot.Unlocked) {
		return errors.New("the system has modules without a signature, which no machine with Secure Boot loads: make it anew from that of its release")
	}
	if linux := w.installer.Replacement; linux != nil {
		if w.installer.Release, err = esp.Release(linux); err != nil {
			return fmt.Errorf("the kernel that replaces that of the system: %w", err)
		}
		w.installer.System.Kernel, w.installer.Replacement = linux, nil
		w.step.Kernel = w.installer.Release
		w.say("the kernel is Linux " + w.installer.Release)
	}
	if w.parts, err = initramfs.Open(w.installer.Initramfs); err != nil {
		return err
	}
	w.tree, err = squashfs.Read(w.parts.RootFS, w.parts.RootFS.Size())
	return err
}

// remove removes what the change names.
func (w *work) remove() error {
	for _, name := range w.Remove {
		removed := w.tree.Remove(name)
		if len(removed) == 0 {
			return fmt.Errorf("remove %s: the root file system has no such path", name)
		}
		w.modules = w.modules || slices.ContainsFunc(removed, isModule)
		w.step.Removed = append(w.step.Removed, "/"+w.tree.Resolve(name))
		w.say(fmt.Sprintf("removed %s: %s", name, count(len(removed), "path")))
	}
	return nil
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// write puts the system together again. The directory has it when all of it is written.
func (w *work) write(dir string) (err error) {
	temp, err := os.MkdirTemp(dir, ".customize-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(temp)) }()
	rootfs, err := os.Create(filepath.Join(temp, initramfs.RootFSName))
	if err != nil {
		return err
	}
	defer rootfs.Close()
	w.say(fmt.Sprintf("packing the root file system: %s", count(len(w.tree), "path")))
	if err := w.tree.Write(w.ctx, rootfs); err != nil {
		return err
	}
	options, err := w.installer.Options(dir, temp)
	if err != nil {
		return err
	}
	options.Args, options.Modules = w.Args, w.release
	if w.unsigned != "" { // a kernel that is locked down refuses it
		options.Cmdline = strings.Join(boot.Yield(strings.Fields(options.Cmdline), []string{boot.Unlocked}), " ")
		w.say(fmt.Sprintf("module %s isn't signed: the kernel isn't locked down", w.unsigned))
	}
	archive, err := os.Create(options.Initramfs)
	if err != nil {
		return err
	}
	if err := errors.Join(w.parts.Write(archive, rootfs), archive.Close()); err != nil {
		return err
	}
	if err := options.CheckSize(w.say); err != nil {
		return err
	}
	return options.Directory(dir)
}
