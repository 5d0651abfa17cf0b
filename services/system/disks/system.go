package disks

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/system/disk"
	"github.com/garboard-os/garboard/services/system/volume"
	"golang.org/x/sys/unix"
)

const (
	mkfsFAT = "/usr/sbin/mkfs.fat"
	// fatTimeout is more than enough for two tables of 512 KiB.
	fatTimeout = time.Minute
)

// SystemDisk is the disk with the system's partitions, for programs that make it boot.
type SystemDisk struct {
	Path            string
	EFI, BIOS, Meta disk.Partition
	Sector          int64 // its logical sector, in bytes
	// Layout are its partitions with their sizes, for users.
	Layout string
}

// ErrNoSystem is the error before STATE is mounted, and in containers.
var ErrNoSystem = errors.New("this node has no system disk")

// SystemDisk returns the disk that STATE is on.
func (d *Disks) SystemDisk() (s SystemDisk, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	known := d.System()
	if known == nil {
		return s, ErrNoSystem
	}
	system, err := known.Inspect()
	if err != nil {
		return s, err
	}
	s = SystemDisk{Path: system.Path, Sector: int64(system.Sector), Layout: system.Parts()}
	for label, to := range map[string]*disk.Partition{boot.LabelEFI: &s.EFI, boot.BIOSLabel(system.Layout()): &s.BIOS, boot.LabelMeta: &s.Meta} {
		if *to, err = system.Device(label); err != nil {
			return SystemDisk{}, err
		}
	}
	return s, nil
}

// UseEFI mounts the EFI system partition until use returns. Without a file system it is made first.
func (d *Disks) UseEFI(ctx context.Context, use func(dir string) error) error {
	system, err := d.SystemDisk()
	if err != nil {
		return err
	}
	return d.useEFI(ctx, system.EFI.Path, use)
}

func (d *Disks) useEFI(ctx context.Context, device string, use func(dir string) error) error {
	c, err := disk.Identify(device)
	if err != nil {
		return err
	}
	if c.Kind != "vfat" {
		ctx, cancel := context.WithTimeout(ctx, fatTimeout)
		defer cancel()
		if err := d.o.Processes.Run(ctx, exec.Command(mkfsFAT, "-F", "32", "-n", boot.LabelEFI, device)); err != nil {
			return err
		}
	}
	// Without write-back of directories and tables, a power cut between two writes leaves them in their order.
	const flags = unix.MS_NODEV | unix.MS_NOSUID | unix.MS_NOEXEC | unix.MS_NOATIME | unix.MS_DIRSYNC
	return volume.Use(device, d.o.efiDir, "vfat", flags, "umask=0077", use)
}

// Open opens the whole disk for writing. It is in use, so what is written must not be in a mounted partition.
func (s SystemDisk) Open() (*os.File, error) { return os.OpenFile(s.Path, os.O_RDWR, 0) }
