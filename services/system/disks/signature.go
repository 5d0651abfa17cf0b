package disks

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

// signature identifies a kind of content: magic at an offset, which counts from
// the end of the device if it is negative.
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
	{name: "LUKS", at: 0, magic: "LUKS\xba\xbe"},
	{name: "LVM2", at: 24, magic: "LVM2 001"}, // the label is in one of the first four sectors
	{name: "LVM2", at: 512 + 24, magic: "LVM2 001"},
	{name: "LVM2", at: 2*512 + 24, magic: "LVM2 001"},
	{name: "LVM2", at: 3*512 + 24, magic: "LVM2 001"},
	{name: "Linux RAID", at: 0, magic: "\xfc\x4e\x2b\xa9"},    // metadata 1.1
	{name: "Linux RAID", at: 4096, magic: "\xfc\x4e\x2b\xa9"}, // 1.2
	{name: "swap", at: 4086, magic: "SWAPSPACE2", label: 1052, labelLen: 16},
	{name: "bcache", at: 4120, magic: "\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"},
	{name: "Ceph BlueStore", at: 0, magic: "bluestore block device"},
}

// atTheEnd are those in whose place a file system has the content of files.
var atTheEnd = []signature{
	{name: "Linux RAID", at: -8 << 10, magic: "\xfc\x4e\x2b\xa9"},   // 1.0
	{name: "Linux RAID", at: -64 << 10, magic: "\xfc\x4e\x2b\xa9"},  // 0.90
	{name: "Linux RAID", at: -128 << 10, magic: "\xfc\x4e\x2b\xa9"}, // 0.90, size no multiple of 64 KiB
}

const (
	extMagicAt = 0x438
	zfsFirst   = 128 << 10 // uberblocks of the first label
	zfsLast    = 256 << 10
	zfsMagic   = 0x00bab10c
)

// content is the content of a device or partition.
type content struct {
	kind  string // "" if it is unknown
	label string
}

func (c content) String() string {
	if c.label == "" {
		return c.kind
	}
	return fmt.Sprintf("%s %q", c.kind, c.label)
}

// identify looks for signatures on a device of the given size. A read beyond
// the end of a small device finds nothing; any other read error is an error.
func identify(r io.ReaderAt, size int64) (content, error) {
	c, err := anyOf(r, size, signatures)
	if err == nil && c.kind == "" {
		c, err = identifyExt(r)
	}
	if err == nil && c.kind == "" {
		c, err = anyOf(r, size, atTheEnd)
	}
	if err != nil || c.kind != "" {
		return c, err
	}
	return identifyZFS(r)
}

func anyOf(r io.ReaderAt, size int64, all []signature) (content, error) {
	for _, s := range all {
		at := s.at
		if at < 0 {
			at = (size &^ 4095) + at // both RAID formats align down
		}
		magic, err := read(r, at, len(s.magic))
		if err != nil {
			return content{}, err
		}
		if string(magic) != s.magic {
			continue
		}
		c := content{kind: s.name}
		if s.labelLen > 0 {
			label, err := read(r, s.label, s.labelLen)
			if err != nil {
				return content{}, err
			}
			c.label = text(label)
		}
		if s.name == "vfat" {
			label, err := fatLabel(r)
			if err != nil {
				return content{}, err
			}
			c.label = cmp.Or(label, c.label)
		}
		return c, nil
	}
	return content{}, nil
}

// fatLabel is the name in the root directory of a FAT: Windows writes it only there (Microsoft Extensible Firmware Initiative FAT32 File System
// Specification 1.03). "": there is none in the first part of the directory.
func fatLabel(r io.ReaderAt) (string, error) {
	const entry, attributes, volume, archive, deleted = 32, 11, 0x08, 0x20, 0xe5
	head, err := read(r, 0, 64)
	if err != nil {
		return "", err
	}
	number := func(at int) int64 { return int64(binary.LittleEndian.Uint16(head[at:])) }
	long := func(at int) int64 { return int64(binary.LittleEndian.Uint32(head[at:])) }
	sector := number(11)
	root := sector * (number(14) + int64(head[16])*cmp.Or(number(22), long(36)))
	size := number(17) * entry
	if size == 0 { // FAT32: the directory begins in a cluster, of which the first one has the number 2
		size = sector * int64(head[13])
		root += size * (long(44) - 2)
	}
	directory, err := read(r, root, int(min(size, 1<<16)))
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
func identifyExt(r io.ReaderAt) (content, error) {
	const (
		compatAt, incompatAt, labelAt, labelLen = 0x45c, 0x460, 0x478, 16
		hasJournal                              = 0x4
		ext4Only                                = 0x2c0 // extents, 64bit, flex_bg
	)
	magic, err := read(r, extMagicAt, 2)
	if err != nil || string(magic) != "\x53\xef" {
		return content{}, err
	}
	head, err := read(r, compatAt, 8)
	if err != nil {
		return content{}, err
	}
	label, err := read(r, labelAt, labelLen)
	if err != nil {
		return content{}, err
	}
	c := content{kind: "ext2", label: text(label)}
	switch {
	case binary.LittleEndian.Uint32(head[incompatAt-compatAt:])&ext4Only != 0:
		c.kind = "ext4"
	case binary.LittleEndian.Uint32(head)&hasJournal != 0:
		c.kind = "ext3"
	}
	return c, nil
}

func identifyZFS(r io.ReaderAt) (content, error) {
	blocks, err := read(r, zfsFirst, zfsLast-zfsFirst)
	if err != nil {
		return content{}, err
	}
	for at := 0; at < len(blocks); at += 1024 {
		if binary.LittleEndian.Uint64(blocks[at:]) == zfsMagic || binary.BigEndian.Uint64(blocks[at:]) == zfsMagic {
			return content{kind: "ZFS"}, nil
		}
	}
	return content{}, nil
}

// read returns n bytes; bytes beyond the end are zeros.
func read(r io.ReaderAt, at int64, n int) ([]byte, error) {
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
	buf, err := read(r, at, n)
	return err == nil && len(bytes.TrimLeft(buf, "\x00")) == 0, err
}
