package disk

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"os"
	"path/filepath"
	"testing"
)

// image is a disk whose content is at some places.
func image(t *testing.T, content map[int64][]byte) (*os.File, Disk) {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "disk"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	dev := Disk{Identity: Identity{Path: f.Name(), Size: 64 << 20}, Sector: 512}
	if err := f.Truncate(dev.Size); err != nil {
		t.Fatal(err)
	}
	for at, data := range content {
		if _, err := f.WriteAt(data, at); err != nil {
			t.Fatal(err)
		}
	}
	return f, dev
}

// header is one of a GPT with a valid checksum.
func header(entries, size uint32) []byte {
	h := make([]byte, 92)
	copy(h, "EFI PART")
	for at, value := range map[int]uint32{8: 0x10000, 12: 92, 24: 1, 32: 131071, 40: 34, 48: 131038, 72: 2, 80: entries, 84: size} {
		binary.LittleEndian.PutUint32(h[at:], value)
	}
	binary.LittleEndian.PutUint32(h[16:], crc32.ChecksumIEEE(h))
	return h
}

// A partition table can name more entries than there is memory for.
func TestHugePartitionTable(t *testing.T) {
	t.Parallel()
	for _, size := range [][2]uint32{{0xffff_ffff, 0x8000}, {1 << 29, 128}, {128, 1 << 30}} {
		mbr := make([]byte, 512)
		mbr[450], mbr[510], mbr[511] = 0xee, 0x55, 0xaa
		for _, at := range []int64{512, 64<<20 - 512} {
			_, dev := image(t, map[int64][]byte{0: mbr, at: header(size[0], size[1])})
			if found, err := dev.Inspect(); err != nil || found.Verdict != Foreign {
				t.Errorf("%v at %d: %v, %v", size, at, found, err)
			}
		}
	}
}

// Somebody else may have used a disk since its layout was begun.
func TestUnfinishedLayoutOfAnOldDisk(t *testing.T) {
	t.Parallel()
	partitioned := bytes.Repeat([]byte{0}, 512)
	partitioned[450], partitioned[510], partitioned[511] = 0x83, 0x55, 0xaa
	ext4 := []byte{0x53, 0xef}
	for name, c := range map[string]struct {
		content map[int64][]byte
		want    Verdict
	}{
		"nothing else":          {nil, Unfinished},
		"half a table":          {map[int64][]byte{512: header(128, 128)}, Unfinished},
		"a DOS partition table": {map[int64][]byte{0: partitioned}, Foreign},
		"a file system":         {map[int64][]byte{1080: ext4}, Foreign},
	} {
		f, dev := image(t, c.content)
		if err := WriteJournal(f, Journal{Step: StepLayout}); err != nil {
			t.Fatal(err)
		}
		if found, err := dev.Inspect(); err != nil || found.Verdict != c.want {
			t.Errorf("%s: %v (%d), %v", name, found, found.Verdict, err)
		}
	}
}
