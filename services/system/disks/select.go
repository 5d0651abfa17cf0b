package disks

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/garboard-os/garboard/config"
)

// misfit says which property of a disk isn't as selected; "" if all are.
func misfit(disk Disk, s config.DiskSelector) string {
	if !s.Size.Fits(uint64(disk.Size)) {
		return fmt.Sprintf("its size isn't %s bytes", s.Size)
	}
	if s.Type != "" && s.Type != disk.Type {
		return fmt.Sprintf("its type is %s", disk.Type)
	}
	for _, p := range []struct{ name, pattern, value string }{
		{"model", s.Model, disk.Model}, {"serial", s.Serial, disk.Serial}, {"wwid", s.WWID, disk.WWID}, {"busPath", s.BusPath, disk.BusPath},
	} {
		if p.pattern != "" && !matches(p.pattern, p.value) {
			return fmt.Sprintf("its %s is %q", p.name, p.value)
		}
	}
	return ""
}

// matches compares a text with one in which an asterisk stands for any characters.
func matches(pattern, text string) bool {
	parts := strings.Split(pattern, "*")
	for i, part := range parts {
		parts[i] = regexp.QuoteMeta(part)
	}
	return regexp.MustCompile(`^` + strings.Join(parts, `.*`) + `$`).MatchString(text)
}

// chosen is the disk that the configuration names and selects, if it is there. Without a name, it is never an installation medium.
func (d *Disks) chosen(install config.Install) (device, bool, error) {
	devices, err := d.devices()
	if err != nil {
		return device{}, false, err
	}
	for _, dev := range devices {
		if install.Disk != "" && install.Disk != dev.Path || misfit(dev.disk(), install.DiskSelector) != "" {
			continue
		}
		if f, err := d.inspect(dev); install.Disk != "" || err == nil && d.medium(dev, f) == "" {
			return dev, true, nil
		}
	}
	return device{}, false, nil
}
