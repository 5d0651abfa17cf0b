package disks

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/system/disk"
	"github.com/garboard-os/garboard/services/system/volume"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// wipeMark is a file on a container's STATE with what has to be wiped there.
// It is the equivalent of the journal on a disk.
const wipeMark = "wipe"

// reset is what was marked since this boot.
type reset struct {
	system disk.Disk
	labels []string
	users  []UserDisk
	mode   string
}

// MarkWipe records that the volumes of these labels have to be wiped
// (boot.Volumes is the table), and before them these disks of the user. From
// then on they will be lost: Erase wipes them, or else the next boot does,
// before it reads any of them. mode is one of boot.WipeModes, or "".
func (d *Disks) MarkWipe(labels []string, users []UserDisk, mode string) error {
	if len(labels) == 0 || slices.ContainsFunc(labels, func(l string) bool { return !slices.Contains(boot.WipeLabels, l) }) {
		return fmt.Errorf("wipe %q: there are %s", labels, strings.Join(boot.WipeLabels, " and "))
	}
	if d.o.Mode == boot.Container {
		mark := filepath.Join(d.o.dirs.State, wipeMark)
		if err := boot.WriteFile(mark, []byte(strings.Join(labels, " ")+"\n"), 0o600); err != nil {
			return err
		}
		d.reset.Store(&reset{})
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	system := d.System()
	if system == nil {
		return errors.New("wipe the system disk: the node has none yet, so there is nothing on it")
	}
	err := system.Note(disk.Journal{Step: disk.StepWipe, Label: strings.Join(labels, " "), Disks: marks(users), Mode: mode})
	if err != nil {
		return err
	}
	d.reset.Store(&reset{*system, labels, users, mode})
	return nil
}

// Marked reports whether anything was marked since this boot.
func (d *Disks) Marked() bool { return d.reset.Load() != nil }

// Erase wipes what MarkWipe has recorded since this boot, if anything. It is
// called at shutdown: on a machine after nothing is mounted from its disks, in
// a container while its directories are still mounted.
func (d *Disks) Erase(ctx context.Context) error {
	r := d.reset.Load()
	if r == nil {
		return nil
	}
	if d.o.Mode == boot.Container {
		return d.wipeDirectories()
	}
	if err := d.wipeUserDisks(ctx, r.users, r.mode); err != nil {
		return err // the next boot tries it again
	}
	f, err := r.system.Inspect()
	if err == nil {
		f.Pending.Disks = nil
		_, err = d.wipeMarked(ctx, f)
	}
	return err
}

// wipeMarked does the steps of the journal for a reset, and inspects the disk again.
//
// boot.Volumes has the volumes of each label. The key slots of encrypted ones go first. Volumes that may contain a
// node's keys are zeroed. Others are zeroed if the disk can do that by itself; otherwise they are discarded, and the
// metadata of their file systems is zeroed. A mode of boot.WipeModes may ask for less or more.
func (d *Disks) wipeMarked(ctx context.Context, f disk.Disk) (disk.Disk, error) {
	if f.Verdict != disk.Ours || f.Pending.Step != disk.StepWipe {
		return f, nil
	}
	if err := d.wipeMarkedUserDisks(ctx, f.Pending.Disks, f.Pending.Mode); err != nil {
		return f, err
	}
	labels := strings.Fields(f.Pending.Label)
	what := fmt.Sprintf("%s on %s", strings.Join(labels, " and "), f.Path)
	d.log.Warn(fmt.Sprintf("wiping %s, as requested by a reset", what))
	if err := f.ChangeUnused(func(file *os.File) error { return d.wipe(ctx, file, f, labels) }); err != nil {
		return f, fmt.Errorf("wipe %s: %w", what, err)
	}
	return f.Inspect()
}

func (d *Disks) wipe(ctx context.Context, file *os.File, f disk.Disk, labels []string) error {
	after := disk.Journal{}
	if slices.Contains(labels, boot.LabelState) {
		// Without STATE the disk isn't used until it is made again.
		after = disk.Journal{Step: disk.StepFormat, Label: boot.LabelState}
	}
	sealed := map[string]bool{}
	for _, v := range boot.Wiped(labels) { // in a moment, and for good
		p, err := f.Partition(v.Label)
		if err == nil {
			sealed[v.Label], err = p.Shred(ctx, file)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", v.Label, err)
		}
	}
	for _, v := range boot.Wiped(labels) {
		p, err := f.Partition(v.Label)
		if err != nil {
			return err
		}
		if err := d.Keeper.Before("wipe " + v.Label); err != nil {
			return err
		}
		d.discard(ctx, file, p, f.Pending.Mode)
		if err := p.Wipe(ctx, file, f.Pending.Mode, sealed[v.Label], v.Keys, d.telling(v.Label, p.Size)); err != nil {
			return fmt.Errorf("%s: %w", v.Label, err)
		}
	}
	if err := errors.Join(file.Sync(), d.Keeper.Before("wiped")); err != nil {
		return err
	}
	return disk.WriteJournal(file, after)
}

// wipeDirectories does for a container what wipeMarked does for a disk.
func (d *Disks) wipeDirectories() error {
	mark := filepath.Join(d.o.dirs.State, wipeMark)
	text, err := os.ReadFile(mark)
	if err != nil {
		return boot.IgnoreMissing(err)
	}
	labels := strings.Fields(string(text))
	d.log.Warn(fmt.Sprintf("wiping %s, as requested by a reset", strings.Join(labels, " and ")))
	for _, v := range d.volumes {
		if !slices.Contains(labels, v.Wipe) {
			continue
		}
		if err := d.empty(v, mark); err != nil {
			return err
		}
	}
	if slices.Contains(labels, boot.LabelState) {
		reset := filepath.Join(d.o.dirs.State, filepath.Base(boot.ResetFile))
		if err := boot.WriteFile(reset, nil, 0o600); err != nil {
			return err
		}
	}
	if err := d.Keeper.Before("wiped"); err != nil {
		return err
	}
	if err := os.Remove(mark); err != nil {
		return err
	}
	return boot.SyncDir(d.o.dirs.State)
}

// empty removes the content of a volume's directory, except the mark. Mounts
// below it don't belong to the node and may be volumes of another machine. They
// are unmounted first, and if that fails, nothing is removed.
func (d *Disks) empty(v volume.Volume, mark string) error {
	if err := d.Keeper.Before("wipe " + v.Label); err != nil {
		return err
	}
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(v.Dir))
	if err != nil {
		return err
	}
	for _, m := range slices.Backward(mounts) {
		if m.Mountpoint == v.Dir {
			continue
		}
		if err := unix.Unmount(m.Mountpoint, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return fmt.Errorf("wipe %s: unmount %s: %w", v.Label, m.Mountpoint, err)
		}
	}
	entries, err := os.ReadDir(v.Dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		path := filepath.Join(v.Dir, e.Name())
		if path == mark {
			continue
		}
		if err := untrusted.RemoveAll(path); err != nil {
			return fmt.Errorf("wipe %s: %w", v.Label, err)
		}
	}
	return untrusted.Sync(v.Dir)
}

// maxUserDisks is the number of disks that fit into the journal's sector.
const maxUserDisks = 24

// UserDisk is a disk other than the system's, as it was when the reset was requested.
type UserDisk = disk.Identity

// mark identifies a disk after a restart; "" if that isn't possible.
func mark(u UserDisk) string {
	if u.Serial == "" {
		return ""
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\x00%s\x00%d", u.Serial, u.Model, u.Size))
	return hex.EncodeToString(sum[:8])
}

// UserDisks are the disks of these names, each once: devices, or links to them.
// It refuses disks that a reset doesn't wipe.
func (d *Disks) UserDisks(names []string) ([]UserDisk, error) {
	if len(names) == 0 {
		return nil, nil
	}
	if d.o.Mode == boot.Container {
		return nil, fmt.Errorf("wipe disk %s: a node in a container has no disks of its own", names[0])
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	all, err := d.Keeper.Disks.Devices()
	if err != nil {
		return nil, err
	}
	var users []UserDisk
	for _, name := range names {
		dev, err := d.userDisk(name, all)
		if err != nil {
			return nil, err
		}
		if !slices.Contains(users, dev.Identity) {
			users = append(users, dev.Identity)
		}
	}
	if len(users) > maxUserDisks {
		return nil, fmt.Errorf("wipe %d disks: a reset wipes at most %d", len(users), maxUserDisks)
	}
	return users, nil
}

// userDisk is the disk of that name, if a reset may wipe it.
func (d *Disks) userDisk(name string, all []disk.Disk) (dev disk.Disk, err error) {
	here := d.Keeper.Disks
	path, err := filepath.EvalSymlinks(name)
	if err != nil || !filepath.IsAbs(name) {
		return dev, fmt.Errorf("there is no disk %s. The disks here:\n%s", name, here.Text(nil))
	}
	if _, err := os.Stat(filepath.Join("/sys/class/block", filepath.Base(path), "partition")); err == nil {
		return dev, fmt.Errorf("%s is a partition. Name the whole disk. The disks here:\n%s", name, here.Text(nil))
	}
	at := slices.IndexFunc(all, func(dev disk.Disk) bool { return dev.Path == path })
	if at < 0 {
		return dev, fmt.Errorf("%s is no disk. The disks here:\n%s", name, here.Text(nil))
	}
	dev, err = all[at].Inspect()
	switch {
	case err != nil:
		return dev, err
	case d.System() == nil:
		return dev, errors.New("wipe disks: the node doesn't know its system disk yet")
	case d.isSystem(dev):
		return dev, here.Refuse(dev, "is the system disk", "To wipe its partitions, use --system-labels-to-wipe")
	}
	// The pods, the kubelet's mounts and those of machine.disks end with their node.
	return dev, d.Spares(dev, "Name one that holds nothing that is needed", filepath.Join(d.o.dirs.Var, "lib/kubelet"), filepath.Join(d.o.dirs.Var, "mnt"))
}

// marks are those of the disks that can be identified after a restart.
func marks(users []UserDisk) []string {
	return slices.DeleteFunc(lists.Of(users, mark), func(m string) bool { return m == "" })
}

// like are the disks with a mark.
func like(all []disk.Disk, m string) []disk.Disk {
	return slices.DeleteFunc(slices.Clone(all), func(dev disk.Disk) bool { return mark(dev.Identity) != m })
}

// wipeUserDisks wipes the disks of a running reset: their names haven't changed.
func (d *Disks) wipeUserDisks(ctx context.Context, users []UserDisk, mode string) error {
	all, err := d.Keeper.Disks.Devices()
	for _, u := range users {
		at := slices.IndexFunc(all, func(dev disk.Disk) bool {
			// earlier releases have noted no more
			return dev.Path == u.Path && dev.Size == u.Size && dev.Model == u.Model && dev.Serial == u.Serial
		})
		if at < 0 {
			err = errors.Join(err, fmt.Errorf("wipe %s: it isn't there any more", u))
			continue
		}
		err = errors.Join(err, d.wipeUserDisk(ctx, all[at], mode))
	}
	return err
}

// awaited is how many disks that a reset was to wipe aren't here, and may still come.
type awaited int

func (n awaited) Error() string {
	return fmt.Sprintf("waits for %d disks that a reset was to wipe, for %s after the start", int(n), disk.LateDisks)
}

// wipeMarkedUserDisks wipes disks that a reset before this boot hasn't reached.
// A missing or broken disk must keep neither the node from booting nor the
// system disk from being wiped, once it isn't awaited any more.
func (d *Disks) wipeMarkedUserDisks(ctx context.Context, marked []string, mode string) error {
	all, err := d.Keeper.Disks.All()
	missing := awaited(0)
	for _, mark := range marked {
		if len(like(all, mark)) == 0 {
			missing++
		}
	}
	if missing > 0 && !d.Keeper.Disks.Settled() {
		return missing
	}
	if err != nil {
		d.log.Error("the user's disks that a reset was to wipe are NOT wiped", "err", err)
		return nil
	}
	for _, mark := range marked {
		same := like(all, mark)
		if len(same) != 1 {
			d.log.Error(fmt.Sprintf("a disk that a reset was to wipe is NOT wiped: %d of the disks here are like it", len(same)))
			continue
		}
		// A disk with a copied mark must not cause another system to be wiped.
		if dev := same[0]; dev.Err == nil && (dev.Verdict == disk.Ours || dev.Verdict == disk.Newer) {
			d.log.Error(fmt.Sprintf("%s is NOT wiped, though a reset requested it: it holds a Garboard system", dev))
		} else if err := errors.Join(dev.Err, d.wipeUserDisk(ctx, dev, mode)); err != nil {
			d.log.Error(fmt.Sprintf("%s is NOT wiped, though a reset requested it", dev), "err", err)
		}
	}
	return nil
}

// wipeUserDisk erases a disk in the same way as EPHEMERAL.
func (d *Disks) wipeUserDisk(ctx context.Context, dev disk.Disk, mode string) error {
	err := d.Keeper.Before("wipe a user's disk")
	if err == nil {
		d.log.Warn(fmt.Sprintf("wiping %s, as requested by a reset", dev))
		err = dev.ChangeUnused(func(file *os.File) error {
			sealed, err := dev.ShredAll(ctx, file)
			if err != nil {
				return err
			}
			whole := disk.Partition{Label: dev.Path, Size: dev.Size}
			d.discard(ctx, file, whole, mode)
			return dev.WipeAll(ctx, file, mode, sealed, d.telling(dev.Path, dev.Size))
		})
	}
	if err != nil {
		err = fmt.Errorf("wipe %s: %w", dev, err)
	}
	return err
}
