package disks

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

const (
	// zeroChunk is the size of a write, between checks of the remaining time.
	zeroChunk = 64 << 20
	// punchChunk is the same for a disk that zeroes by itself. It may take long,
	// and a call can't be interrupted.
	punchChunk = 1 << 30
	// wipeMark is a file on a container's STATE with what has to be wiped there.
	// It is the equivalent of the journal on a disk.
	wipeMark = "wipe"
)

// reset is what was marked since this boot.
type reset struct {
	system device
	users  []UserDisk
}

// MarkWipe records that the volumes of these labels have to be wiped
// (boot.Volumes is the table), and before them these disks of the user. From
// then on they will be lost: Erase wipes them, or else the next boot does,
// before it reads any of them.
func (d *Disks) MarkWipe(labels []string, users []UserDisk) error {
	if len(labels) == 0 || slices.ContainsFunc(labels, func(l string) bool { return !slices.Contains(boot.WipeLabels, l) }) {
		return fmt.Errorf("wipe %q: there are %s", labels, strings.Join(boot.WipeLabels, " and "))
	}
	if d.o.Mode == boot.Container {
		mark := filepath.Join(d.o.stateDir, wipeMark)
		if err := boot.WriteFile(mark, []byte(strings.Join(labels, " ")+"\n"), 0o600); err != nil {
			return err
		}
		d.reset.Store(&reset{})
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.system == nil {
		return errors.New("wipe the system disk: the node has none yet, so there is nothing on it")
	}
	file, err := os.OpenFile(d.system.Path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer file.Close()
	if err := writeJournal(file, journal{step: stepWipe, label: strings.Join(labels, " "), disks: marks(users)}); err != nil {
		return err
	}
	d.reset.Store(&reset{*d.system, users})
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
	d.closeLayers()
	if err := d.wipeUserDisks(ctx, r.users); err != nil {
		return err // the next boot tries it again
	}
	f, err := d.inspect(r.system)
	if err == nil {
		f.pending.disks = nil
		_, err = d.wipeMarked(ctx, r.system, f)
	}
	return err
}

// wipeMarked does the steps of the journal for a reset, and inspects the disk again.
//
// boot.Volumes has the volumes of each label. Volumes that may contain a node's keys
// are zeroed. Others are zeroed if the disk can do that by itself; otherwise they
// are discarded, and the metadata of their file systems is zeroed.
func (d *Disks) wipeMarked(ctx context.Context, dev device, f found) (found, error) {
	if f.verdict != ours || f.pending.step != stepWipe {
		return f, nil
	}
	if missing := d.unseen(f.pending.disks); missing > 0 && time.Since(d.began) < lateDisks {
		return f, fmt.Errorf("waits for %d disks that a reset was to wipe, for %s after the start: %w", missing, lateDisks, boot.ErrClosed)
	}
	d.wipeMarkedUserDisks(ctx, f.pending.disks)
	labels := strings.Fields(f.pending.label)
	d.log.Warn(fmt.Sprintf("wiping %s on %s, as requested by a reset", strings.Join(labels, " and "), dev.Path))
	if err := d.wipe(ctx, dev, f, labels); err != nil {
		return f, fmt.Errorf("wipe %s on %s: %w", strings.Join(labels, " and "), dev.Path, err)
	}
	return d.inspect(dev)
}

func (d *Disks) wipe(ctx context.Context, dev device, f found, labels []string) error {
	file, err := openDisk(dev)
	if err != nil {
		return err
	}
	defer file.Close()
	after := journal{}
	if slices.Contains(labels, boot.LabelState) {
		// Without STATE the disk isn't used until it is made again.
		after = journal{step: stepFormat, label: boot.LabelState}
	}
	for _, v := range boot.Wiped(labels) {
		p, err := f.partition(dev, v.Label)
		if err != nil {
			return err
		}
		if err := d.o.before("wipe " + v.Label); err != nil {
			return err
		}
		if err := p.erase(ctx, file, v.Keys); err != nil {
			return fmt.Errorf("%s: %w", v.Label, err)
		}
	}
	if err := errors.Join(file.Sync(), d.o.before("wiped")); err != nil {
		return err
	}
	return writeJournal(file, after)
}

// erase zeroes a partition of a disk. If the disk can't zero by itself, erase writes all of a
// partition with a node's keys, but only the edges of any other, because that could take hours.
func (p partition) erase(ctx context.Context, file *os.File, keys bool) error {
	if helped, err := punch(ctx, file, p.start, p.size); helped || err != nil {
		return err
	}
	if keys {
		return zero(ctx, file, p.start, p.size)
	}
	_ = discard(file, p.start, p.size) // a disk may ignore it, or return any data there afterwards
	return zeroEdges(ctx, file, p.start, p.size)
}

// zeroEdges removes the metadata of a file system or a partition table.
func zeroEdges(ctx context.Context, file *os.File, start, size int64) error {
	n := min(edge, size)
	if err := zero(ctx, file, start, n); err != nil {
		return err
	}
	return zero(ctx, file, start+size-n, n)
}

// punch makes the disk zero by itself, after which it reads as zeros
// (block/fops.c, blkdev_fallocate). It returns false if the disk can't.
func punch(ctx context.Context, file *os.File, start, size int64) (helped bool, err error) {
	for at := start; at < start+size; at += punchChunk {
		if err := ctx.Err(); err != nil {
			return false, err
		}
		n := min(punchChunk, start+size-at)
		if err := unix.Fallocate(int(file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, at, n); err != nil {
			return false, nil
		}
	}
	return true, nil
}

func zero(ctx context.Context, file *os.File, start, size int64) error {
	buf := make([]byte, edge)
	for at := start; at < start+size; at += int64(len(buf)) {
		if (at-start)%zeroChunk == 0 {
			if err := errors.Join(ctx.Err(), file.Sync()); err != nil {
				return err
			}
		}
		if _, err := file.WriteAt(buf[:min(int64(len(buf)), start+size-at)], at); err != nil {
			return err
		}
	}
	return nil
}

// wipeDirectories does for a container what wipeMarked does for a disk.
func (d *Disks) wipeDirectories() error {
	mark := filepath.Join(d.o.stateDir, wipeMark)
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
		reset := filepath.Join(d.o.stateDir, filepath.Base(boot.ResetFile))
		if err := boot.WriteFile(reset, nil, 0o600); err != nil {
			return err
		}
	}
	if err := d.o.before("wiped"); err != nil {
		return err
	}
	if err := os.Remove(mark); err != nil {
		return err
	}
	return boot.SyncDir(d.o.stateDir)
}

// empty removes the content of a volume's directory, except the mark. Mounts
// below it don't belong to the node and may be volumes of another machine. They
// are unmounted first, and if that fails, nothing is removed.
func (d *Disks) empty(v volume, mark string) error {
	if err := d.o.before("wipe " + v.Label); err != nil {
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
