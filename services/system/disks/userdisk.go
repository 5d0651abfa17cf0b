package disks

import (
	"cmp"
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
	"golang.org/x/sys/unix"
)

// maxUserDisks is the number of disks that fit into the journal's sector.
const maxUserDisks = 24

// UserDisk is a disk other than the system's, as it was when the reset was
// requested. The kernel may give it another name after a restart.
type UserDisk struct {
	Path   string `json:"path"` // /dev/sdb
	Size   int64  `json:"size"` // bytes
	Model  string `json:"model,omitempty"`
	Serial string `json:"serial,omitempty"`
}

func (u UserDisk) String() string {
	about := bytesText(u.Size)
	if u.Model != "" {
		about += ", " + u.Model
	}
	if u.Serial == "" {
		return fmt.Sprintf("%s (%s, without a serial number)", u.Path, about)
	}
	return fmt.Sprintf("%s (%s, serial %s)", u.Path, about, u.Serial)
}

// mark identifies the disk after a restart; "" if that isn't possible.
func (u UserDisk) mark() string {
	if u.Serial == "" {
		return ""
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\x00%s\x00%d", u.Serial, u.Model, u.Size))
	return hex.EncodeToString(sum[:8])
}

func (dev device) user() UserDisk {
	return UserDisk{Path: dev.Path, Size: dev.Size, Model: dev.Model, Serial: dev.Serial}
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
	devices, err := d.devices()
	if err != nil {
		return nil, err
	}
	var users []UserDisk
	for _, name := range names {
		dev, err := d.userDisk(name, devices)
		if err != nil {
			return nil, err
		}
		if u := dev.user(); !slices.Contains(users, u) {
			users = append(users, u)
		}
	}
	if len(users) > maxUserDisks {
		return nil, fmt.Errorf("wipe %d disks: a reset wipes at most %d", len(users), maxUserDisks)
	}
	return users, nil
}

// userDisk is the disk of that name, if a reset may wipe it. The caller holds d.mu.
func (d *Disks) userDisk(name string, devices []device) (device, error) {
	const next = "Name one that holds nothing that is needed"
	path, err := filepath.EvalSymlinks(name)
	if err != nil || !filepath.IsAbs(name) {
		return device{}, fmt.Errorf("there is no disk %s. The disks here:\n%s", name, d.table())
	}
	if _, err := os.Stat(filepath.Join("/sys/class/block", filepath.Base(path), "partition")); err == nil {
		return device{}, fmt.Errorf("%s is a partition. Name the whole disk. The disks here:\n%s", name, d.table())
	}
	at := slices.IndexFunc(devices, func(dev device) bool { return dev.Path == path })
	if at < 0 {
		return device{}, fmt.Errorf("%s is no disk. The disks here:\n%s", name, d.table())
	}
	dev := devices[at]
	f, err := d.inspect(dev)
	if err != nil {
		return dev, err
	}
	medium := d.medium(dev, f)
	// The pods, the kubelet's mounts and those of machine.disks end with their node.
	busy, err := dev.inUse(filepath.Join(d.o.varDir, "lib/kubelet"), filepath.Join(d.o.varDir, "mnt"))
	switch {
	case err != nil:
		return dev, err
	case d.system == nil:
		return dev, errors.New("wipe disks: the node doesn't know its system disk yet")
	case d.system.Path == dev.Path:
		return dev, d.refuse(dev, "is the system disk", "To wipe its partitions, use --system-labels-to-wipe")
	case medium != "":
		return dev, d.refuse(dev, fmt.Sprintf("%s (%s)", medium, f.holds), next)
	case dev.ReadOnly:
		return dev, d.refuse(dev, "is read-only", next)
	case busy != "":
		return dev, d.refuse(dev, "is in use: "+busy, next)
	}
	return dev, nil
}

// marks are those of the disks that can be identified after a restart.
func marks(users []UserDisk) (all []string) {
	for _, u := range users {
		if m := u.mark(); m != "" {
			all = append(all, m)
		}
	}
	return all
}

// wipeUserDisks wipes the disks of a running reset: their names haven't changed.
func (d *Disks) wipeUserDisks(ctx context.Context, users []UserDisk) error {
	if len(users) == 0 {
		return nil
	}
	devices, err := d.devices()
	if err != nil {
		return err
	}
	var errs []error
	for _, u := range users {
		at := slices.IndexFunc(devices, func(dev device) bool { return dev.user() == u })
		if at < 0 {
			errs = append(errs, fmt.Errorf("wipe %s: it isn't there any more", u))
			continue
		}
		errs = append(errs, d.wipeUserDisk(ctx, devices[at]))
	}
	return errors.Join(errs...)
}

// unseen is how many of the marked disks aren't here (yet).
func (d *Disks) unseen(marked []string) (missing int) {
	devices, _ := d.devices() // without them, none is here
	for _, mark := range marked {
		if !slices.ContainsFunc(devices, func(dev device) bool { return dev.user().mark() == mark }) {
			missing++
		}
	}
	return missing
}

// wipeMarkedUserDisks wipes disks that a reset before this boot hasn't reached.
// A missing or broken disk must keep neither the node from booting nor the
// system disk from being wiped.
func (d *Disks) wipeMarkedUserDisks(ctx context.Context, marked []string) {
	if len(marked) == 0 {
		return
	}
	devices, err := d.devices()
	if err != nil {
		d.log.Error("the user's disks that a reset was to wipe are NOT wiped", "err", err)
		return
	}
	for _, mark := range marked {
		var same []device
		for _, dev := range devices {
			if dev.user().mark() == mark {
				same = append(same, dev)
			}
		}
		if len(same) != 1 {
			d.log.Error(fmt.Sprintf("a disk that a reset was to wipe is NOT wiped: %d of the disks here are like it", len(same)))
			continue
		}
		// A disk with a copied mark must not cause another system to be wiped.
		if f, err := d.inspect(same[0]); err == nil && (f.verdict == ours || f.verdict == newer) {
			d.log.Error(fmt.Sprintf("%s is NOT wiped, though a reset requested it: it holds a Garboard system", same[0].user()))
		} else if err := errors.Join(err, d.wipeUserDisk(ctx, same[0])); err != nil {
			d.log.Error(fmt.Sprintf("%s is NOT wiped, though a reset requested it", same[0].user()), "err", err)
		}
	}
}

// wipeUserDisk erases a disk in the same way as EPHEMERAL.
func (d *Disks) wipeUserDisk(ctx context.Context, dev device) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("wipe %s: %w", dev.user(), err)
		}
	}()
	if err := d.o.before("wipe a user's disk"); err != nil {
		return err
	}
	d.log.Warn(fmt.Sprintf("wiping %s, as requested by a reset", dev.user()))
	file, err := openDisk(dev)
	if err != nil {
		return err
	}
	defer file.Close()
	parts, err := dev.partitions()
	if err != nil {
		return err
	}
	for _, p := range parts { // otherwise a guess of the table would find their file systems
		if err := zeroEdges(ctx, file, p.start, p.size); err != nil {
			return err
		}
	}
	if err := (partition{size: dev.Size}).erase(ctx, file, false); err != nil {
		return err
	}
	if err := file.Sync(); err != nil {
		return err
	}
	_ = unix.IoctlSetInt(int(file.Fd()), unix.BLKRRPART, 0) // the old partitions that it may still show don't matter
	return nil
}

// partitions are those that the kernel has.
func (dev device) partitions() ([]partition, error) {
	dir := filepath.Join("/sys/block", dev.Name)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var all []partition
	for _, e := range entries {
		n, err := readNumber(filepath.Join(dir, e.Name(), "partition"))
		if err != nil {
			continue // not a partition
		}
		start, err := readNumber(filepath.Join(dir, e.Name(), "start"))
		size, sizeErr := readNumber(filepath.Join(dir, e.Name(), "size"))
		if err := cmp.Or(err, sizeErr); err != nil {
			return nil, err
		}
		all = append(all, partition{path: "/dev/" + strings.ReplaceAll(e.Name(), "!", "/"), n: int(n), start: start * sysSector, size: size * sysSector})
	}
	return all, nil
}
