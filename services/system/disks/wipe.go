package disks

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/boot"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

const (
	// zeroChunk is how much is zeroed before the next look whether there is still time.
	zeroChunk = 64 << 20
	// punchChunk is the same for a disk that zeroes by itself: it may take its time, and
	// nothing ends a call.
	punchChunk = 1 << 30
	// wipeMark says on a container's STATE what of it is to be wiped. It is what the
	// journal is on a disk.
	wipeMark = "wipe"
)

// reset is what was marked since this boot.
type reset struct {
	system device
	users  []UserDisk
}

// MarkWipe writes down that the volumes of these labels are to be wiped (boot.Volumes is the
// table), and before them these disks of the user. From then on nothing keeps them: Erase
// wipes them, and if it doesn't come to that, the next boot does, before it reads anything
// of them.
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

// Marked tells whether anything is marked since this boot.
func (d *Disks) Marked() bool { return d.reset.Load() != nil }

// Erase wipes what MarkWipe has written down since this boot, and nothing where that is
// nothing. It is for the machine's way out: on a machine once nothing is mounted from its
// disks, in a container while its directories still are.
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
		return err // the next boot tries it once more
	}
	f, err := d.inspect(r.system)
	if err == nil {
		f.pending.disks = nil
		_, err = d.wipeMarked(ctx, r.system, f)
	}
	return err
}

// wipeMarked does what the journal says of a reset, and looks at the disk again.
//
// boot.Volumes says what goes with which label. What may hold a node's keys is zeroed.
// Others are zeroed where the disk does that by itself; where it can't, they are discarded,
// and what makes them file systems is zeroed.
func (d *Disks) wipeMarked(ctx context.Context, dev device, f found) (found, error) {
	if f.verdict != ours || f.pending.step != stepWipe {
		return f, nil
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
		// Without STATE the disk is nobody's until it is made anew.
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

// erase zeroes a partition of a disk. If the disk can't zero by itself, it writes all of one
// that has a node's keys, and only the edges of another, which may take hours to write.
func (p partition) erase(ctx context.Context, file *os.File, keys bool) error {
	if helped, err := punch(ctx, file, p.start, p.size); helped || err != nil {
		return err
	}
	if keys {
		return zero(ctx, file, p.start, p.size)
	}
	_ = discard(file, p.start, p.size) // a disk may ignore it, or read anything there afterwards
	return zeroEdges(ctx, file, p.start, p.size)
}

// zeroEdges takes away what makes a file system or a partition table of it.
func zeroEdges(ctx context.Context, file *os.File, start, size int64) error {
	n := min(edge, size)
	if err := zero(ctx, file, start, n); err != nil {
		return err
	}
	return zero(ctx, file, start+size-n, n)
}

// punch has the disk zero by itself: it reads as zeros from then on (block/fops.c,
// blkdev_fallocate). It returns false where the disk can't.
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
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
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

// empty removes what is in the directory of a volume, but for the mark. What is mounted below it is somebody else's,
// a volume on another machine perhaps: it is unmounted first, and if it can't be,
// nothing is removed.
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
		if err := os.RemoveAll(path); err != nil {
			return fmt.Errorf("wipe %s: %w", v.Label, err)
		}
	}
	return boot.SyncDir(v.Dir)
}
