package disk

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"unsafe"

	"github.com/garboard-os/garboard/boot"
	"golang.org/x/sys/unix"
)

// punchChunk is how much a disk zeroes or discards by itself between checks of the remaining time. It may take long,
// and a call can't be interrupted.
const punchChunk = 1 << 30

// luks is the content of what is encrypted.
const luks = "LUKS"

// luksHeader has the header of LUKS2 with all its key slots, where cryptsetup(8) puts them by default.
const luksHeader = 16 << 20

// Shred destroys the key slots of an encrypted partition, and reads back that they are gone: nothing can be read of it
// any more, however long it takes to erase the rest. It returns false if the partition isn't encrypted.
func (p Partition) Shred(ctx context.Context, file *os.File) (sealed bool, err error) {
	c, err := identify(io.NewSectionReader(file, p.Start, p.Size), p.Size)
	if err != nil || c.Kind != luks {
		return false, err
	}
	n := min(luksHeader, p.Size)
	head := min(Edge, n) // comes last: by it, an interrupted one is begun again
	for _, part := range []Partition{{Start: p.Start + head, Size: n - head}, {Start: p.Start, Size: head}} {
		if err := errors.Join(Zero(ctx, file, part.Start, part.Size), file.Sync()); err != nil {
			return true, err
		}
	}
	if err := unix.IoctlSetInt(int(file.Fd()), unix.BLKFLSBUF, 0); err != nil { // what is read comes from the disk
		return true, os.NewSyscallError("forget what is cached of the disk", err)
	}
	if gone, err := blank(file, p.Start, int(n)); err != nil || !gone {
		return true, errors.Join(errors.New("the key slots are still on the disk"), err)
	}
	return true, nil
}

// Wipe wipes a partition in one of boot.WipeModes, or "". sealed: it was encrypted, and its key slots are gone. keys:
// it may contain a node's keys. done is called now and then with how much is overwritten.
func (p Partition) Wipe(ctx context.Context, file *os.File, mode string, sealed, keys bool, done func(bytes int64)) error {
	switch {
	case mode == boot.WipeOverwrite:
		for at := int64(0); at < p.Size; at += zeroChunk {
			if err := Zero(ctx, file, p.Start+at, min(zeroChunk, p.Size-at)); err != nil {
				return err
			}
			done(at)
		}
		return nil
	case mode == boot.WipeKeys && sealed:
		return p.EraseEdges(ctx, file)
	}
	return p.Erase(ctx, file, keys)
}

// Discard tells the disk to forget what a partition has: with all copies that the disk has of it, if it offers that.
func (p Partition) Discard(ctx context.Context, file *os.File) error {
	for at := p.Start; at < p.Start+p.Size; at += punchChunk {
		if err := ctx.Err(); err != nil {
			return err
		}
		bounds := [2]uint64{uint64(at), uint64(min(punchChunk, p.Start+p.Size-at))}
		if Ioctl(file, unix.BLKSECDISCARD, unsafe.Pointer(&bounds)) == nil {
			continue
		}
		if err := Ioctl(file, unix.BLKDISCARD, unsafe.Pointer(&bounds)); err != nil {
			return os.NewSyscallError("discard", err)
		}
	}
	return nil
}

// Discards reports whether the disk offers that.
func (d Disk) Discards() bool {
	return number(filepath.Join("/sys/block", d.Name), "queue/discard_max_bytes") > 0
}

// Erase zeroes a partition of a disk. If the disk can't zero by itself, Erase writes all of a
// partition with a node's keys, but only the edges of any other, because that could take hours.
func (p Partition) Erase(ctx context.Context, file *os.File, keys bool) error {
	if helped, err := punch(ctx, file, p.Start, p.Size); helped || err != nil {
		return err
	}
	if keys {
		return Zero(ctx, file, p.Start, p.Size)
	}
	bounds := [2]uint64{uint64(p.Start), uint64(p.Size)}
	// a disk may ignore it (linux/fs.h), or return any data there afterwards
	_ = Ioctl(file, unix.BLKDISCARD, unsafe.Pointer(&bounds))
	return p.EraseEdges(ctx, file)
}

// ShredAll is Shred for a whole disk; false if anything on it isn't encrypted.
func (d Disk) ShredAll(ctx context.Context, file *os.File) (sealed bool, err error) {
	parts := d.Partitions()
	whole, err := Partition{Size: d.Size}.Shred(ctx, file)
	sealed = len(parts) > 0 || whole
	for _, p := range parts {
		if err != nil {
			return false, err
		}
		var one bool
		one, err = p.Shred(ctx, file)
		sealed = sealed && one
	}
	return sealed, err
}

// WipeAll is Wipe for a whole disk.
func (d Disk) WipeAll(ctx context.Context, file *os.File, mode string, sealed bool, done func(bytes int64)) error {
	for _, p := range d.Partitions() { // otherwise a guess of the table would find their file systems
		if err := p.EraseEdges(ctx, file); err != nil {
			return err
		}
	}
	err := Partition{Size: d.Size}.Wipe(ctx, file, mode, sealed, false, done)
	if err == nil {
		err = file.Sync()
	}
	_ = unix.IoctlSetInt(int(file.Fd()), unix.BLKRRPART, 0) // the old partitions that it may still show don't matter
	return err
}

// punch makes the disk zero by itself, after which it reads as zeros
// (block/fops.c, blkdev_fallocate). It returns false if the disk can't.
func punch(ctx context.Context, file *os.File, start, size int64) (helped bool, err error) {
	for at := start; at < start+size; at += punchChunk {
		if err := ctx.Err(); err != nil {
			return false, err
		}
		n := min(punchChunk, start+size-at)
		if err := unix.Fallocate(int(file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, at, n); err != nil {
			return false, nil
		}
	}
	return true, nil
}
