package boot

// Partition is one row of the layout of the system disk.
type Partition struct {
	Label string
	// Type is the GPT partition type: our own where the content is our own, so
	// that the partitions of another system which happen to have the same labels
	// are never taken for ours.
	Type string
	Size int64 // bytes; 0: the rest of the disk
}

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

// Layout is the partitions of a system disk of this size, in their order on the
// disk. EFI and both slots are there from the start, also on a machine that
// boots from elsewhere, so that installing and upgrading never moves anything.
//
// The sizes: EFI takes two kernels of the day and is no smaller than FAT32 can
// be on disks with 4 KiB sectors (65525 clusters, 256 MiB). A slot takes a boot
// payload (60 MiB is its budget) several times over. mkfs.xfs makes nothing
// below 300 MiB, which is more than STATE will ever hold.
func Layout(disk int64) []Partition {
	efi, slot, state := int64(512*mib), int64(512*mib), int64(512*mib)
	if disk < roomyDisk {
		efi, slot, state = 272*mib, 256*mib, 320*mib
	}
	return []Partition{
		{LabelEFI, TypeEFI, efi},
		{LabelBootA, TypeBootA, slot},
		{LabelBootB, TypeBootB, slot},
		{LabelMeta, TypeMeta, 1 * mib},
		{LabelState, TypeState, state},
		{LabelEphemeral, TypeEphemeral, 0},
	}
}
