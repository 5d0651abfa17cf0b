package boot

import (
	"slices"
	"syscall"
)

// Volume is one row of the table of the system disk: a partition, what is on it, where that
// is mounted, and what a reset does with it.
type Volume struct {
	Label string // the partition's name in the GPT
	// Type is the GPT partition type: our own where the content is our own, so
	// that the partitions of another system which happen to have the same labels
	// are never taken for ours.
	Type string
	// Size in bytes, on disks from roomyDisk on; 0: the rest of the disk. Small is the
	// size on smaller disks.
	Size, Small int64
	// Attributes are those of the GPT entry.
	Attributes uint64

	// FileSystem is what the node makes on it, as mount(2) calls it, and Dir and Flags are
	// how it is mounted. "": others write the bytes of the partition.
	FileSystem string
	Dir        string
	Flags      uintptr

	// Wipe is what a reset calls it, and Holds what is lost then. A volume without Holds
	// goes with the one that it names. "": no reset changes it.
	Wipe, Holds string
	// Keys is true for volumes with the node's keys: a reset overwrites all of them, however
	// long that takes.
	Keys bool
}

// Layout is the number of this table. A release that changes the partitions raises it, and
// still takes the disks of the layouts before. It must leave alone those with a higher
// number, so every layout has one partition of type TypeMeta with its number.
//
// Disks without a number are of a release that wrote none: they have the partitions of
// layout 1.
const Layout = 1

// layoutShift: bits 48 to 63 of the attributes are for the owner of the partition's type
// (UEFI 2.10, table 5.8).
const layoutShift = 48

// LayoutOf is the number in the attributes of META's GPT entry; 0: it has none.
func LayoutOf(attributes uint64) int { return int(attributes >> layoutShift) }

const (
	mib = 1 << 20
	gib = 1 << 30

	// MinDisk is the smallest disk that takes the system: what is left for
	// EPHEMERAL holds the images of a control plane, unpacked (1 GiB), and as
	// much again while they are replaced.
	MinDisk = 3 * gib
	// roomyDisk is where two GiB for the system are no loss.
	roomyDisk = 8 * gib
)

// Partition types. EFI's is the UEFI specification's (2.10, table 5.7); the
// others were drawn at random for Garboard.
const (
	TypeEFI       = "C12A7328-F81F-11D2-BA4B-00A0C93EC93B"
	TypeBootA     = "104570E5-C21B-4715-828D-698D47D3D15B"
	TypeBootB     = "FC30169E-53FE-4BF8-8144-7F73C561361A"
	TypeMeta      = "9C408D2B-DDCA-453D-969F-2642A4704172"
	TypeState     = "8B1CCFBC-2A94-45BA-9A62-FAD8EAA825B3"
	TypeEphemeral = "A617CAFD-D217-41F8-9118-C2B9DE583C97"
)

// Volumes are the table, in the order of the partitions on the disk. EFI and both slots are
// there from the start, also on a machine that boots from elsewhere, so that installing and
// upgrading never moves anything.
//
// The sizes: EFI takes two kernels of the day and is no smaller than FAT32 can
// be on disks with 4 KiB sectors (65525 clusters, 256 MiB). A slot takes a boot
// payload (60 MiB is its budget) several times over. mkfs.xfs makes nothing
// below 300 MiB, which is more than STATE will ever hold.
//
// The flags: nothing on STATE is ever run. Containers run from EPHEMERAL, and set-user-id
// programs work in their volumes as they do on any other node. Device nodes are on neither.
var Volumes = []Volume{
	{Label: LabelEFI, Type: TypeEFI, Size: 512 * mib, Small: 272 * mib},
	{Label: LabelBootA, Type: TypeBootA, Size: 512 * mib, Small: 256 * mib},
	{Label: LabelBootB, Type: TypeBootB, Size: 512 * mib, Small: 256 * mib},
	{Label: LabelMeta, Type: TypeMeta, Size: 1 * mib, Small: 1 * mib, Attributes: Layout << layoutShift,
		Wipe: LabelState, Keys: true},
	{Label: LabelState, Type: TypeState, Size: 512 * mib, Small: 320 * mib,
		FileSystem: "xfs", Dir: StateDir, Flags: syscall.MS_NOATIME | syscall.MS_NODEV | syscall.MS_NOSUID | syscall.MS_NOEXEC,
		Wipe: LabelState, Holds: "configuration and identity", Keys: true},
	{Label: LabelEphemeral, Type: TypeEphemeral,
		FileSystem: "xfs", Dir: EphemeralDir, Flags: syscall.MS_NOATIME | syscall.MS_NODEV,
		Wipe: LabelEphemeral, Holds: "images, pods' data and the data of etcd"},
}

// SizeOn is the size on a disk with that many bytes; 0: the rest of it.
func (v Volume) SizeOn(disk int64) int64 {
	if disk < roomyDisk {
		return v.Small
	}
	return v.Size
}

// WipeLabels are what a reset can be asked to wipe.
var WipeLabels = func() (labels []string) {
	for _, v := range Volumes {
		if v.Holds != "" {
			labels = append(labels, v.Wipe)
		}
	}
	return labels
}()

// Wiped are the volumes that a reset with these labels wipes.
func Wiped(labels []string) (volumes []Volume) {
	for _, v := range Volumes {
		if slices.Contains(labels, v.Wipe) {
			volumes = append(volumes, v)
		}
	}
	return volumes
}
