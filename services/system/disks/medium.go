package disks

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/garboard-os/garboard/boot"
	"golang.org/x/sys/unix"
)

// volumeTypes are the file systems of configuration volumes: images of CDs, and
// USB sticks.
var volumeTypes = map[string]bool{"iso9660": true, "vfat": true}

// Volume calls use with the files of the volume with that file system label,
// mounted read-only until use returns. It implements boot.Mounter.
func (d *Disks) Volume(_ context.Context, label string, use func(fs.FS) error) (err error) {
	device, kind, err := d.findVolume(label)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "volume-")
	if err != nil {
		return err
	}
	defer os.Remove(dir)
	flags := uintptr(unix.MS_RDONLY | unix.MS_NODEV | unix.MS_NOSUID | unix.MS_NOEXEC)
	if err := unix.Mount(device, dir, kind, flags, ""); err != nil {
		return fmt.Errorf("mount volume %s (%s, %s): %w", label, device, kind, err)
	}
	defer func() {
		if e := unix.Unmount(dir, 0); e != nil {
			err = errors.Join(err, fmt.Errorf("unmount volume %s (%s): %w", label, device, e))
		}
	}()
	return use(os.DirFS(dir))
}

// findVolume examines every disk, partition and CD drive. Labels are compared
// without case: FAT and strict ISO 9660 have them in capitals.
func (d *Disks) findVolume(label string) (device, kind string, err error) {
	entries, err := os.ReadDir("/sys/class/block")
	if err != nil {
		return "", "", err
	}
	for _, e := range entries {
		if !d.holdsVolumes(e.Name()) {
			continue
		}
		path := filepath.Join("/dev", e.Name())
		c, err := identifyDevice(path)
		if err != nil {
			continue // an empty drive, or one that was removed
		}
		if volumeTypes[c.kind] && strings.EqualFold(c.label, label) {
			return path, c.kind, nil
		}
	}
	return "", "", fmt.Errorf("no volume labelled %q: %w", label, boot.ErrNone)
}

// holdsVolumes is true for disks, their partitions and CD drives.
func (d *Disks) holdsVolumes(name string) bool {
	if strings.HasPrefix(name, "sr") {
		return true
	}
	whole := name
	if target, err := filepath.EvalSymlinks(filepath.Join("/sys/class/block", name)); err == nil {
		if _, err := os.Stat(filepath.Join(target, "partition")); err == nil {
			whole = filepath.Base(filepath.Dir(target))
		}
	}
	return d.o.isDisk(whole)
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
