package disks

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// image is a disk whose content is at some places.
func image(t *testing.T, content map[int64][]byte) (*os.File, device) {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "disk"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	dev := device{Disk: Disk{Path: f.Name(), Size: 64 << 20}, Sector: 512}
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
			f, dev := image(t, map[int64][]byte{0: mbr, at: header(size[0], size[1])})
			if found, err := examine(f, dev); err != nil || found.verdict != foreign {
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
		want    verdict
	}{
		"nothing else":          {nil, unfinished},
		"half a table":          {map[int64][]byte{512: header(128, 128)}, unfinished},
		"a DOS partition table": {map[int64][]byte{0: partitioned}, foreign},
		"a file system":         {map[int64][]byte{1080: ext4}, foreign},
	} {
		f, dev := image(t, c.content)
		if err := writeJournal(f, journal{step: stepLayout}); err != nil {
			t.Fatal(err)
		}
		if found, err := examine(f, dev); err != nil || found.verdict != c.want {
			t.Errorf("%s: %v (%d), %v", name, found, found.verdict, err)
		}
	}
}

// What isn't a file of the volume is no file, and isn't waited for.
func TestFilesOfAVolume(t *testing.T) {
	t.Parallel()
	dir, outside := t.TempDir(), filepath.Join(t.TempDir(), "secret")
	for _, path := range []string{outside, filepath.Join(dir, "config.yaml")} {
		if err := os.WriteFile(path, []byte("text"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mkfifo(filepath.Join(dir, "pipe"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, to := range map[string]string{"out": outside, "in": "config.yaml"} {
		if err := os.Symlink(to, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	err := withFiles(dir, func(volume fs.FS) error {
		for name, want := range map[string]string{"config.yaml": "", "in": "", "pipe": "it is no file", "out": "escapes", "none": "no such file"} {
			text, err := fs.ReadFile(volume, name)
			if want == "" && (err != nil || string(text) != "text") || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
				t.Errorf("%s: %q, %v", name, text, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}
