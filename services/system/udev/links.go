package udev

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// Links by which people and programs name devices, as the rules of systemd's udev make them
// (60-persistent-storage.rules, 50-udev-default.rules): the names of the kernel depend on the order in which it finds
// the devices.
//
//	/dev/disk/by-id/virtio-SERIAL, nvme-WWID, wwn-0xWWN, and each with -partN
//	/dev/virtio-ports/NAME

// otherCharacters are those that udev doesn't allow in names.
var otherCharacters = regexp.MustCompile(`[^0-9A-Za-z#+.:=@_-]`)

// linked are the subsystems whose devices have links.
var linked = []string{"virtio-ports", "block"}

// linkOf is the link to a device, below /dev; "": it has none. The device is a directory in sysfs.
func linkOf(subsystem, device string) string {
	read := func(name string) string {
		text, err := os.ReadFile(filepath.Join(device, name))
		if err != nil {
			return ""
		}
		return strings.TrimLeft(otherCharacters.ReplaceAllString(strings.TrimSpace(string(text)), "_"), ".")
	}
	switch subsystem {
	case "virtio-ports":
		if name := read("name"); name != "" {
			return "virtio-ports/" + name
		}
	case "block":
		part := read("partition")
		if part != "" {
			part, device = "-part"+part, filepath.Dir(device)
		}
		kind, id := "wwn-0x", ""
		switch name := filepath.Base(device); {
		case strings.HasPrefix(name, "vd"):
			kind, id = "virtio-", read("serial")
		case strings.HasPrefix(name, "nvme"):
			kind, id = "nvme-", read("wwid")
		default:
			if scsi, is := strings.CutPrefix(read("device/wwid"), "naa."); is {
				id = scsi
			}
		}
		if id != "" {
			return "disk/by-id/" + kind + id + part
		}
	}
	return ""
}

// link makes or removes the link to a device. It is only a name: nothing waits for it.
func (d *daemon) link(subsystem, sysfsDevice, devName string, gone bool) {
	node := filepath.Join(d.dev, devName)
	if gone {
		for _, dir := range []string{"virtio-ports", "disk/by-id"} {
			links, _ := filepath.Glob(filepath.Join(d.dev, dir, "*"))
			for _, l := range links {
				if target, err := os.Readlink(l); err == nil && filepath.Join(filepath.Dir(l), target) == node {
					_ = os.Remove(l)
				}
			}
		}
		d.linkAll() // another path to the same disk may be there
		return
	}
	name := linkOf(subsystem, sysfsDevice)
	if name == "" {
		return
	}
	path := filepath.Join(d.dev, name)
	if err := symlink(node, path); err != nil {
		d.log.Warn("the link to a device isn't made", "link", path, "err", err)
	}
}

// linkAll makes the links to the existing devices.
func (d *daemon) linkAll() {
	for _, subsystem := range linked {
		devices, _ := filepath.Glob(filepath.Join(d.sysfs, "class", subsystem, "*"))
		for _, device := range devices {
			if real, err := filepath.EvalSymlinks(device); err == nil {
				d.link(subsystem, real, filepath.Base(real), false)
			}
		}
	}
}
