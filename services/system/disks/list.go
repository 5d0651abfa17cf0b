package disks

import (
	"os"
	"path/filepath"
	"strings"

	"github.com/garboard-os/garboard/boot"
)

// Disk is a disk for a person who has to choose one.
type Disk struct {
	Path     string // /dev/vda: what machine.install.disk names
	Size     int64  // bytes
	Model    string
	Serial   string
	Bus      string // virtio, nvme, scsi, …
	ReadOnly bool
	System   bool   // STATE is on it
	Holds    string // in words
}

// List looks at all disks, and only looks. In a container there are none: those
// of the host are none of the node's business.
func (d *Disks) List() ([]Disk, error) {
	if d.o.Mode == boot.Container {
		return nil, nil
	}
	devices, err := d.devices()
	if err != nil {
		return nil, err
	}
	system := ""
	// Held for as long as a disk is being prepared: then none is the system's yet.
	if d.mu.TryLock() {
		if d.system != nil {
			system = d.system.Path
		}
		d.mu.Unlock()
	}
	disks := make([]Disk, 0, len(devices))
	for _, dev := range devices {
		holds := "?"
		if f, err := d.inspect(dev); err == nil {
			holds = f.String()
		}
		disks = append(disks, Disk{
			Path: dev.Path, Size: dev.Size, Model: dev.Model, Serial: dev.Serial, Bus: bus(dev.Name),
			ReadOnly: dev.ReadOnly, System: dev.Path == system, Holds: holds,
		})
	}
	return disks, nil
}

// bus is the subsystem that the disk's device hangs on (sysfs(5)).
func bus(name string) string {
	target, err := os.Readlink(filepath.Join("/sys/block", name, "device/subsystem"))
	if err != nil {
		return strings.TrimRight(name, "0123456789")
	}
	return filepath.Base(target)
}
