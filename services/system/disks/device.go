package disks

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/moby/sys/mountinfo"

	"github.com/garboard-os/garboard/config"
)

// sysSector is the unit of every size in sysfs, whatever the disk's own sector.
const sysSector = 512

// device is a whole disk as the kernel shows it under /sys/block. System and Holds aren't known.
type device struct {
	Disk
	Name   string // vda
	Sector int    // bytes: the unit of its partition table
	Remote bool   // on the other side of a network
}

// notDisks are block devices that consist of memory, files, or other devices.
var notDisks = []string{"loop", "ram", "zram", "sr", "fd", "dm-", "md", "nbd", "rbd", "drbd", "mtd"}

func isDisk(name string) bool {
	return !slices.ContainsFunc(notDisks, func(prefix string) bool { return strings.HasPrefix(name, prefix) })
}

// devices lists the disks, by name.
func (d *Disks) devices() ([]device, error) {
	entries, err := os.ReadDir("/sys/block")
	if err != nil {
		return nil, err
	}
	var out []device
	for _, e := range entries {
		if !d.o.isDisk(e.Name()) {
			continue
		}
		dev, err := readDevice(e.Name())
		if errors.Is(err, fs.ErrNotExist) || err == nil && dev.Size == 0 {
			continue // it was removed meanwhile, or is a card reader without a card
		}
		if err != nil {
			return nil, err
		}
		if d.o.serial != nil {
			dev.Serial = d.o.serial(dev.Name)
		}
		out = append(out, dev)
	}
	slices.SortFunc(out, func(a, b device) int {
		return cmp.Or(cmp.Compare(len(a.Name), len(b.Name)), cmp.Compare(a.Name, b.Name)) // sdz before sdaa
	})
	return out, nil
}

func readDevice(name string) (device, error) {
	dir := filepath.Join("/sys/block", name)
	size, err := readNumber(filepath.Join(dir, "size"))
	sector, sectorErr := readNumber(filepath.Join(dir, "queue/logical_block_size"))
	if err := cmp.Or(err, sectorErr); err != nil {
		return device{}, err
	}
	kind := config.DiskSSD
	switch {
	case strings.HasPrefix(name, "nvme"):
		kind = config.DiskNVMe
	case firstText(dir, "queue/rotational") == "1":
		kind = config.DiskHDD
	}
	place, _, _ := strings.Cut(linkTarget(dir), "/block/")
	place = strings.TrimPrefix(place, "/sys/devices")
	return device{Name: name, Sector: int(sector), Remote: isRemote(dir), Disk: Disk{
		Path:     "/dev/" + strings.ReplaceAll(name, "!", "/"),
		Size:     size * sysSector,
		Model:    firstText(dir, "device/model"),
		Serial:   firstText(dir, "serial", "device/serial", "device/vpd_pg80"),
		WWID:     firstText(dir, "wwid", "device/wwid"),
		Bus:      bus(name, place),
		BusPath:  place,
		Type:     kind,
		ReadOnly: firstText(dir, "ro") == "1",
	}}, nil
}

// linkTarget is where a link of sysfs leads to; "" if that isn't known.
func linkTarget(path string) string {
	target, _ := filepath.EvalSymlinks(path)
	return target
}

func readNumber(file string) (int64, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
}

// firstText is the content of the first file with printable content. Which file
// has it depends on the driver.
func firstText(dir string, files ...string) string {
	for _, f := range files {
		data, err := os.ReadFile(filepath.Join(dir, f))
		if err != nil {
			continue
		}
		s := strings.Map(func(r rune) rune {
			if r < ' ' || r > '~' {
				return -1 // vpd_pg80 begins with binary data
			}
			return r
		}, string(data))
		if s = strings.Join(strings.Fields(s), " "); s != "" {
			return s
		}
	}
	return ""
}

// partitionPath is the device node of the disk's n-th partition; false before
// the kernel has it.
func (dev device) partitionPath(n int) (string, bool) {
	parts, err := dev.partitions()
	at := slices.IndexFunc(parts, func(p partition) bool { return p.n == n })
	if err != nil || at < 0 {
		return "", false
	}
	_, err = os.Stat(parts[at].path)
	return parts[at].path, err == nil
}

// inUse is what keeps the disk or one of its partitions busy; "" for nothing.
// Mounts below the given directories are ignored: the caller unmounts them.
func (dev device) inUse(given ...string) (string, error) {
	dir := filepath.Join("/sys/block", dev.Name)
	parts, err := filepath.Glob(filepath.Join(dir, dev.Name+"*"))
	if err != nil {
		return "", err
	}
	for _, p := range append(parts, dir) {
		if holders, err := os.ReadDir(filepath.Join(p, "holders")); err == nil && len(holders) > 0 {
			return fmt.Sprintf("%s is part of %s", filepath.Base(p), holders[0].Name()), nil
		}
		number := firstText(p, "dev")
		mounts, err := mountinfo.GetMounts(func(i *mountinfo.Info) (skip, stop bool) {
			ends := slices.ContainsFunc(given, func(dir string) bool { return strings.HasPrefix(i.Mountpoint, dir+"/") })
			return fmt.Sprintf("%d:%d", i.Major, i.Minor) != number || ends, false
		})
		if err != nil {
			return "", err
		}
		if len(mounts) > 0 {
			return fmt.Sprintf("%s is mounted on %s", filepath.Base(p), mounts[0].Mountpoint), nil
		}
	}
	return "", nil
}

// table shows the disks to a user who has to choose one.
func (d *Disks) table() string { return d.selection(nil) }

// selection is table, and says why disks don't fit.
func (d *Disks) selection(why rejected) string {
	disks, err := d.List()
	if err != nil {
		return err.Error()
	}
	if len(disks) == 0 {
		return "there are no disks"
	}
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "DEVICE\tSIZE\tMODEL\tSERIAL\tHOLDS")
	for _, disk := range disks {
		holds := disk.Holds
		if reason := why[disk.Path]; reason != "" {
			holds += "; not selected: " + reason
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", disk.Path, bytesText(disk.Size), cmp.Or(disk.Model, "-"), cmp.Or(disk.Serial, "-"), holds)
	}
	w.Flush()
	return strings.TrimRight(b.String(), "\n")
}

// bytesText is a size as text for users.
func bytesText(n int64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	f, i := float64(n), 0
	for ; f >= 1024 && i < len(units)-1; i++ {
		f /= 1024
	}
	return strings.TrimSuffix(strconv.FormatFloat(f, 'f', 1, 64), ".0") + " " + units[i]
}
