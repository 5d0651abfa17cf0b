package disks

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// Kept are, by the names in machine.kubelet.persist, places below /var and below /etc. The one below /etc is in
// memory, and the one below /var is emptied at each boot, unless the configuration has the name: then the second one
// is in the first one.
var Kept = map[string][2]string{"cni": {"opt/cni", "cni/net.d"}, "volumePlugins": {"lib/volumeplugins", "kubernetes/volumeplugins"}}

// openPlugins mounts the CNI plugins of the image below the directory in which pod networks install theirs. They run
// as root whenever a pod starts. So those of an earlier boot are removed, as the networks in boot.CNIConfDir are: pod
// networks install both at each boot, the plugins first, and no pod starts before. What the configuration names is
// mounted instead.
func (d *Disks) openPlugins() error {
	own := filepath.Join(d.o.dirs.Var, "opt", "cni")
	dir := filepath.Join(own, "bin")
	if mounted, err := mountinfo.Mounted(dir); err != nil || mounted {
		return err
	}
	persist, err := configuration.Wanted(d.o.Store, func(c *config.Config) []string { return c.Machine.Kubelet.Persist })
	for name, place := range Kept {
		at, to := filepath.Join(d.o.dirs.Var, place[0]), filepath.Join(d.o.dirs.Etc, place[1])
		if !slices.Contains(persist, name) {
			err = errors.Join(err, untrusted.RemoveAll(at)) // also for a later boot that has the name
			continue
		}
		failed := untrusted.Reclaim(at+"/etc", 0o700)
		if failed == nil { // nothing else is mounted there
			failed = os.NewSyscallError("mount on "+to, unix.Mount(at+"/etc", to, "", unix.MS_BIND, ""))
		}
		if err = errors.Join(err, failed); failed == nil {
			d.Keeper.Hold(to)
		}
	}
	data := "lowerdir=" + d.o.Plugins + ",upperdir=" + dir + ",workdir=" + filepath.Join(own, "work")
	err = errors.Join(err, untrusted.MkdirAll(dir, 0o755), untrusted.Reclaim(filepath.Join(own, "work"), 0o700))
	if err == nil {
		err = unix.Mount("overlay", dir, "overlay", unix.MS_NOSUID|unix.MS_NODEV, data)
	}
	if err != nil {
		err = errors.Join(fmt.Errorf("mount overlay on %s with %q: %w", dir, data, err), unix.Mount(d.o.Plugins, dir, "", unix.MS_BIND, ""))
	}
	d.Keeper.Hold(dir)
	return err
}
