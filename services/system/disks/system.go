package disks

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/diskfs/go-diskfs/partition/gpt"
	"github.com/garboard-os/garboard/boot"
	"golang.org/x/sys/unix"
)

const (
	mkfsFAT = "/usr/sbin/mkfs.fat"
	// fatTimeout is more than enough for two tables of 512 KiB.
	fatTimeout = time.Minute
)

// SystemPartition is a partition of the system disk.
type SystemPartition struct {
	Label       string
	Path        string
	Start, Size int64 // bytes
	Number      int
	GUID        string
}

// SystemDisk is the disk with the system's partitions, for programs that make it boot.
type SystemDisk struct {
	Path            string
	EFI, BIOS, Meta SystemPartition
	Sector          int64 // its logical sector, in bytes
	// Layout are its partitions with their sizes, for users.
	Layout string
}

// ErrNoSystem is the error before STATE is mounted, and in containers.
var ErrNoSystem = errors.New("this node has no system disk")

// SystemDisk returns the disk that STATE is on.
func (d *Disks) SystemDisk() (SystemDisk, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.system == nil {
		return SystemDisk{}, ErrNoSystem
	}
	dev := *d.system
	f, err := d.inspect(dev)
	if err != nil {
		return SystemDisk{}, err
	}
	s := SystemDisk{Path: dev.Path, Sector: int64(dev.Sector)}
	for label, to := range map[string]*SystemPartition{boot.LabelEFI: &s.EFI, boot.BIOSLabel(layoutOf(f.table)): &s.BIOS, boot.LabelMeta: &s.Meta} {
		p, err := f.partition(dev, label)
		if err != nil {
			return SystemDisk{}, err
		}
		path, there := dev.partitionPath(p.n)
		if !there {
			return SystemDisk{}, fmt.Errorf("partition %s of %s has no device", label, dev.Path)
		}
		*to = SystemPartition{Label: label, Path: path, Start: p.start, Size: p.size, Number: p.n, GUID: p.guid}
	}
	var layout []string
	for _, p := range f.table.Partitions {
		if p.Type != gpt.Unused {
			layout = append(layout, p.Name+" "+bytesText(int64(p.Size)))
		}
	}
	s.Layout = strings.Join(layout, ", ")
	return s, nil
}

// UseEFI mounts the EFI system partition until use returns. Without a file system it is made first.
func (d *Disks) UseEFI(ctx context.Context, use func(dir string) error) (err error) {
	system, err := d.SystemDisk()
	if err != nil {
		return err
	}
	c, err := identifyDevice(system.EFI.Path)
	if err != nil {
		return err
	}
	if c.kind != "vfat" {
		ctx, cancel := context.WithTimeout(ctx, fatTimeout)
		defer cancel()
		if err := d.o.Processes.Run(ctx, exec.Command(mkfsFAT, "-F", "32", "-n", boot.LabelEFI, system.EFI.Path)); err != nil {
			return err
		}
	}
	// Without write-back of directories and tables, a power cut between two writes leaves them in their order.
	const flags = unix.MS_NODEV | unix.MS_NOSUID | unix.MS_NOEXEC | unix.MS_NOATIME | unix.MS_DIRSYNC
	if err := unix.Mount(system.EFI.Path, boot.EFIDir, "vfat", flags, "umask=0077"); err != nil {
		return fmt.Errorf("mount %s (%s) on %s: %w", boot.LabelEFI, system.EFI.Path, boot.EFIDir, err)
	}
	defer func() {
		if e := unmountDir(boot.EFIDir); e != nil {
			err = errors.Join(err, e)
		}
	}()
	return use(boot.EFIDir)
}

// Open opens the whole disk for writing. It is in use, so what is written must not be in a mounted partition.
func (s SystemDisk) Open() (*os.File, error) { return os.OpenFile(s.Path, os.O_RDWR, 0) }
