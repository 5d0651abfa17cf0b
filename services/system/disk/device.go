// Package disk reads disks: what the kernel knows of them, what they hold, their partition tables, and the journal of
// a change that was begun. It keeps nothing in memory. It also has the single writes that changes are made of;
// package volume puts them in their order.
package disk

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/diskfs/go-diskfs/partition/gpt"
	"github.com/garboard-os/garboard/config"
	"github.com/moby/sys/mountinfo"
)

// sysSector is the unit of every size in sysfs, whatever the disk's own sector.
const sysSector = 512

// Identity is what tells a disk from others, also in records of earlier boots. The kernel may have given it another
// name since.
type Identity struct {
	Path   string `json:"path,omitempty"` // /dev/vda: the value for machine.install.disk
	Size   int64  `json:"size"`           // bytes
	Model  string `json:"model,omitempty"`
	Serial string `json:"serial,omitempty"`
	WWID   string `json:"wwid,omitempty"`
}

func (i Identity) String() string {
	about := SizeText(i.Size)
	if i.Model != "" {
		about += ", " + i.Model
	}
	if i.Serial != "" {
		about += ", serial " + i.Serial
	}
	switch {
	case i.Path == "":
		return about
	case i.Serial == "":
		about += ", without a serial number"
	}
	return i.Path + " (" + about + ")"
}

// Disk is a whole disk as the kernel shows it under /sys/block, and its content after it was inspected.
type Disk struct {
	Identity
	Name     string // vda
	Sector   int    // bytes: the unit of its partition table
	Bus      string // virtio, nvme, ata, usb, scsi, …
	BusPath  string
	Type     config.DiskType
	ReadOnly bool
	Remote   bool // on the other side of a network
	System   bool // STATE is on it; only the list of the service disks knows

	Verdict Verdict
	Holds   string     // in words
	Table   *gpt.Table // nil without a valid one
	Pending Journal
	Err     error // why the content isn't known
}

// Partition is one of a disk.
type Partition struct {
	Label, GUID string // "" if the kernel was asked
	Path        string // of its device; "" if only the table was asked
	Number      int
	Start, Size int64 // bytes
}

func read(name string) Disk {
	dir := filepath.Join("/sys/block", name)
	kind := config.DiskSSD
	switch {
	case strings.HasPrefix(name, "nvme"):
		kind = config.DiskNVMe
	case firstText(dir, "queue/rotational") == "1":
		kind = config.DiskHDD
	}
	place, _, _ := strings.Cut(Target(dir), "/block/")
	place = strings.TrimPrefix(place, "/sys/devices")
	return Disk{
		Identity: Identity{
			Path: devicePath(name), Size: number(dir, "size") * sysSector, Model: firstText(dir, "device/model"),
			Serial: firstText(dir, "serial", "device/serial", "device/vpd_pg80"), WWID: firstText(dir, "wwid", "device/wwid"),
		},
		Name: name, Sector: int(number(dir, "queue/logical_block_size")), Remote: isRemote(dir), Bus: bus(name, place), BusPath: place,
		Type: kind, ReadOnly: firstText(dir, "ro") == "1",
	}
}

func devicePath(name string) string { return "/dev/" + strings.ReplaceAll(name, "!", "/") }

// At is the disk with that device, and with its partition table.
func At(path string) (Disk, error) {
	d := read(strings.ReplaceAll(strings.TrimPrefix(path, "/dev/"), "/", "!"))
	file, err := os.Open(path)
	if err != nil {
		return d, err
	}
	defer file.Close()
	d.Table, err = readTable(file, d)
	return d, err
}

// Target is where a link leads to; "" if that isn't known.
func Target(path string) string {
	target, _ := filepath.EvalSymlinks(path)
	return target
}

// Resolved is the disk that a name is a link to, such as one in /dev/disk/by-id; a name without a file stays.
func Resolved(name string) string { return cmp.Or(Target(name), name) }

// number is 0 if a device doesn't have it, or is gone.
func number(dir, file string) int64 {
	n, _ := strconv.ParseInt(firstText(dir, file), 10, 64)
	return n
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

// remote matches the paths in sysfs of devices on the other side of a network: those of iSCSI, Fibre Channel, and
// NVMe over Fabrics.
var remote = regexp.MustCompile(`/session\d|/rport-|/nvme-fabrics/`)

// IsRemote reports whether a device with that path in sysfs is on the other side of a network.
func IsRemote(path string) bool { return remote.MatchString(path) }

// isRemote is IsRemote for the directory of a disk. NVMe with several paths shows them beside the disk.
func isRemote(dir string) bool {
	path := Target(dir)
	transports, _ := filepath.Glob(filepath.Join(filepath.Dir(path), "nvme*", "transport"))
	return IsRemote(path) || slices.ContainsFunc(transports, func(file string) bool { return firstText("", file) != "pcie" })
}

// Partitions are those that the kernel has.
func (d Disk) Partitions() (all []Partition) {
	dir := filepath.Join("/sys/block", d.Name)
	entries, _ := os.ReadDir(dir) // it is gone: there are none
	for _, e := range entries {
		of := filepath.Join(dir, e.Name())
		if n := number(of, "partition"); n > 0 {
			all = append(all, Partition{Path: devicePath(e.Name()), Number: int(n), Start: number(of, "start") * sysSector, Size: number(of, "size") * sysSector})
		}
	}
	return all
}

// Partition is that of the table with a label.
func (d Disk) Partition(label string) (Partition, error) {
	for _, p := range d.entries() {
		if p.Name == label {
			return d.partition(p), nil
		}
	}
	return Partition{}, fmt.Errorf("no partition %s on %s", label, d.Path)
}

// partition is an entry of the table, which may be new, in bytes.
func (d Disk) partition(p *gpt.Partition) Partition {
	sector := int64(d.Sector)
	return Partition{Label: p.Name, GUID: p.GUID, Number: p.Index, Start: int64(p.Start) * sector, Size: int64(p.End-p.Start+1) * sector}
}

// Device is the partition with a label, and its device.
func (d Disk) Device(label string) (Partition, error) {
	p, err := d.Partition(label)
	if err == nil && !d.shows(&p) {
		err = fmt.Errorf("partition %d (%s) of %s has no device", p.Number, label, d.Path)
	}
	return p, err
}

// shows gives a partition its device; false before the kernel has it.
func (d Disk) shows(p *Partition) bool {
	for _, shown := range d.Partitions() {
		if shown.Number == p.Number {
			p.Path = shown.Path
		}
	}
	_, err := os.Stat(p.Path)
	return err == nil
}

// Mapped begins the names of the devices that the node makes of encrypted ones.
const Mapped = "garboard-"

// InUse is what keeps the disk or one of its partitions busy; "" for nothing.
// Mounts below the given directories are ignored: the caller unmounts them.
func (d Disk) InUse(given ...string) (string, error) {
	dir := filepath.Join("/sys/block", d.Name)
	parts, _ := filepath.Glob(filepath.Join(dir, d.Name+"*")) // the pattern is right
	all := append(parts, dir)
	for i := 0; i < len(all); i++ {
		p := all[i]
		holders, _ := os.ReadDir(filepath.Join(p, "holders")) // a partition may be gone
		for _, h := range holders {
			above := filepath.Join("/sys/block", h.Name())
			if !strings.HasPrefix(firstText(above, "dm/name"), Mapped) {
				return fmt.Sprintf("%s is part of %s", filepath.Base(p), h.Name()), nil
			}
			all = append(all, above) // it ends with the mounts of what it has
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

// Misfit says which properties of a disk aren't as selected; "" if all are.
func (d Disk) Misfit(s config.DiskSelector) string {
	var why []string
	if !s.Size.Fits(uint64(d.Size)) {
		why = append(why, fmt.Sprintf("its size isn't %s bytes", s.Size))
	}
	if s.Type != "" && s.Type != d.Type {
		why = append(why, fmt.Sprintf("its type is %s", d.Type))
	}
	for _, p := range []struct{ name, pattern, value string }{
		{"model", s.Model, d.Model}, {"serial", s.Serial, d.Serial}, {"wwid", s.WWID, d.WWID}, {"busPath", s.BusPath, d.BusPath},
	} {
		if p.pattern != "" && !config.Matches(p.pattern, p.value) {
			why = append(why, fmt.Sprintf("its %s is %q", p.name, p.value))
		}
	}
	return strings.Join(why, ", ")
}

// SizeText is a size as text for users.
func SizeText(n int64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	f, i := float64(n), 0
	for ; f >= 1024 && i < len(units)-1; i++ {
		f /= 1024
	}
	return strings.TrimSuffix(strconv.FormatFloat(f, 'f', 1, 64), ".0") + " " + units[i]
}

// LateDisks is how long no disk is begun that has nothing of this node: the kernel looks for disks while the node
// starts already, and the one with the data may be slower than an empty one that also fits.
const LateDisks = 10 * time.Second

// Inventory finds the disks of a machine.
type Inventory struct {
	Began  time.Time                // since when the machine may have shown its disks
	Is     func(name string) bool   // whether an entry of /sys/block is a disk; tests use loop devices
	Serial func(name string) string // of a disk; nil: the kernel knows it. Loop devices have none
}

// NewInventory is that of a machine that starts.
func NewInventory() *Inventory { return &Inventory{Began: time.Now(), Is: isDisk} }

// notDisks are block devices that consist of memory, files, or other devices.
var notDisks = []string{"loop", "ram", "zram", "sr", "fd", "dm-", "md", "nbd", "rbd", "drbd", "mtd"}

func isDisk(name string) bool {
	return !slices.ContainsFunc(notDisks, func(prefix string) bool { return strings.HasPrefix(name, prefix) })
}

// Devices lists the disks, by name, without their content.
func (i *Inventory) Devices() ([]Disk, error) {
	entries, err := os.ReadDir("/sys/block")
	if err != nil {
		return nil, err
	}
	var out []Disk
	for _, e := range entries {
		if !i.Is(e.Name()) {
			continue
		}
		d := read(e.Name())
		if d.Size == 0 {
			continue // it was removed meanwhile, or is a card reader without a card
		}
		if i.Serial != nil {
			d.Serial = i.Serial(d.Name)
		}
		out = append(out, d)
	}
	slices.SortFunc(out, func(a, b Disk) int {
		return cmp.Or(cmp.Compare(len(a.Name), len(b.Name)), cmp.Compare(a.Name, b.Name)) // sdz before sdaa
	})
	return out, nil
}

// All lists the disks with their content.
func (i *Inventory) All() ([]Disk, error) {
	all, err := i.Devices()
	for n, d := range all {
		all[n], _ = d.Inspect() // Err is in it
	}
	return all, err
}

// Settled reports whether all disks are there that come by themselves.
func (i *Inventory) Settled() bool { return time.Since(i.Began) >= LateDisks }

// Late is an error for a disk that has nothing of this node while one may still appear that has its data: no other
// disk is begun before.
func (i *Inventory) Late(d Disk) error {
	if d.Verdict != Ours && !i.Settled() {
		return fmt.Errorf("waits for disks that come late, for %s after the start, before it begins another one", LateDisks)
	}
	return nil
}

// Refuse returns an error with the reason, the next step, and the list of disks.
func (i *Inventory) Refuse(d Disk, why, next string) error {
	return fmt.Errorf("disk %s %s. %s. The disks here:\n%s", d.Path, why, next, i.Text(nil))
}

// Rejected says of disks, by their paths, why they don't fit.
type Rejected map[string]string

// Text shows the disks to a user who has to choose one, and why disks don't fit.
func (i *Inventory) Text(why Rejected) string {
	disks, err := i.All()
	if err != nil {
		return err.Error()
	}
	if len(disks) == 0 {
		return "there are no disks"
	}
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "DEVICE\tSIZE\tMODEL\tSERIAL\tHOLDS")
	for _, d := range disks {
		if reason := why[d.Path]; reason != "" {
			d.Holds += "; not selected: " + reason
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", d.Path, SizeText(d.Size), cmp.Or(d.Model, "-"), cmp.Or(d.Serial, "-"), d.Holds)
	}
	w.Flush()
	return strings.TrimRight(b.String(), "\n")
}
