package customize

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/image/initramfs"
	"github.com/garboard-os/garboard/image/rootfs"
)

// check refuses a system that a machine couldn't start.
func (w *work) check() error {
	var errs []error
	for i, e := range rootfs.Required() {
		switch f, ok := w.tree[w.end(e.Path)]; {
		case !ok || f.Mode.Type() != e.Mode.Type():
			errs = append(errs, fmt.Errorf("%s isn't there any more: a node doesn't start without it", e.Path))
		case f.Mode.IsRegular() && e.Mode&0o111 != 0 && f.Mode&0o111 == 0:
			errs = append(errs, fmt.Errorf("%s isn't executable: its permissions are %04o", e.Path, f.Mode.Perm()))
		case i == 0 && f.Size > 0:
			errs = append(errs, fmt.Errorf("%s has a content: it is only the place for the program of process 1", e.Path))
		}
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
