package boot

import "slices"

// Volume is one row of the table of the system disk: a partition, its content,
// its mount point, and what a reset does with it.
type Volume struct {
	Label string // the partition's name in the GPT
	// Type is the GPT partition type. Partitions with Garboard's own content have
	// types of their own, so that partitions of another system with the same
	// labels are never used by mistake.
	Type string
	// Size in bytes, on disks from roomyDisk on; 0: the rest of the disk. Small is
	// the size on smaller disks.
	Size, Small int64
	// Attributes are those of the GPT entry.
	Attributes uint64

	// FileSystem is the file system that the node makes, by its name in mount(2). Dir and Flags
	// are how it is mounted. "": the node makes none, and other programs write the partition.
	FileSystem string
	Dir        string
	Flags      uintptr

	// Wipe is the volume's label for a reset, and Holds describes the data that is lost then. A
	// volume without Holds is wiped together with the one that it names. "": no reset changes it.
	Wipe, Holds string
	// Keys is true for volumes with the node's keys: a reset overwrites all of
	// them, even if that takes long.
	Keys bool
}

// Layout is the number of this table. A release that changes the partitions increments
// it, and still uses disks with earlier layouts. It must not change disks with a
// higher number, so every layout has one partition of type TypeMeta with its number.
//
// Disks without a number are of a release that wrote none: they have the partitions of
// layout 1, which has two partitions for systems instead of BIOS (former).
const Layout = 2

// layoutShift: bits 48 to 63 of the attributes are for the owner of the partition's type
// (UEFI 2.10, table 5.8).
const layoutShift = 48

// LayoutOf is the number in the attributes of META's GPT entry; 0 if there is none.
func LayoutOf(attributes uint64) int { return int(attributes >> layoutShift) }

// Flags of mount(2) in Linux, for programs on other systems, too.
const (
	noSUID  = 0x2
	noDev   = 0x4
	noExec  = 0x8
	noATime = 0x400
)

const (
	mib = 1 << 20
	gib = 1 << 30

	// MinDisk is the smallest disk for the system. The rest for EPHEMERAL has room
	// for the unpacked images of a control plane (1 GiB) twice, because both
	// versions are there while they are replaced.
	MinDisk = 3 * gib
	// roomyDisk is the size from which 2 GiB for the system are acceptable.
	roomyDisk = 8 * gib
)

// Partition types. EFI's is that of the UEFI specification (2.10, table 5.7), and BIOS's
// that of the GRUB manual ("BIOS installation"); the others are random UUIDs for Garboard.
const (
	TypeEFI       = "C12A7328-F81F-11D2-BA4B-00A0C93EC93B"
	TypeBIOS      = "21686148-6449-6E6F-744E-656564454649"
	TypeMeta      = "9C408D2B-DDCA-453D-969F-2642A4704172"
	TypeState     = "8B1CCFBC-2A94-45BA-9A62-FAD8EAA825B3"
	TypeEphemeral = "A617CAFD-D217-41F8-9118-C2B9DE583C97"
	// TypeData is that of the partitions of machine.disks. Their labels are the last elements of their mount points.
	TypeData = "5D9A1E37-6B0C-4F7E-9C52-3E1F8A64B7D0"
	// TypeMedium is that of LabelMedium.
	TypeMedium = "3F6B2C9A-07E4-4D51-8B6E-C1A95D20F473"
)

// Volumes are the table, in the order of the partitions on the disk. EFI and BIOS
// exist from the start, also on a machine that boots from elsewhere, so that
// installations and upgrades never move anything. Boot loaders find EFI as the first
// partition.
//
// The sizes: EFI has room for the systems in both slots, of 70 MiB each, and is the
// minimum of FAT32 on disks with 4 KiB sectors (65525 clusters, 256 MiB). mkfs.xfs needs
// at least 300 MiB, which is more than STATE will ever contain; the header of its encryption takes 16 MiB.
//
// The flags: no program is ever run from STATE. Containers run from EPHEMERAL, and
// set-user-id programs work in their volumes as on any other node. Neither has device nodes.
var Volumes = []Volume{
	{Label: LabelEFI, Type: TypeEFI, Size: 512 * mib, Small: 272 * mib},
	{Label: LabelBIOS, Type: TypeBIOS, Size: 1 * mib, Small: 1 * mib},
	{Label: LabelMeta, Type: TypeMeta, Size: 1 * mib, Small: 1 * mib, Attributes: Layout << layoutShift,
		Wipe: LabelState, Keys: true},
	{Label: LabelState, Type: TypeState, Size: 512 * mib, Small: 320 * mib,
		FileSystem: "xfs", Dir: StateDir, Flags: noATime | noDev | noSUID | noExec,
		Wipe: LabelState, Holds: "configuration and identity", Keys: true},
	{Label: LabelEphemeral, Type: TypeEphemeral,
		FileSystem: "xfs", Dir: EphemeralDir, Flags: noATime | noDev,
		Wipe: LabelEphemeral, Holds: "images, pods' data and the data of etcd"},
}

// LabelMedium is the label of a partition that only disks from an image with a configuration or with container images
// have: what a medium has beside a system, in a file system of ISO 9660. Nothing writes to it, and no reset wipes it.
const LabelMedium = "MEDIUM"

// former are the partitions of layout 1 that later ones don't have. The first one has room
// for what BIOS is for.
var former = []Volume{
	{Label: "BOOT-A", Type: "104570E5-C21B-4715-828D-698D47D3D15B"},
	{Label: "BOOT-B", Type: "FC30169E-53FE-4BF8-8144-7F73C561361A"},
}

// Partitions are those of a disk with this layout or an earlier one, in no order.
func Partitions(layout int) []Volume {
	if layout >= 2 {
		return Volumes
	}
	all := slices.DeleteFunc(slices.Clone(Volumes), func(v Volume) bool { return v.Label == LabelBIOS })
	return append(all, former...)
}

// BIOSLabel is the label of the partition for the BIOS's boot loader on a disk with this layout.
func BIOSLabel(layout int) string {
	if layout >= 2 {
		return LabelBIOS
	}
	return former[0].Label
}

// Usable is where the partitions of a disk of that many bytes end: they begin and end at whole MiB. The first and the
// last MiB are for the partition table and its copy.
func Usable(disk int64) int64 { return (disk - mib) &^ (mib - 1) }

// Place is where a volume is on a disk, in bytes.
type Place struct {
	Volume
	Start, Size int64
}

// Places are those of the volumes on a disk of that many bytes.
func Places(disk int64) (places []Place) {
	at := int64(mib)
	for _, v := range Volumes {
		size := v.Size
		if disk < roomyDisk {
			size = v.Small
		}
		if size == 0 {
			size = Usable(disk) - at
		}
		places = append(places, Place{v, at, size})
		at += size
	}
	return places
}

// WipeLabels are the labels that a reset accepts.
var WipeLabels = func() (labels []string) {
	for _, v := range Volumes {
		if v.Holds != "" {
			labels = append(labels, v.Wipe)
		}
	}
	return labels
}()

// What a reset may be asked to do for the data that it wipes. The key slots of what is encrypted are destroyed first in
// each of them.
const (
	WipeKeys      = "keys"      // no more than that; what isn't encrypted is wiped as without a mode
	WipeDiscard   = "discard"   // the disk forgets the data, too, as SSDs can
	WipeOverwrite = "overwrite" // zeros are written over all of it
)

// WipeModes are those that a reset accepts.
var WipeModes = []string{WipeKeys, WipeDiscard, WipeOverwrite}

// Wiped are the volumes that a reset with these labels wipes.
func Wiped(labels []string) (volumes []Volume) {
	for _, v := range Volumes {
		if slices.Contains(labels, v.Wipe) {
			volumes = append(volumes, v)
		}
	}
	return volumes
}
