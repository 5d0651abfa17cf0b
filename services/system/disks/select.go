package disks

import (
	"fmt"
	"path/filepath"
	"strings"

	"github.com/garboard-os/garboard/config"
)

// misfit says which properties of a disk aren't as selected; "" if all are.
func misfit(disk Disk, s config.DiskSelector) string {
	var why []string
	if !s.Size.Fits(uint64(disk.Size)) {
		why = append(why, fmt.Sprintf("its size isn't %s bytes", s.Size))
	}
	if s.Type != "" && s.Type != disk.Type {
		why = append(why, fmt.Sprintf("its type is %s", disk.Type))
	}
	for _, p := range []struct{ name, pattern, value string }{
		{"model", s.Model, disk.Model}, {"serial", s.Serial, disk.Serial}, {"wwid", s.WWID, disk.WWID}, {"busPath", s.BusPath, disk.BusPath},
	} {
		if p.pattern != "" && !config.Matches(p.pattern, p.value) {
			why = append(why, fmt.Sprintf("its %s is %q", p.name, p.value))
		}
	}
	return strings.Join(why, ", ")
}

// rejected says of disks, by their paths, why they don't fit.
type rejected map[string]string

// unfit says why a disk isn't the selected one; "" if it is. Without a name, that is never a disk that machines are started from.
func (d *Disks) unfit(dev device, f found, name string, s config.DiskSelector) string {
	why := misfit(dev.Disk, s)
	if why == "" && name == "" {
		why = d.medium(dev, f)
	}
	return why
}

// resolved is the disk that a name is a link to, such as one in /dev/disk/by-id; a name without a file stays.
func resolved(name string) string {
	if path, err := filepath.EvalSymlinks(name); err == nil {
		return path
	}
	return name
}

// chosen is the disk that the configuration names and selects, if it is there.
func (d *Disks) chosen(install config.Install) (device, bool, rejected, error) {
	devices, err := d.devices()
	path := resolved(install.Disk)
	why := rejected{}
	for _, dev := range devices {
		f, err := d.inspect(dev)
		reason := d.unfit(dev, f, install.Disk, install.DiskSelector)
		if err != nil && install.Disk == "" {
			reason = err.Error()
		}
		if reason == "" && (install.Disk == "" || path == dev.Path) {
			return dev, true, nil, nil
		}
		why[dev.Path] = reason
	}
	return device{}, false, why, err
}
