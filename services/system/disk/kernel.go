package disk

import (
	"context"
	"errors"
	"fmt"
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
	for _, p := range d.entries() {
		if err := d.show(ctx, file, p); err != nil {
			return fmt.Errorf("partition %d (%s) of %s: %w", p.Index, p.Name, d.Path, err)
		}
	}
	return nil
}

func (d Disk) show(ctx context.Context, file *os.File, entry *gpt.Partition) error {
	p := d.partition(entry)
	if d.shows(&p) {
		return nil
	}
	// EBUSY: the partition exists, only its node is missing.
	if err := change(file, unix.BLKPG_ADD_PARTITION, p); err != nil && !errors.Is(err, unix.EBUSY) {
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
	return change(file, unix.BLKPG_RESIZE_PARTITION, d.partition(p))
}

// change is ioctl BLKPG with one of its operations (linux/blkpg.h).
func change(file *os.File, op int, p Partition) error {
	part := unix.BlkpgPartition{Start: p.Start, Length: p.Size, Pno: int32(p.Number)}
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

// zeroChunk is the size of a write, between checks of the remaining time.
const zeroChunk = 64 << 20

// EraseEdges removes the metadata of a file system or a partition table.
func (p Partition) EraseEdges(ctx context.Context, file *os.File) error {
	n := min(Edge, p.Size)
	if err := Zero(ctx, file, p.Start, n); err != nil {
		return err
	}
	return Zero(ctx, file, p.Start+p.Size-n, n)
}

// Clear zeroes what other systems would recognise: the edges of the disk, and
// those of each partition of its new table. The journal's sector stays.
func (d Disk) Clear(ctx context.Context, file *os.File) error {
	const after = journalAt + 4096
	errs := []error{
		Zero(ctx, file, 0, journalAt), Zero(ctx, file, after, Edge-after), Zero(ctx, file, d.Size-Edge, Edge),
	}
	for _, p := range d.entries() {
		errs = append(errs, d.partition(p).EraseEdges(ctx, file))
	}
	if err := errors.Join(append(errs, file.Sync())...); err != nil {
		return fmt.Errorf("erase %s: %w", d.Path, err)
	}
	return nil
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
