package disk

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/garboard-os/garboard/boot"
)

// Each signature is found at its offset, with its label, and nowhere else.
func TestIdentify(t *testing.T) {
	const size = 2 << 20
	for _, s := range signatures {
		disk := make([]byte, size)
		copy(disk[s.at:], s.magic)
		want := Content{Kind: s.name}
		if s.labelLen > 0 {
			copy(disk[s.label:], "mine")
			want.Label = "mine"
		}
		if got, err := identify(bytes.NewReader(disk), size); got != want || err != nil {
			t.Errorf("%s at %d: got %v, %v", s.name, s.at, got, err)
		}
	}
	for name, put := range map[string]func(disk []byte){
		"ext2":       func(d []byte) { copy(d[extMagicAt:], "\x53\xef") },
		"ext3":       func(d []byte) { copy(d[extMagicAt:], "\x53\xef"); d[0x45c] = 4 },
		"ext4":       func(d []byte) { copy(d[extMagicAt:], "\x53\xef"); d[0x45c] = 4; d[0x460] = 0x40 },
		"ZFS":        func(d []byte) { copy(d[zfsFirst+3*1024:], "\x0c\xb1\xba\x00") },
		"Linux RAID": func(d []byte) { copy(d[size-raidEnds[1]:], raidMagic) },
		// in a file of it
		"swap": func(d []byte) { copy(d[4086:], "SWAPSPACE2"); copy(d[size-raidEnds[0]:], raidMagic) },
		"":     func(d []byte) { copy(d[99999:], "nothing that anybody knows") },
	} {
		disk := make([]byte, size)
		put(disk)
		if got, err := identify(bytes.NewReader(disk), size); got.Kind != name || err != nil {
			t.Errorf("%s: got %v, %v", name, got, err)
		}
	}
	if got, err := identify(bytes.NewReader([]byte("tiny")), 4); got.Kind != "" || err != nil {
		t.Errorf("a tiny device: %v, %v", got, err)
	}
}

// Windows writes the name of a FAT to its root directory only.
func TestNameInTheRootDirectory(t *testing.T) {
	for magic, at := range map[string]int{"FAT32   ": 82, "FAT16   ": 54} {
		disk := make([]byte, 1<<20)
		copy(disk[at:], magic)
		copy(disk[map[string]int{"FAT32   ": 71, "FAT16   ": 43}[magic]:], "NO NAME    ")
		binary.LittleEndian.PutUint16(disk[11:], 512)
		disk[13], disk[14], disk[16] = 4, 2, 2 // sectors of a cluster, reserved ones, tables
		root := 512 * (2 + 2*3)
		if magic == "FAT16   " {
			disk[17], disk[22] = 64, 3
		} else {
			disk[36], disk[44] = 3, 5 // the directory is in the fourth cluster
			root += 3 * 4 * 512
		}
		for i, entry := range []string{"\xe5LD        \x08", "Ametal-iso.\x0f", "CONFIG  YML\x20", "METAL-ISO  \x28"} {
			copy(disk[root+32*i:], entry)
		}
		if got, err := identify(bytes.NewReader(disk), int64(len(disk))); err != nil || got != (Content{"vfat", "METAL-ISO"}) {
			t.Errorf("%s: %v, %v", magic, got, err)
		}
		copy(disk[root:], make([]byte, 128))
		if got, err := identify(bytes.NewReader(disk), int64(len(disk))); err != nil || got != (Content{"vfat", ""}) {
			t.Errorf("%s without a name: %v, %v", magic, got, err)
		}
	}
}

// The layout fits on disks of every accepted size, in whole MiB. EPHEMERAL is
// last and has most of the disk.
func TestLayoutFits(t *testing.T) {
	for _, gibs := range []float64{3, 3.5, 7.9, 8, 20, 2000} {
		for _, sector := range []int{512, 4096} {
			size := int64(gibs*(1<<30)) &^ 4095
			table := Disk{Identity: Identity{Size: size}, Sector: sector}.NewTable(boot.Places(size))
			end := int64(1 << 20)
			for _, p := range table.Partitions {
				start := int64(p.Start) * int64(sector)
				if start != end {
					t.Errorf("%v GiB: %s starts at %d, want %d", gibs, p.Name, start, end)
				}
				end = int64(p.End+1) * int64(sector)
			}
			last := table.Partitions[len(table.Partitions)-1]
			if room := size - end; last.Name != boot.LabelEphemeral || room < 1<<20 || room > 3<<20 {
				t.Errorf("%v GiB: %s ends %d before the end", gibs, last.Name, room)
			}
			if share := end - int64(last.Start)*int64(sector); share < size/2 {
				t.Errorf("%v GiB: EPHEMERAL has only %s", gibs, SizeText(share))
			}
		}
	}
}

func TestSizeText(t *testing.T) {
	for n, want := range map[int64]string{0: "0 B", 1536: "1.5 KiB", 16 << 30: "16 GiB", 3 << 39: "1.5 TiB"} {
		if got := SizeText(n); got != want {
			t.Errorf("%d is %q, want %q", n, got, want)
		}
	}
}
