package customize

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/image/initramfs"
	"github.com/garboard-os/garboard/image/rootfs"
)

// spare is what the EFI system partition has besides the systems in both slots: boot loaders, and the file system's own tables.
const spare = 8 << 20

// check refuses a system that a machine couldn't start.
func (w *work) check() error {
	var errs []error
	for _, name := range rootfs.Required() {
		if _, ok := w.tree[name]; !ok {
			errs = append(errs, fmt.Errorf("/%s isn't there any more: a node doesn't start without it", name))
		}
	}
	if f := w.tree[rootfs.Required()[0]]; f.Size > 0 {
		errs = append(errs, fmt.Errorf("/%s has a content: it is only the place for the program of process 1", rootfs.Required()[0]))
	}
	base := modulesDir + "/" + w.release + "/"
	builtin, _ := w.tree.ReadFile(base + "modules.builtin") // without the list, nothing is built in
	for _, module := range initramfs.Modules {
		file := "/" + module + ".ko"
		found := slices.ContainsFunc(strings.Fields(string(builtin)), func(line string) bool { return path.Base(line) == file[1:] })
		for name := range w.tree {
			found = found || strings.HasPrefix(name, base) && strings.HasSuffix(name, file)
		}
		if !found {
			errs = append(errs, fmt.Errorf("the modules of Linux %s don't include %s, which mounts the root file system", w.release, module))
		}
	}
	return errors.Join(errs...)
}

// checkSize refuses a system of which the EFI system partition has no room for two.
func (w *work) checkSize(size int64) error {
	for _, v := range boot.Volumes {
		if v.Label == boot.LabelEFI {
			if limit := (v.Size - spare) / 2; size > limit {
				return fmt.Errorf("the system has %d MB, and a disk has room for %d MB: remove files from the root file system", size/1e6, limit/1e6)
			}
			if limit := (v.Small - spare) / 2; size > limit {
				w.say(fmt.Sprintf("the system has %d MB: it is too large for disks below 8 GiB, and for those that begin as an image of the kind disk: they have room for %d MB", size/1e6, limit/1e6))
			}
		}
	}
	w.say(fmt.Sprintf("the system has %d MB", size/1e6))
	return nil
}
