package disks

import (
	"os"
	"path/filepath"
	"strings"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
)

// Disk is a disk in the list for a user who has to choose one.
type Disk struct {
	Path     string // /dev/vda: the value for machine.install.disk
	Size     int64  // bytes
	Model    string
	Serial   string
	Bus      string // virtio, nvme, ata, usb, scsi, …
	WWID     string
	BusPath  string
	Type     config.DiskType
	ReadOnly bool
	System   bool   // STATE is on it
	Holds    string // in words
}

// List examines all disks and changes nothing. In a container there are none:
// the node doesn't use those of the host.
func (d *Disks) List() ([]Disk, error) {
	if d.o.Mode == boot.Container {
		return nil, nil
	}
	devices, err := d.devices()
	if err != nil {
		return nil, err
	}
	system := ""
	// It is held while a disk is being prepared: then there is no system disk yet.
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
		dev.System, dev.Holds = dev.Path == system, holds
		disks = append(disks, dev.Disk)
	}
	return disks, nil
}

// bus is what connects the disk. SATA and USB are within the kernel's subsystem for SCSI (sysfs(5)).
func bus(name, path string) string {
	for _, kind := range []string{"usb", "ata"} {
		if strings.Contains(path, "/"+kind) {
			return kind
		}
	}
	target, err := os.Readlink(filepath.Join("/sys/block", name, "device/subsystem"))
	if err != nil {
		return strings.TrimRight(name, "0123456789")
	}
	return filepath.Base(target)
}
