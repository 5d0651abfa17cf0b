package disks

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/system/machine"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

const (
	// repairTimeout is enough for about ten million files on a slow disk.
	repairTimeout = 10 * time.Minute
	// unmountPatience is how long a file system may stay busy after everything
	// that used it was asked to stop.
	unmountPatience = 5 * time.Second
	unmountPoll     = 100 * time.Millisecond
)

// isMounted reports whether this service has mounted a directory.
func (d *Disks) isMounted(dir string) bool {
	d.held.Lock()
	defer d.held.Unlock()
	return slices.Contains(d.mounts, dir)
}

func (d *Disks) hold(dir string) {
	d.held.Lock()
	defer d.held.Unlock()
	d.mounts = append(d.mounts, dir)
}

// mountVolume mounts a volume of dev if it isn't mounted yet. The caller holds d.mu, or d.data for a disk of machine.disks.
func (d *Disks) mountVolume(ctx context.Context, dev device, v volume) error {
	if d.isMounted(v.Dir) {
		return nil
	}
	f, err := d.inspect(dev)
	if err != nil {
		return err
	}
	path, err := v.open(ctx, dev, f.table)
	if err != nil {
		return err
	}
	if mounted, err := mountinfo.Mounted(v.Dir); err != nil {
		return err
	} else if mounted {
		return fmt.Errorf("mount %s on %s: something else is mounted there", path, v.Dir)
	}
	err = unix.Mount(path, v.Dir, v.FileSystem, v.Flags, "")
	kind := fsTypes[v.FileSystem]
	if d.damaged(ctx, kind, path, err) {
		d.log.Warn(fmt.Sprintf("%s on %s is damaged: repairing it, for at most %s", v.Label, path, repairTimeout))
		// After an error of the disk, its log may be whole: the next try may replay it.
		if err := d.repair(ctx, kind, path, !errors.Is(err, unix.EIO)); err != nil {
			return fmt.Errorf("repair %s (%s): %w", v.Label, path, err)
		}
		d.log.Warn(fmt.Sprintf("%s on %s is repaired", v.Label, path))
		err = unix.Mount(path, v.Dir, v.FileSystem, v.Flags, "")
	}
	if err != nil {
		return fmt.Errorf("mount %s (%s) on %s: %w", v.Label, path, v.Dir, err)
	}
	d.hold(v.Dir)
	if err := d.growFileSystem(ctx, kind, path, v.Dir); err != nil {
		d.log.Warn(fmt.Sprintf("%s doesn't use all of %s: %v", v.Label, path, err))
	}
	return nil
}

// kept are, by the names in machine.kubelet.persist, places below /var and below /etc. The one below /etc is in memory, and the one below
// /var is emptied at each boot, unless the configuration has the name: then the second one is in the first one.
var kept = map[string][2]string{"cni": {"opt/cni", "cni/net.d"}, "volumePlugins": {"lib/volumeplugins", "kubernetes/volumeplugins"}}

// openPlugins mounts the CNI plugins of the image below the directory in which pod networks install theirs. They run as root whenever a
// pod starts. So those of an earlier boot are removed, as the networks in boot.CNIConfDir are: pod networks install both at each boot,
// the plugins first, and no pod starts before. What the configuration names is mounted instead.
func (d *Disks) openPlugins() error {
	own := filepath.Join(d.o.varDir, "opt", "cni")
	dir := filepath.Join(own, "bin")
	if mounted, err := mountinfo.Mounted(dir); err != nil || mounted {
		return err
	}
	persist, err := machine.Wanted(d.o.Store, func(c *config.Config) []string { return c.Machine.Kubelet.Persist })
	for name, place := range kept {
		at, to := filepath.Join(d.o.varDir, place[0]), filepath.Join(d.o.etcDir, place[1])
		if !slices.Contains(persist, name) {
			err = errors.Join(err, untrusted.RemoveAll(at)) // also for a later boot that has the name
			continue
		}
		failed := untrusted.Reclaim(at+"/etc", 0o700)
		if failed == nil { // nothing else is mounted there
			failed = os.NewSyscallError("mount on "+to, unix.Mount(at+"/etc", to, "", unix.MS_BIND, ""))
		}
		if err = errors.Join(err, failed); failed == nil {
			d.hold(to)
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
	d.hold(dir)
	return err
}

// damaged distinguishes a file system that needs repair from all other reasons
// why it can't be mounted. The kernel itself replays the log after a power cut.
func (d *Disks) damaged(ctx context.Context, kind fsType, path string, err error) bool {
	switch {
	case errors.Is(err, unix.EUCLEAN), errors.Is(err, unix.EBADMSG): // wrong structure, wrong checksum
		return true
	case !errors.Is(err, unix.EIO):
		return false
	}
	// The kernel returns this for some damaged headers, and for a failing disk,
	// which must not be repaired. A check without changes shows which of them it is.
	ctx, cancel := context.WithTimeout(ctx, repairTimeout)
	defer cancel()
	return exitCode(d.o.Processes.Run(ctx, exec.Command(kind.repair, "-n", path))) == kind.corrupt
}

// repair repairs a file system. If the log of xfs can't be replayed, and may be discarded, its
// last seconds are lost, and the rest is saved.
func (d *Disks) repair(ctx context.Context, kind fsType, path string, discard bool) error {
	ctx, cancel := context.WithTimeout(ctx, repairTimeout)
	defer cancel()
	err := d.o.Processes.Run(ctx, exec.Command(kind.repair, append(kind.repairArgs, path)...))
	switch code := exitCode(err); {
	case code != 0 && code == kind.repaired:
		return nil
	case code != 0 && code == kind.dirtyLog && discard:
		d.log.Warn(fmt.Sprintf("the log of %s can't be replayed: giving up what was written in the last seconds", path))
		return d.o.Processes.Run(ctx, exec.Command(kind.repair, "-L", path))
	}
	return err
}

// exitCode is that of a program that has failed; 0 for other errors.
func exitCode(err error) int {
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return exit.ExitCode()
	}
	return 0
}

// unmount removes the mounts in reverse order.
func (d *Disks) unmount() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.held.Lock()
	defer d.held.Unlock()
	for _, dir := range slices.Backward(d.mounts) {
		if err := unmountDir(dir); err != nil {
			d.log.Warn(err.Error())
		}
	}
	d.closeLayers()
	d.mounts, d.system = nil, nil
}

// unmountDir waits a short time for the last user. Then it detaches the file
// system: open files stay usable, and the data is at least on the disk.
func unmountDir(dir string) error {
	var err error
	for end := time.Now().Add(unmountPatience); ; time.Sleep(unmountPoll) {
		if err = unix.Unmount(dir, 0); err == nil || !errors.Is(err, unix.EBUSY) || time.Now().After(end) {
			break
		}
	}
	if err == nil {
		return nil
	}
	file, openErr := os.Open(dir)
	if openErr == nil {
		openErr = errors.Join(unix.Syncfs(int(file.Fd())), file.Close())
	}
	return errors.Join(fmt.Errorf("unmount %s: %w; detaching it", dir, err), openErr, unix.Unmount(dir, unix.MNT_DETACH))
}
