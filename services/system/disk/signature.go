package disk

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
)

// signature identifies a kind of content: magic at an offset.
type signature struct {
	name  string
	at    int64
	magic string
	// label is the offset of a name of at most labelLen bytes; labelLen 0: none.
	label    int64
	labelLen int
}

// signatures of all content that users may want to keep. Each magic and offset
// is from the documentation or header file of the on-disk format.
var signatures = []signature{
	{name: "xfs", at: 0, magic: "XFSB", label: 108, labelLen: 12},
	{name: "btrfs", at: 0x10040, magic: "_BHRfS_M", label: 0x1012b, labelLen: 256},
	{name: "f2fs", at: 1024, magic: "\x10\x20\xf5\xf2"},
	{name: "erofs", at: 1024, magic: "\xe2\xe1\xf5\xe0"},
	{name: "squashfs", at: 0, magic: "hsqs"},
	{name: "ntfs", at: 3, magic: "NTFS    "},
	{name: "exfat", at: 3, magic: "EXFAT   "},
	{name: "vfat", at: 82, magic: "FAT32   ", label: 71, labelLen: 11},
	{name: "vfat", at: 54, magic: "FAT16   ", label: 43, labelLen: 11},
	{name: "vfat", at: 54, magic: "FAT12   ", label: 43, labelLen: 11},
	{name: "iso9660", at: 32769, magic: "CD001", label: 32808, labelLen: 32},
	{name: luks, at: 0, magic: "LUKS\xba\xbe"},
	{name: luks, at: 16 << 10, magic: "SKUL\xba\xbe"}, // the second header, if the first one is damaged
	{name: luks, at: 32 << 10, magic: "SKUL\xba\xbe"},
	{name: "LVM2", at: 24, magic: "LVM2 001"}, // the label is in one of the first four sectors
	{name: "LVM2", at: 512 + 24, magic: "LVM2 001"},
	{name: "LVM2", at: 2*512 + 24, magic: "LVM2 001"},
	{name: "LVM2", at: 3*512 + 24, magic: "LVM2 001"},
	{name: "Linux RAID", at: 0, magic: raidMagic},    // metadata 1.1
	{name: "Linux RAID", at: 4096, magic: raidMagic}, // 1.2
	{name: "swap", at: 4086, magic: "SWAPSPACE2", label: 1052, labelLen: 16},
	{name: "bcache", at: 4120, magic: "\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"},
	{name: "Ceph BlueStore", at: 0, magic: "bluestore block device"},
}

// raidEnds is how far before the end the magic of Linux RAID may be: metadata 1.0, 0.90, and 0.90 on a size that is
// no multiple of 64 KiB. Any file system may have the content of files there.
var raidEnds = []int64{8 << 10, 64 << 10, 128 << 10}

const (
	headLen    = 68 << 10 // what has all signatures and labels, without that of ZFS
	raidMagic  = "\xfc\x4e\x2b\xa9"
	extMagicAt = 0x438
	zfsFirst   = 128 << 10 // uberblocks of the first label
	zfsLast    = 256 << 10
	zfsMagic   = 0x00bab10c
)

// Content is that of a device or partition.
type Content struct {
	Kind  string // "" if it is unknown
	Label string
}

func (c Content) String() string {
	if c.Label == "" {
		return c.Kind
	}
	return fmt.Sprintf("%s %q", c.Kind, c.Label)
}

// Identify identifies the content of a device.
func Identify(path string) (Content, error) {
	f, err := os.Open(path)
	if err != nil {
		return Content{}, err
	}
	defer f.Close()
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return Content{}, err
	}
	return identify(f, size)
}

// IsBlank reports whether a device begins with zeros only.
func IsBlank(path string) (bool, error) {
	f, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer f.Close()
	return blank(f, 0, Edge)
}

// Sealed reports whether a device is encrypted.
func Sealed(path string) (bool, error) {
	c, err := Identify(path)
	return c.Kind == luks, err
}

// identify looks for signatures on a device of the given size. A read beyond
// the end of a small device finds nothing; any other read error is an error.
func identify(r io.ReaderAt, size int64) (Content, error) {
	head, err := readAt(r, 0, headLen)
	if err != nil {
		return Content{}, err
	}
	for _, s := range signatures {
		if !bytes.HasPrefix(head[s.at:], []byte(s.magic)) {
			continue
		}
		c := Content{s.name, text(head[s.label:][:s.labelLen])}
		if s.name == "vfat" {
			label, err := fatLabel(r, head)
			c.Label = cmp.Or(label, c.Label)
			return c, err
		}
		return c, nil
	}
	if bytes.HasPrefix(head[extMagicAt:], []byte("\x53\xef")) {
		return identifyExt(head), nil
	}
	end := size &^ 4095 // both RAID formats align down
	for _, at := range raidEnds {
		if magic, err := readAt(r, end-at, len(raidMagic)); err != nil || string(magic) == raidMagic {
			return Content{Kind: "Linux RAID"}, err
		}
	}
	return identifyZFS(r)
}

// fatLabel is the name in the root directory of a FAT: Windows writes it only there (Microsoft Extensible Firmware
// Initiative FAT32 File System Specification 1.03). "": there is none in the first part of the directory.
func fatLabel(r io.ReaderAt, head []byte) (string, error) {
	const entry, attributes, volume, archive, deleted = 32, 11, 0x08, 0x20, 0xe5
	number := func(at int) int64 { return int64(binary.LittleEndian.Uint16(head[at:])) }
	long := func(at int) int64 { return int64(binary.LittleEndian.Uint32(head[at:])) }
	sector := number(11)
	root := sector * (number(14) + int64(head[16])*cmp.Or(number(22), long(36)))
	size := number(17) * entry
	if size == 0 { // FAT32: the directory begins in a cluster, of which the first one has the number 2
		size = sector * int64(head[13])
		root += size * (long(44) - 2)
	}
	directory, err := readAt(r, root, int(min(size, 1<<16)))
	if err != nil {
		return "", err
	}
	for e := range slices.Chunk(directory, entry) {
		if len(e) < entry || e[0] == 0 {
			break
		}
		if e[0] != deleted && e[attributes]&^archive == volume {
			return text(e[:attributes]), nil
		}
	}
	return "", nil
}

// identifyExt distinguishes ext2, 3 and 4 by their features (the kernel's
// Documentation/filesystems/ext4).
func identifyExt(head []byte) Content {
	const (
		compatAt, incompatAt, labelAt, labelLen = 0x45c, 0x460, 0x478, 16
		hasJournal                              = 0x4
		ext4Only                                = 0x2c0 // extents, 64bit, flex_bg
	)
	kind := "ext2"
	switch {
	case binary.LittleEndian.Uint32(head[incompatAt:])&ext4Only != 0:
		kind = "ext4"
	case binary.LittleEndian.Uint32(head[compatAt:])&hasJournal != 0:
		kind = "ext3"
	}
	return Content{kind, text(head[labelAt:][:labelLen])}
}

func identifyZFS(r io.ReaderAt) (Content, error) {
	blocks, err := readAt(r, zfsFirst, zfsLast-zfsFirst)
	if err != nil {
		return Content{}, err
	}
	for at := 0; at < len(blocks); at += 1024 {
		if binary.LittleEndian.Uint64(blocks[at:]) == zfsMagic || binary.BigEndian.Uint64(blocks[at:]) == zfsMagic {
			return Content{Kind: "ZFS"}, nil
		}
	}
	return Content{}, nil
}

// readAt returns n bytes; bytes beyond the end are zeros.
func readAt(r io.ReaderAt, at int64, n int) ([]byte, error) {
	buf := make([]byte, n)
	if at < 0 {
		return buf, nil
	}
	if _, err := r.ReadAt(buf, at); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	return buf, nil
}

// text is a label without its padding; "" if it isn't printable.
func text(b []byte) string {
	b, _, _ = bytes.Cut(b, []byte{0})
	s := strings.TrimSpace(string(b))
	if strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r > '~' }) || s == "NO NAME" {
		return ""
	}
	return s
}

// blank reports whether n bytes from at on are all zero.
func blank(r io.ReaderAt, at int64, n int) (bool, error) {
	buf, err := readAt(r, at, n)
	return err == nil && len(bytes.TrimLeft(buf, "\x00")) == 0, err
}
