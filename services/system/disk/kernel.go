package disk

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"time"
	"unsafe"

	"github.com/diskfs/go-diskfs/partition/gpt"
	"github.com/garboard-os/garboard/services/core/sleep"
	"golang.org/x/sys/unix"
)

const (
	// nodeTimeout is how long the kernel may take to show a new partition.
	nodeTimeout = 10 * time.Second
	nodePoll    = 10 * time.Millisecond
)

// Change opens the disk for writing, although something may use it.
func (d Disk) Change(do func(file *os.File) error) error {
	file, err := os.OpenFile(d.Path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer file.Close()
	return do(file)
}

// ChangeUnused is Change for a disk that nothing may use: the kernel refuses to open one
// exclusively that is mounted or part of another device (open(2), O_EXCL on block
// devices). It doesn't stay exclusive, because mkfs must be able to open a partition.
func (d Disk) ChangeUnused(do func(file *os.File) error) error {
	free, err := os.OpenFile(d.Path, os.O_RDWR|unix.O_EXCL, 0)
	if err != nil {
		return fmt.Errorf("open disk: %w", err)
	}
	free.Close()
	return d.Change(do)
}

// Show makes sure that the kernel has the table's partitions, and a
// device node for each. The kernel reads the table of a new disk by itself, but
// not a table of which only the backup is left.
func (d Disk) Show(ctx context.Context) error {
	file, err := os.Open(d.Path)
	if err != nil {
		return err
	}
	defer file.Close()
	ctx, cancel := context.WithTimeout(ctx, nodeTimeout)
	defer cancel()
	for p := range d.entries() {
		if err := d.show(ctx, file, p); err != nil {
			return fmt.Errorf("partition %d (%s) of %s: %w", p.Index, p.Name, d.Path, err)
		}
	}
	return nil
}

func (d Disk) show(ctx context.Context, file *os.File, entry *gpt.Partition) error {
	p := Partition{Number: entry.Index}
	if d.shows(&p) {
		return nil
	}
	start, size := int64(entry.Start)*int64(d.Sector), int64(entry.End-entry.Start+1)*int64(d.Sector)
	// EBUSY: the partition exists, only its node is missing.
	if err := change(file, unix.BLKPG_ADD_PARTITION, p.Number, start, size); err != nil && !errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("show it to the kernel: %w", err)
	}
	for range sleep.Every(ctx, nodePoll) {
		if d.shows(&p) {
			return nil
		}
	}
	return fmt.Errorf("wait for its device: %w", ctx.Err())
}

// Resize tells the kernel that a partition has another size.
func (d Disk) Resize(file *os.File, p *gpt.Partition) error {
	return change(file, unix.BLKPG_RESIZE_PARTITION, p.Index, int64(p.Start)*int64(d.Sector), int64(p.Size))
}

// change is ioctl BLKPG with one of its operations (linux/blkpg.h).
func change(file *os.File, op, n int, start, size int64) error {
	part := unix.BlkpgPartition{Start: start, Length: size, Pno: int32(n)}
	arg := unix.BlkpgIoctlArg{Op: int32(op), Datalen: int32(unsafe.Sizeof(part)), Data: (*byte)(unsafe.Pointer(&part))}
	defer runtime.KeepAlive(&part)
	return Ioctl(file, unix.BLKPG, unsafe.Pointer(&arg))
}

// Ioctl is ioctl(2) with a pointer, for what package unix has no function.
func Ioctl(file *os.File, request uintptr, arg unsafe.Pointer) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, file.Fd(), request, uintptr(arg))
	runtime.KeepAlive(arg)
	if errno != 0 {
		return errno
	}
	return nil
}

const (
	// zeroChunk is the size of a write, between checks of the remaining time.
	zeroChunk = 64 << 20
	// punchChunk is the same for a disk that zeroes by itself. It may take long,
	// and a call can't be interrupted.
	punchChunk = 1 << 30
)

// luksHeader has the header of LUKS2 with all its key slots, where cryptsetup(8) puts them by default.
const luksHeader = 16 << 20

// Shred destroys the key slots of an encrypted partition, and reads back that they are gone: nothing can be read of it
// any more, however long it takes to erase the rest.
func (p Partition) Shred(ctx context.Context, file *os.File) error {
	c, err := identify(io.NewSectionReader(file, p.Start, p.Size), p.Size)
	if err != nil || c.Kind != "LUKS" {
		return err
	}
	n := min(luksHeader, p.Size)
	head := min(Edge, n) // comes last: by it, an interrupted one is begun again
	for _, part := range []Partition{{Start: p.Start + head, Size: n - head}, {Start: p.Start, Size: head}} {
		if err := errors.Join(Zero(ctx, file, part.Start, part.Size), file.Sync()); err != nil {
			return err
		}
	}
	if err := unix.IoctlSetInt(int(file.Fd()), unix.BLKFLSBUF, 0); err != nil { // what is read comes from the disk
		return os.NewSyscallError("forget what is cached of the disk", err)
	}
	if gone, err := blank(file, p.Start, int(n)); err != nil || !gone {
		return errors.Join(errors.New("the key slots are still on the disk"), err)
	}
	return nil
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

// EraseEdges removes the metadata of a file system or a partition table.
func (p Partition) EraseEdges(ctx context.Context, file *os.File) error {
	n := min(Edge, p.Size)
	if err := Zero(ctx, file, p.Start, n); err != nil {
		return err
	}
	return Zero(ctx, file, p.Start+p.Size-n, n)
}

// EraseAll is Erase for a whole disk.
func (d Disk) EraseAll(ctx context.Context, file *os.File) error {
	for _, p := range d.Partitions() { // otherwise a guess of the table would find their file systems
		if err := p.EraseEdges(ctx, file); err != nil {
			return err
		}
	}
	err := errors.Join(Partition{Size: d.Size}.Erase(ctx, file, false), file.Sync())
	_ = unix.IoctlSetInt(int(file.Fd()), unix.BLKRRPART, 0) // the old partitions that it may still show don't matter
	return err
}

// Clear zeroes what other systems would recognise: the edges of the disk, and
// those of each partition of its new table. The journal's sector stays.
func (d Disk) Clear(ctx context.Context, file *os.File) error {
	const after = journalAt + 4096
	errs := []error{
		Zero(ctx, file, 0, journalAt), Zero(ctx, file, after, Edge-after), Zero(ctx, file, d.Size-Edge, Edge),
	}
	for p := range d.entries() {
		start := int64(p.Start) * int64(d.Sector)
		errs = append(errs, Partition{Start: start, Size: int64(p.End+1)*int64(d.Sector) - start}.EraseEdges(ctx, file))
	}
	if err := errors.Join(append(errs, file.Sync())...); err != nil {
		return fmt.Errorf("erase %s: %w", d.Path, err)
	}
	return nil
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

// Zero writes zeros, until its time is over.
func Zero(ctx context.Context, file *os.File, start, size int64) error {
	buf := make([]byte, Edge)
	for at := start; at < start+size; at += int64(len(buf)) {
		if (at-start)%zeroChunk == 0 {
			if err := errors.Join(ctx.Err(), file.Sync()); err != nil {
				return err
			}
		}
		if _, err := file.WriteAt(buf[:min(int64(len(buf)), start+size-at)], at); err != nil {
			return err
		}
	}
	return nil
}
