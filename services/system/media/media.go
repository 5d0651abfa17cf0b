// Package media finds the volumes with what people bring to a machine: configurations, systems and container images,
// on CDs, USB sticks and disks. It also knows which disks are never erased, because machines are started from them.
package media

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/option"
	"github.com/garboard-os/garboard/services/system/disk"
	"github.com/garboard-os/garboard/services/system/volume"
	"golang.org/x/sys/unix"
)

// blockDir lists disks, partitions and CD drives.
const blockDir = "/sys/class/block"

// volumeTypes are the file systems of configuration volumes: images of CDs, and
// USB sticks.
var volumeTypes = map[string]bool{"iso9660": true, "vfat": true}

// Finder finds those of a machine.
type Finder struct {
	Disks *disk.Inventory
	// System is the disk that STATE is on, once it is mounted; nil before.
	System   func() *disk.Disk
	Firmware string // "": that of the machine

	// Mount calls use with the directory of a volume; the kernel of tests has no FAT.
	Mount func(device, kind string, use func(dir string) error) error
}

// New fills in what is left out.
func New(m Finder) *Finder {
	option.Default(&m.Firmware, esp.FirmwareDir)
	option.Default(&m.Mount, mountReadOnly)
	return &m
}

// Volume calls use with the files of the volume with that file system label,
// mounted read-only until use returns. It is that of a medium, see Media, or else of the only
// disk for which use doesn't return boot.ErrNone, as hypervisors and clouds provide: of several,
// a pod may have made one. It implements boot.Mounter.
func (m *Finder) Volume(ctx context.Context, label string, use func(fs.FS) error) error {
	none := m.Media(ctx, label, use)
	if !errors.Is(none, boot.ErrNone) {
		return none
	}
	found, err := m.find(label, m.holdsVolumes)
	if err != nil {
		return err
	}
	var disks []string
	for _, f := range found {
		name := wholeDisk(filepath.Base(f.device))
		if slices.Contains(disks, name) {
			continue
		}
		e := m.use(f, use)
		if errors.Is(e, boot.ErrNone) {
			none = e
			continue
		}
		disks, err = append(disks, name), e
	}
	switch len(disks) {
	case 0:
		return none
	case 1:
		return err
	}
	return fmt.Errorf("the disks %s have a volume labelled %q each: detach all but one", strings.Join(disks, ", "), label)
}

// Media is Volume for media that a person has put into the machine, and for what the image of the system disk has
// brought. Pods can bring disks of their own, over the network or with a driver for storage, and give their volumes
// any label. The first volume is used for which use doesn't return boot.ErrNone.
func (m *Finder) Media(_ context.Context, label string, use func(fs.FS) error) error {
	own := m.own()
	found, err := m.find(label, func(name string) bool {
		path := disk.Target(filepath.Join(blockDir, name))
		return path != "" && m.holdsVolumes(name) && (pluggedIn(path) || filepath.Join("/dev", name) == own)
	})
	if err != nil {
		return err
	}
	none := fmt.Errorf("no volume labelled %q: %w", label, boot.ErrNone)
	for _, f := range found {
		if none = m.use(f, use); !errors.Is(none, boot.ErrNone) {
			return none
		}
	}
	return none
}

// own is the partition of the system disk with what its image has brought; "": there is none.
func (m *Finder) own() string {
	known := m.System()
	if known == nil {
		return ""
	}
	system, err := known.Inspect()
	if err != nil {
		return "" // the disk is gone
	}
	p, _ := system.Device(boot.LabelMedium) // without it, there is none
	return p.Path
}

// pluggedIn reports whether a block device, or a partition, with that path in sysfs is a CD, or on USB, or else one
// that can be removed, and is connected to the machine itself.
func pluggedIn(path string) bool {
	path = whole(path)
	own := strings.Contains(path, "/pci") || strings.Contains(path, "/VMBUS") // Hyper-V's
	removable, _ := os.ReadFile(filepath.Join(path, "removable"))
	return own && !disk.IsRemote(path) && (strings.Contains(path, "/usb") || strings.TrimSpace(string(removable)) == "1")
}

// mountable is a volume on some device.
type mountable struct{ device, kind string }

func (m *Finder) use(v mountable, use func(fs.FS) error) error {
	return m.Mount(v.device, v.kind, func(dir string) error { return withFiles(dir, use) })
}

// files are those of a mounted volume. A link leads to none outside of it, and what is neither a file nor a directory
// isn't opened: that might not return.
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

// mountReadOnly calls use with the directory where a volume is mounted until use returns.
func mountReadOnly(device, kind string, use func(dir string) error) error {
	dir, err := os.MkdirTemp("", "volume-")
	if err != nil {
		return err
	}
	defer os.Remove(dir)
	return volume.Use(device, dir, kind, unix.MS_RDONLY|unix.MS_NODEV|unix.MS_NOSUID|unix.MS_NOEXEC, "", use)
}

// find examines the disks, partitions and CD drives that may have volumes, and
// reads no others. Labels are compared without case: FAT and strict ISO 9660 have them in
// capitals.
func (m *Finder) find(label string, may func(name string) bool) (all []mountable, err error) {
	entries, err := os.ReadDir(blockDir)
	for _, e := range entries {
		if !may(e.Name()) {
			continue
		}
		path := filepath.Join("/dev", e.Name())
		c, err := disk.Identify(path)
		if err != nil {
			continue // an empty drive, or one that was removed
		}
		if volumeTypes[c.Kind] && strings.EqualFold(c.Label, label) {
			all = append(all, mountable{path, c.Kind})
		}
	}
	return all, err
}

// Devices has another value after a disk or a medium has come or gone. No device is read.
func (m *Finder) Devices() string {
	entries, _ := os.ReadDir(blockDir)
	var all strings.Builder
	for _, e := range entries {
		sequence, _ := os.ReadFile(filepath.Join(blockDir, e.Name(), "diskseq")) // partitions have none
		fmt.Fprintln(&all, e.Name(), string(sequence))
	}
	return all.String()
}

// holdsVolumes is true for disks, their partitions and CD drives.
func (m *Finder) holdsVolumes(name string) bool {
	return strings.HasPrefix(name, "sr") || m.Disks.Is(wholeDisk(name))
}

// wholeDisk is the disk of a partition, or the disk itself.
func wholeDisk(name string) string {
	return filepath.Base(whole(cmp.Or(disk.Target(filepath.Join(blockDir, name)), name)))
}

// whole is wholeDisk for paths in sysfs.
func whole(path string) string {
	if _, err := os.Stat(filepath.Join(path, "partition")); err == nil {
		return filepath.Dir(path)
	}
	return path
}

// StartedFrom says why the foreign content of a disk is never erased: machines are started from it, perhaps this one.
// "": they aren't. UEFI names only a partition of a GPT, so that content counts, too. Examining it mounts its
// volumes: nothing else may be changing the disk.
func (m *Finder) StartedFrom(d disk.Disk) string {
	if d.Verdict != disk.Foreign {
		return ""
	}
	if d.Has(esp.StartedFrom(m.Firmware)) {
		return "is the disk that this machine was started from"
	}
	for _, p := range append(d.Partitions(), disk.Partition{Path: d.Path}) {
		c, err := disk.Identify(p.Path)
		if err != nil || !volumeTypes[c.Kind] {
			continue
		}
		named := strings.EqualFold(c.Label, boot.MediumLabel) || strings.EqualFold(c.Label, boot.ISOLabel)
		if named || c.Kind == "iso9660" && p.Path == d.Path || c.Kind == "vfat" && m.startsSystem(p.Path) {
			return "is an installation medium"
		}
	}
	return ""
}

// startsSystem reports whether a UEFI starts a system of Garboard from a volume. One that can't be mounted starts none.
func (m *Finder) startsSystem(path string) (starts bool) {
	_ = m.Mount(path, "vfat", func(dir string) error { starts = esp.Partition(dir).Direct(); return nil })
	return starts
}

// Unfit says why a disk isn't the selected one; "" if it is. Without a name, that is never a disk that machines are
// started from.
func (m *Finder) Unfit(d disk.Disk, name string, s config.DiskSelector) string {
	why := d.Misfit(s)
	if why == "" && name == "" {
		why = m.StartedFrom(d)
	}
	return why
}

// Spares is the error of a disk that isn't erased whatever the configuration says, with what to do next. Mounts below
// the given directories don't count: the caller unmounts them.
func (m *Finder) Spares(d disk.Disk, next string, given ...string) error {
	medium := m.StartedFrom(d)
	busy, err := d.InUse(given...)
	switch {
	case err != nil:
		return err
	case medium != "":
		return m.Disks.Refuse(d, fmt.Sprintf("%s (%s)", medium, d.Holds), next)
	case d.ReadOnly:
		return m.Disks.Refuse(d, "is read-only", next)
	case busy != "":
		return m.Disks.Refuse(d, "is in use: "+busy, next)
	}
	return nil
}

// MayErase is nil if the content of the disk has to be erased and may be. consent says what allows it; name and allow
// are the settings that choose the disk, and that could allow it.
func (m *Finder) MayErase(d disk.Disk, consent, name, allow string) error {
	another := "Name another disk in " + name
	switch err := m.Spares(d, another); {
	case err != nil:
		return err
	case d.Data(): // names of disks may have changed since somebody allowed it
		return m.Disks.Refuse(d, fmt.Sprintf("has the data of other machine.disks (%s), and isn't touched", d.Holds), another+", or erase this one first: gbctl -n ADDRESS reset --user-disks-to-wipe")
	case consent == "":
		return m.Disks.Refuse(d, fmt.Sprintf("holds %s, and isn't touched", d.Holds), fmt.Sprintf("%s, or set %s: true to erase this one", another, allow))
	}
	return nil
}
