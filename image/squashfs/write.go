package squashfs

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math"
	"math/bits"
	"path"
	"slices"
)

// The format is version 4.0 (Documentation/filesystems/squashfs.rst): superblock, data, fragments, and then tables.
// Numbers are little-endian.
const (
	magic          = 0x73717368
	compressorZstd = 6
	superblockSize = 96
	padding        = 4096 // of the whole, for loop devices
	// Flags: there are neither extended attributes nor a table for NFS.
	flagNoXattrs = 0x0200

	blockBytes = 1 << 20
	noTable    = math.MaxUint64
	noFragment = math.MaxUint32
	noXattrs   = math.MaxUint32

	// Kinds of inodes, as directories name them; the inode of a directory itself is of the extended kind, which has no
	// limit of 64 KiB.
	kindDirectory         = 1
	kindFile              = 2
	kindLink              = 3
	kindExtendedDirectory = 8

	headerEntries = 256 // of a directory share a header
	emptySize     = 3   // of a directory: the entries . and .. aren't stored, and count
	maxName       = 256
	stickyBit     = 0o1000
	root          = "."
)

// stored is where a file's content lies: whole blocks, and its end in a block that it shares with the ends of other
// files.
type stored struct {
	blocks []*block
	in     *fragment // nil: none
	offset uint32    // in it
}

// fragment is a block with the ends of files. Its number is known when it is written.
type fragment struct {
	number  uint32
	content []byte
}

// writer holds what is known while the parts are written.
type writer struct {
	tree     Tree
	children map[string][]string // of a directory, sorted
	data     *blocks
	content  map[string]stored
	// open is the fragment that isn't full yet, and fragments are the full ones.
	open      *fragment
	fragments []*block
	// kept are the fragments that are the same as in the image that they were read from, by what they are there; users
	// counts the files of each.
	kept     map[*end]*fragment
	users    map[*end]int
	inodes   metadata
	listings metadata
	last     uint32 // number of an inode
}

// Write writes a filesystem with the tree. All belongs to root and is of the epoch; the tree decides the bytes.
func (t Tree) Write(ctx context.Context, to io.WriteSeeker) error {
	if err := t.write(ctx, to); err != nil {
		return fmt.Errorf("write squashfs: %w", err)
	}
	return nil
}

func (t Tree) write(ctx context.Context, to io.WriteSeeker) error {
	full, err := t.whole()
	if err != nil {
		return err
	}
	if _, err := to.Seek(superblockSize, io.SeekStart); err != nil {
		return err
	}
	w := &writer{tree: full, children: map[string][]string{}, content: map[string]stored{}, kept: map[*end]*fragment{}, users: map[*end]int{}}
	for _, name := range slices.Sorted(maps.Keys(full)) {
		if name != root {
			w.children[path.Dir(name)] = append(w.children[path.Dir(name)], name)
		}
		if p := full[name].packed; p != nil && p.end != nil {
			w.users[p.end]++
		}
	}
	if w.data, err = newBlocks(to, superblockSize); err != nil {
		return err
	}
	if err := errors.Join(w.contents(ctx), w.data.close()); err != nil {
		return err
	}
	top, err := w.directory(root, uint32(len(full))+1)
	if err != nil {
		return err
	}
	return w.tables(to, top)
}

// whole adds the directories above files.
func (t Tree) whole() (Tree, error) {
	full := Tree{root: Directory(0o755)}
	for name, f := range t {
		if !fs.ValidPath(name) {
			return nil, fmt.Errorf("%q is no path below the root", name)
		}
		full[name] = f
		for above := path.Dir(name); above != root; above = path.Dir(above) {
			if _, ok := t[above]; !ok {
				full[above] = Directory(0o755)
			} else if !t[above].Mode.IsDir() {
				return nil, fmt.Errorf("%s lies in %s, which is no directory", name, above)
			}
		}
	}
	return full, nil
}

// contents writes the files' blocks, in the order of the paths.
func (w *writer) contents(ctx context.Context) error {
	for _, name := range slices.Sorted(maps.Keys(w.tree)) {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if f := w.tree[name]; f.Mode.IsRegular() {
			if err := w.file(name, f); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
	}
	w.close()
	return nil
}

func (w *writer) file(name string, f File) error {
	if f.Size > math.MaxUint32 {
		return errors.New("it is larger than 4 GiB")
	}
	in, err := f.Open()
	if err != nil {
		return err
	}
	defer in.Close()
	var at stored
	if p := f.packed; p != nil {
		if at.blocks, err = p.copyTo(w.data); err != nil || p.end == nil {
			w.content[name] = at
			return err
		}
		if w.users[p.end] == p.end.users {
			if at.in, err = w.keep(p.end, p.image); err == nil {
				at.offset = p.offset
				w.content[name] = at
			}
			return err
		}
		if _, err := io.CopyN(io.Discard, in, int64(len(p.sizes))*blockBytes); err != nil {
			return err
		}
	}
	for left := f.Size - int64(len(at.blocks))*blockBytes; left > 0; left -= blockBytes {
		content := make([]byte, min(left, blockBytes))
		if _, err := io.ReadFull(in, content); err != nil {
			return err
		}
		if len(content) == blockBytes {
			at.blocks = append(at.blocks, w.data.add(content))
			continue
		}
		if w.open != nil && len(w.open.content)+len(content) > blockBytes {
			w.close()
		}
		if w.open == nil {
			w.open = &fragment{}
		}
		at.in, at.offset = w.open, uint32(len(w.open.content))
		w.open.content = append(w.open.content, content...)
	}
	w.content[name] = at
	return nil
}

// keep copies a fragment, once.
func (w *writer) keep(e *end, from *image) (*fragment, error) {
	if f, ok := w.kept[e]; ok {
		return f, nil
	}
	content := make([]byte, e.size&^storedBlock)
	if _, err := from.at.ReadAt(content, int64(e.start)); err != nil {
		return nil, err
	}
	w.kept[e] = &fragment{number: uint32(len(w.fragments))}
	w.fragments = append(w.fragments, w.data.addPacked(content, e.size))
	return w.kept[e], nil
}

// copyTo copies the whole blocks.
func (p *packed) copyTo(to *blocks) (copied []*block, err error) {
	at := int64(p.start)
	for _, size := range p.sizes {
		content := make([]byte, size&^storedBlock)
		if _, err := p.image.at.ReadAt(content, at); err != nil {
			return nil, err
		}
		at += int64(len(content))
		copied = append(copied, to.addPacked(content, size))
	}
	return copied, nil
}

// close writes the fragment that is open.
func (w *writer) close() {
	if w.open != nil {
		w.open.number = uint32(len(w.fragments))
		w.fragments = append(w.fragments, w.data.add(w.open.content))
		w.open = nil
	}
}

// inode is where one lies: the start of its block in the table, and where it begins in it.
type inode struct {
	name   string
	kind   uint16
	number uint32
	start  uint32
	offset uint16
}

// reference is how other parts point to it.
func (i inode) reference() uint64 { return uint64(i.start)<<16 | uint64(i.offset) }

// next numbers an inode.
func (w *writer) next(name string, kind uint16) inode {
	w.last++
	return inode{name: path.Base(name), kind: kind, number: w.last}
}

// put writes an inode, which begins with what all have, and fields of its kind.
func (w *writer) put(i *inode, kind uint16, mode fs.FileMode, fields ...any) {
	i.start, i.offset = w.inodes.position()
	permissions := uint16(mode.Perm())
	if mode&fs.ModeSticky != 0 {
		permissions |= stickyBit
	}
	const owner, group, modified = uint16(0), uint16(0), uint32(0) // places in the table of identities
	w.inodes.append(append([]any{kind, permissions, owner, group, modified, i.number}, fields...)...)
}

// directory writes what is below a directory, its listing, and its inode.
func (w *writer) directory(name string, parent uint32) (inode, error) {
	own := w.next(name, kindDirectory)
	var entries []inode
	links := uint32(2)
	for _, child := range w.children[name] {
		var i inode
		switch f := w.tree[child]; f.Mode.Type() {
		case fs.ModeDir:
			var err error
			if i, err = w.directory(child, own.number); err != nil {
				return i, err
			}
			links++
		case fs.ModeSymlink:
			i = w.next(child, kindLink)
			w.put(&i, kindLink, f.Mode, uint32(1), uint32(len(f.Target)), []byte(f.Target))
		case 0:
			i = w.next(child, kindFile)
			w.putFile(&i, f, w.content[child])
		default:
			return i, fmt.Errorf("%s is neither file, directory nor link", child)
		}
		if len(i.name) > maxName {
			return i, fmt.Errorf("%s: its name has more than %d bytes", child, maxName)
		}
		entries = append(entries, i)
	}
	start, offset := w.listings.position()
	size := w.list(entries)
	w.put(&own, kindExtendedDirectory, w.tree[name].Mode, links, size+emptySize, start, parent, uint16(0), offset, uint32(noXattrs))
	return own, nil
}

func (w *writer) putFile(i *inode, f File, at stored) {
	start, number := uint32(0), uint32(noFragment)
	if at.in != nil {
		number = at.in.number
	}
	sizes := make([]uint32, 0, len(at.blocks))
	for n, b := range at.blocks {
		if n == 0 {
			start = uint32(b.start)
		}
		sizes = append(sizes, b.size)
	}
	w.put(i, kindFile, f.Mode, start, number, at.offset, uint32(f.Size), sizes)
}

// list writes a directory's entries. Those of one header have their inodes in one block.
func (w *writer) list(entries []inode) (size uint32) {
	for len(entries) > 0 {
		first, n := entries[0], 1
		for n < len(entries) && n < headerEntries && entries[n].start == first.start && math.Abs(float64(entries[n].number)-float64(first.number)) < math.MaxInt16 {
			n++
		}
		size += w.listings.append(uint32(n-1), first.start, first.number)
		for _, e := range entries[:n] {
			size += w.listings.append(e.offset, int16(int64(e.number)-int64(first.number)), e.kind, uint16(len(e.name)-1), []byte(e.name))
		}
		entries = entries[n:]
	}
	return size
}

// tables writes what comes after the data, and the superblock.
func (w *writer) tables(to io.WriteSeeker, top inode) error {
	at := w.data.end
	var tables bytes.Buffer
	here := func() uint64 { return at + uint64(tables.Len()) }
	inodes := here()
	tables.Write(w.inodes.bytes())
	listings := here()
	tables.Write(w.listings.bytes())
	// indexed writes a table that is found by a list of its blocks, and returns where the list is.
	indexed := func(entries []any) uint64 {
		var table metadata
		var list []uint64
		for _, e := range entries {
			start, offset := table.position()
			if offset == 0 {
				list = append(list, here()+uint64(start))
			}
			table.append(e)
		}
		tables.Write(table.bytes())
		found := here()
		_ = binary.Write(&tables, binary.LittleEndian, list) // never fails (bytes.Buffer)
		return found
	}
	fragments := uint64(noTable)
	if len(w.fragments) > 0 {
		var entries []any
		for _, f := range w.fragments {
			entries = append(entries, []uint64{f.start, uint64(f.size)})
		}
		fragments = indexed(entries)
	}
	identities := indexed([]any{uint32(0)})
	used := here()
	tables.Write(make([]byte, (padding-used%padding)%padding))
	if _, err := to.Write(tables.Bytes()); err != nil {
		return err
	}
	var super bytes.Buffer
	for _, field := range []any{
		uint32(magic), w.last, uint32(0), uint32(blockBytes), uint32(len(w.fragments)),
		uint16(compressorZstd), uint16(bits.TrailingZeros32(blockBytes)), uint16(flagNoXattrs), uint16(1), uint16(4), uint16(0),
		top.reference(), used, identities, uint64(noTable), inodes, listings, fragments, uint64(noTable),
	} {
		_ = binary.Write(&super, binary.LittleEndian, field)
	}
	if _, err := to.Seek(0, io.SeekStart); err != nil {
		return err
	}
	_, err := to.Write(super.Bytes())
	return err
}
