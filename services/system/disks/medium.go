package disks

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/esp"
	"golang.org/x/sys/unix"
)

// blockDir lists disks, partitions and CD drives.
const blockDir = "/sys/class/block"

// volumeTypes are the file systems of configuration volumes: images of CDs, and
// USB sticks.
var volumeTypes = map[string]bool{"iso9660": true, "vfat": true}

// Volume calls use with the files of the volume with that file system label,
// mounted read-only until use returns. It is that of a medium, see Media, or else of the only
// disk for which use doesn't return boot.ErrNone, as hypervisors and clouds provide: of several,
// a pod may have made one. It implements boot.Mounter.
func (d *Disks) Volume(ctx context.Context, label string, use func(fs.FS) error) error {
	none := d.Media(ctx, label, use)
	if !errors.Is(none, boot.ErrNone) {
		return none
	}
	found, err := d.findVolumes(label, d.holdsVolumes)
	if err != nil {
		return err
	}
	var disks []string
	for _, f := range found {
		disk := wholeDisk(filepath.Base(f.device))
		if slices.Contains(disks, disk) {
			continue
		}
		e := d.o.mount(f.device, f.kind, func(dir string) error { return withFiles(dir, use) })
		if errors.Is(e, boot.ErrNone) {
			none = e
			continue
		}
		disks, err = append(disks, disk), e
	}
	switch len(disks) {
	case 0:
		return none
	case 1:
		return err
	}
	return fmt.Errorf("the disks %s have a volume labelled %q each: detach all but one", strings.Join(disks, ", "), label)
}

// Media is Volume for media that a person has put into the machine, and for what the image of the system disk has brought. Pods can bring disks of
// their own, over the network or with a driver for storage, and give their volumes any label. The first volume is used for which use doesn't return
// boot.ErrNone.
func (d *Disks) Media(_ context.Context, label string, use func(fs.FS) error) error {
	own := d.ownMedium()
	return d.with(label, func(name string) bool {
		path, err := filepath.EvalSymlinks(filepath.Join(blockDir, name))
		return err == nil && d.holdsVolumes(name) && (pluggedIn(path) || filepath.Join("/dev", name) == own)
	}, use)
}

// ownMedium is the partition of the system disk with what its image has brought; "": there is none.
func (d *Disks) ownMedium() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.system == nil {
		return ""
	}
	f, err := d.inspect(*d.system)
	if err != nil {
		return "" // the disk is gone
	}
	p, err := f.partition(*d.system, boot.LabelMedium)
	if err != nil {
		return ""
	}
	path, _ := d.system.partitionPath(p.n)
	return path
}

// remote matches the paths in sysfs of devices on the other side of a network: those of iSCSI, Fibre Channel, and NVMe over Fabrics.
var remote = regexp.MustCompile(`/session\d|/rport-|/nvme-fabrics/`)

// isRemote reports whether the disk with a directory in sysfs is on the other side of a network. NVMe with several paths shows them beside the disk.
func isRemote(dir string) bool {
	path := linkTarget(dir)
	transports, _ := filepath.Glob(filepath.Join(filepath.Dir(path), "nvme*", "transport"))
	return remote.MatchString(path) || slices.ContainsFunc(transports, func(file string) bool { return firstText("", file) != "pcie" })
}

// pluggedIn reports whether a block device, or a partition, with that path in sysfs is a CD, or on USB, or else one that can be removed, and is
// connected to the machine itself.
func pluggedIn(path string) bool {
	if _, err := os.Stat(filepath.Join(path, "partition")); err == nil {
		path = filepath.Dir(path)
	}
	own := strings.Contains(path, "/pci") || strings.Contains(path, "/VMBUS") // Hyper-V's
	removable, _ := os.ReadFile(filepath.Join(path, "removable"))
	return own && !remote.MatchString(path) && (strings.Contains(path, "/usb") || strings.TrimSpace(string(removable)) == "1")
}

// with calls use with the volumes that have a label, of devices that may have them.
func (d *Disks) with(label string, may func(name string) bool, use func(fs.FS) error) error {
	found, err := d.findVolumes(label, may)
	if err != nil {
		return err
	}
	none := fmt.Errorf("no volume labelled %q: %w", label, boot.ErrNone)
	for _, f := range found {
		if none = d.o.mount(f.device, f.kind, func(dir string) error { return withFiles(dir, use) }); !errors.Is(none, boot.ErrNone) {
			return none
		}
	}
	return none
}

// files are those of a mounted volume. A link leads to none outside of it, and what is neither a file nor a directory isn't opened: that might not
// return.
type files struct{ root *os.Root }

func withFiles(dir string, use func(fs.FS) error) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	return use(files{root})
}

// Open implements fs.FS.
func (f files) Open(name string) (fs.File, error) {
	info, err := f.root.Stat(name)
	if err == nil && !info.Mode().IsRegular() && !info.IsDir() {
		err = &fs.PathError{Op: "open", Path: name, Err: errors.New("it is no file")}
	}
	if err != nil {
		return nil, err
	}
	return f.root.Open(name)
}

// mountable is a volume on some device.
type mountable struct{ device, kind string }

// mountReadOnly calls use with the directory where a volume is mounted until use returns.
func mountReadOnly(device, kind string, use func(dir string) error) (err error) {
	dir, err := os.MkdirTemp("", "volume-")
	if err != nil {
		return err
	}
	defer os.Remove(dir)
	flags := uintptr(unix.MS_RDONLY | unix.MS_NODEV | unix.MS_NOSUID | unix.MS_NOEXEC)
	if err := unix.Mount(device, dir, kind, flags, ""); err != nil {
		return fmt.Errorf("mount %s (%s): %w", device, kind, err)
	}
	defer func() {
		if e := unix.Unmount(dir, 0); e != nil {
			err = errors.Join(err, fmt.Errorf("unmount %s: %w", device, e))
		}
	}()
	return use(dir)
}

// medium says why the foreign content of a disk is never erased: machines are started from it, perhaps this one. "": they aren't. UEFI names
// only a partition of a GPT, so that content counts, too. Examining it mounts its volumes: nothing else may be changing the disk.
func (d *Disks) medium(dev device, f found) string {
	if f.verdict != foreign {
		return ""
	}
	if f.has(esp.StartedFrom(d.o.firmware)) {
		return "is the disk that this machine was started from"
	}
	parts, _ := dev.partitions() // of a disk that is gone, nothing can be erased
	for _, p := range append(parts, partition{path: dev.Path}) {
		c, err := identifyDevice(p.path)
		if err != nil || !volumeTypes[c.kind] {
			continue
		}
		named := strings.EqualFold(c.label, boot.MediumLabel) || strings.EqualFold(c.label, boot.ISOLabel)
		if named || c.kind == "iso9660" && p.path == dev.Path || c.kind == "vfat" && d.startsSystem(p.path) {
			return "is an installation medium"
		}
	}
	return ""
}

// startsSystem reports whether a UEFI starts a system of Garboard from a volume. One that can't be mounted starts none.
func (d *Disks) startsSystem(path string) (starts bool) {
	_ = d.o.mount(path, "vfat", func(dir string) error { starts = esp.Partition(dir).Direct(); return nil })
	return starts
}

// findVolumes examines the disks, partitions and CD drives that may have volumes, and
// reads no others. Labels are compared without case: FAT and strict ISO 9660 have them in
// capitals.
func (d *Disks) findVolumes(label string, may func(name string) bool) (all []mountable, err error) {
	entries, err := os.ReadDir(blockDir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if !may(e.Name()) {
			continue
		}
		path := filepath.Join("/dev", e.Name())
		c, err := identifyDevice(path)
		if err != nil {
			continue // an empty drive, or one that was removed
		}
		if volumeTypes[c.kind] && strings.EqualFold(c.label, label) {
			all = append(all, mountable{path, c.kind})
		}
	}
	return all, nil
}

// Devices has another value after a disk or a medium has come or gone. No device is read.
func (d *Disks) Devices() string {
	entries, _ := os.ReadDir(blockDir)
	var all strings.Builder
	for _, e := range entries {
		sequence, _ := os.ReadFile(filepath.Join(blockDir, e.Name(), "diskseq")) // partitions have none
		fmt.Fprintln(&all, e.Name(), string(sequence))
	}
	return all.String()
}

// holdsVolumes is true for disks, their partitions and CD drives.
func (d *Disks) holdsVolumes(name string) bool {
	if strings.HasPrefix(name, "sr") {
		return true
	}
	return d.o.isDisk(wholeDisk(name))
}

// wholeDisk is the disk of a partition, or the disk itself.
func wholeDisk(name string) string {
	if target, err := filepath.EvalSymlinks(filepath.Join(blockDir, name)); err == nil {
		if _, err := os.Stat(filepath.Join(target, "partition")); err == nil {
			return filepath.Base(filepath.Dir(target))
		}
	}
	return name
}

func identifyDevice(path string) (content, error) {
	f, err := os.Open(path)
	if err != nil {
		return content{}, err
	}
	defer f.Close()
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return content{}, err
	}
	return identify(f, size)
}
