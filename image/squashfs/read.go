package squashfs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"sync"

	"github.com/klauspost/compress/zstd"
)

// Kinds of inodes that other programs write, besides those of this package: a file with several names, or holes.
const (
	kindExtendedFile = 9

	maxTarget = 4096 // bytes of a link (path_resolution(7))
	maxDepth  = 64   // of directories
	maxFiles  = 1 << 20
)

// decoder is for one block at a time, from several goroutines.
var decoder = sync.OnceValues(func() (*zstd.Decoder, error) {
	return zstd.NewReader(nil, zstd.WithDecoderMaxMemory(blockBytes))
})

// superblock begins an image.
type superblock struct {
	Magic, Inodes, Modified, BlockBytes, Fragments                          uint32
	Compressor, BlockLog, Flags, Identities, Major, Minor                   uint16
	Root, Used, IdentityTable, XattrTable, InodeTable, Listings, FragmentAt uint64
	ExportTable                                                             uint64
}

// packed is a file's content in an image.
type packed struct {
	image  *image
	start  uint64
	sizes  []uint32 // of whole blocks
	end    *end     // nil: the file is a number of whole blocks
	offset uint32   // in it
	size   int64
}

// end is a block with the ends of files.
type end struct {
	start uint64
	size  uint32
	users int // how many files
}

// image is one that is read.
type image struct {
	at    *io.SectionReader
	super superblock
	ends  []*end
	// mu guards blocks, which have the tables that were read, by place.
	mu     sync.Mutex
	blocks map[uint64]table
}

type table struct {
	content []byte
	next    uint64
}

// Read lists an image of the kind that this package writes: version 4.0, zstd, blocks of 1 MiB. The files are read when
// they are opened. When a tree with them is written, what is compressed stays as it is.
func Read(at io.ReaderAt, size int64) (Tree, error) {
	tree, err := read(io.NewSectionReader(at, 0, size))
	if err != nil {
		return nil, fmt.Errorf("read squashfs: %w", err)
	}
	return tree, nil
}

func read(at *io.SectionReader) (Tree, error) {
	m := &image{at: at, blocks: map[uint64]table{}}
	s := &m.super
	if err := binary.Read(io.NewSectionReader(at, 0, superblockSize), binary.LittleEndian, s); err != nil {
		return nil, err
	}
	if s.Magic != magic || s.Major != 4 || s.Compressor != compressorZstd || s.BlockBytes != blockBytes {
		return nil, fmt.Errorf("it isn't of version 4.0, with zstd and blocks of %d bytes", blockBytes)
	}
	if err := m.readEnds(); err != nil {
		return nil, fmt.Errorf("fragments: %w", err)
	}
	tree := Tree{}
	return tree, m.directory(tree, root, s.Root, 0)
}

// readEnds reads the table of fragments.
func (m *image) readEnds() error {
	const entry, perBlock = 16, metadataSize / 16
	for n := uint32(0); n < m.super.Fragments; n += perBlock {
		var start uint64
		if err := binary.Read(io.NewSectionReader(m.at, int64(m.super.FragmentAt)+int64(n/perBlock)*8, 8), binary.LittleEndian, &start); err != nil {
			return err
		}
		in := &cursor{image: m, next: start}
		for range min(perBlock, m.super.Fragments-n) {
			var e struct {
				Start  uint64
				Size   uint32
				Unused uint32
			}
			if err := binary.Read(in, binary.LittleEndian, &e); err != nil {
				return err
			}
			m.ends = append(m.ends, &end{start: e.Start, size: e.Size})
		}
	}
	return nil
}

// cursor reads a table from some place on.
type cursor struct {
	image *image
	next  uint64
	left  []byte
}

func (m *image) seek(table uint64, start uint32, offset uint16) (*cursor, error) {
	c := &cursor{image: m, next: table + uint64(start)}
	_, err := io.CopyN(io.Discard, c, int64(offset))
	return c, err
}

func (c *cursor) Read(to []byte) (int, error) {
	if len(c.left) == 0 {
		t, err := c.image.table(c.next)
		if err != nil {
			return 0, err
		}
		c.left, c.next = t.content, t.next
	}
	n := copy(to, c.left)
	c.left = c.left[n:]
	return n, nil
}

// table reads a block of a table.
func (m *image) table(at uint64) (table, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if t, ok := m.blocks[at]; ok {
		return t, nil
	}
	var size uint16
	if err := binary.Read(io.NewSectionReader(m.at, int64(at), 2), binary.LittleEndian, &size); err != nil {
		return table{}, err
	}
	content, err := m.block(at+2, uint32(size&^storedMetadata), size&storedMetadata != 0, metadataSize)
	if err == nil && len(content) == 0 {
		err = errors.New("a table has an empty block")
	}
	t := table{content, at + 2 + uint64(size&^storedMetadata)}
	m.blocks[at] = t
	return t, err
}

// block reads one, of at most limit bytes.
func (m *image) block(at uint64, size uint32, stored bool, limit int) ([]byte, error) {
	if int(size) > limit {
		return nil, fmt.Errorf("a block has %d bytes", size)
	}
	content := make([]byte, size)
	if _, err := m.at.ReadAt(content, int64(at)); err != nil || stored {
		return content, err
	}
	d, err := decoder()
	if err != nil {
		return nil, err
	}
	plain, err := d.DecodeAll(content, nil)
	if err == nil && len(plain) > limit {
		err = fmt.Errorf("a block has %d bytes", len(plain))
	}
	return plain, err
}

// directory adds what is below one.
func (m *image) directory(tree Tree, name string, at uint64, depth int) error {
	in, err := m.seek(m.super.InodeTable, uint32(at>>16), uint16(at))
	if err != nil {
		return err
	}
	f, listing, err := m.inode(in)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if _, twice := tree[name]; twice { // the limit below counts each path once
		return fmt.Errorf("%s is there twice", name)
	}
	if name != root {
		tree[name] = f
	}
	if depth > maxDepth || len(tree) > maxFiles {
		return fmt.Errorf("%s: it is in more than %d directories, or there are more than %d files", name, maxDepth, maxFiles)
	}
	if !f.Mode.IsDir() {
		return nil
	}
	for listing.size > emptySize {
		if err := m.list(&listing, func(child string, at uint64) error {
			if !fs.ValidPath(child) || path.Base(child) != child || child == root {
				return fmt.Errorf("%s has an entry %q", name, child)
			}
			return m.directory(tree, path.Join(name, child), at, depth+1)
		}); err != nil {
			return err
		}
	}
	return nil
}

// listing is what is left of the entries of a directory.
type listing struct {
	in   *cursor
	size int64
}

// list reads the entries of one header.
func (m *image) list(l *listing, entry func(name string, at uint64) error) error {
	var header struct{ Count, Start, Number uint32 }
	if err := binary.Read(l.in, binary.LittleEndian, &header); err != nil {
		return err
	}
	l.size -= int64(binary.Size(header))
	for range min(header.Count, headerEntries-1) + 1 {
		var e struct {
			Offset     uint16
			Difference int16
			Kind, Size uint16
		}
		if err := binary.Read(l.in, binary.LittleEndian, &e); err != nil {
			return err
		}
		name := make([]byte, min(int(e.Size)+1, maxName))
		if _, err := io.ReadFull(l.in, name); err != nil {
			return err
		}
		l.size -= int64(binary.Size(e) + len(name))
		if err := entry(string(name), uint64(header.Start)<<16|uint64(e.Offset)); err != nil {
			return err
		}
	}
	return nil
}

// inode reads one and, of a directory, where its entries are.
func (m *image) inode(in *cursor) (f File, l listing, err error) {
	fields := func(to any) {
		if err == nil {
			err = binary.Read(in, binary.LittleEndian, to)
		}
	}
	var head struct {
		Kind, Mode, Owner, Group uint16
		Modified, Number         uint32
	}
	fields(&head)
	f.Mode = fs.FileMode(head.Mode & 0o777)
	if head.Mode&stickyBit != 0 {
		f.Mode |= fs.ModeSticky
	}
	switch head.Kind {
	case kindDirectory:
		var d struct {
			Start, Links uint32
			Size, Offset uint16
			Parent       uint32
		}
		fields(&d)
		return m.listed(f, uint32(d.Size), d.Start, d.Offset, err)
	case kindExtendedDirectory:
		var d struct {
			Links, Size, Start, Parent uint32
			Indexes, Offset            uint16
			Xattrs                     uint32
		}
		fields(&d)
		return m.listed(f, d.Size, d.Start, d.Offset, err)
	case kindFile:
		var d struct{ Start, Fragment, Offset, Size uint32 }
		fields(&d)
		return m.content(in, f, uint64(d.Start), uint64(d.Size), d.Fragment, d.Offset, err)
	case kindExtendedFile:
		var d struct {
			Start, Size, Sparse             uint64
			Links, Fragment, Offset, Xattrs uint32
		}
		fields(&d)
		return m.content(in, f, d.Start, d.Size, d.Fragment, d.Offset, err)
	case kindLink:
		var d struct{ Links, Size uint32 }
		fields(&d)
		target := make([]byte, min(d.Size, maxTarget))
		fields(target)
		f.Mode, f.Target = f.Mode|fs.ModeSymlink, string(target)
		return f, l, err
	}
	return f, l, errors.Join(err, fmt.Errorf("it is an inode of kind %d: neither file, directory nor link", head.Kind))
}

func (m *image) listed(f File, size, start uint32, offset uint16, err error) (File, listing, error) {
	f.Mode |= fs.ModeDir
	l := listing{size: int64(size)}
	if err == nil && size > emptySize {
		l.in, err = m.seek(m.super.Listings, start, offset)
	}
	return f, l, err
}

func (m *image) content(in *cursor, f File, start, size uint64, fragment, offset uint32, err error) (File, listing, error) {
	if err != nil || size > uint64(m.at.Size())*maxRatio {
		return f, listing{}, errors.Join(err, fmt.Errorf("it has %d bytes", size))
	}
	p := &packed{image: m, start: start, offset: offset, size: int64(size)}
	whole := size / blockBytes
	if fragment == noFragment {
		whole = (size + blockBytes - 1) / blockBytes
	} else if int(fragment) >= len(m.ends) {
		return f, listing{}, fmt.Errorf("it has the fragment %d of %d", fragment, len(m.ends))
	} else {
		p.end = m.ends[fragment]
		p.end.users++
	}
	p.sizes = make([]uint32, whole)
	err = binary.Read(in, binary.LittleEndian, p.sizes)
	f.Size, f.packed = int64(size), p
	f.Open = func() (io.ReadCloser, error) { return io.NopCloser(&content{packed: p, at: p.start}), nil }
	return f, listing{}, err
}

// maxRatio is how much larger a file can be than the image: as much as zstd compresses zeros.
const maxRatio = 32 << 10

// content reads a file.
type content struct {
	*packed
	at   uint64
	n    int   // of the next block
	read int64 // bytes
	left bytes.Reader
}

func (c *content) Read(to []byte) (int, error) {
	if c.left.Len() == 0 {
		if c.read == c.size {
			return 0, io.EOF
		}
		block, err := c.block()
		if err != nil {
			return 0, err
		}
		c.read += int64(len(block))
		c.left.Reset(block)
	}
	return c.left.Read(to)
}

// block is the next one.
func (c *content) block() ([]byte, error) {
	want := int(min(c.size-c.read, blockBytes))
	if c.n == len(c.sizes) {
		if c.end == nil {
			return nil, io.ErrUnexpectedEOF
		}
		block, err := c.image.data(c.end.start, c.end.size)
		if err != nil {
			return nil, err
		}
		if int(c.offset)+want > len(block) {
			return nil, io.ErrUnexpectedEOF
		}
		return block[c.offset:][:want], nil
	}
	size := c.sizes[c.n]
	c.n++
	if size == 0 { // a hole
		return make([]byte, want), nil
	}
	block, err := c.image.data(c.at, size)
	c.at += uint64(size &^ storedBlock)
	if err == nil && len(block) != want {
		err = io.ErrUnexpectedEOF
	}
	return block, err
}

func (m *image) data(at uint64, size uint32) ([]byte, error) {
	return m.block(at, size&^storedBlock, size&storedBlock != 0, blockBytes)
}
