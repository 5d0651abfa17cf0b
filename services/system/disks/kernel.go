package disks

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

// showPartitions makes sure that the kernel has the table's partitions, and a
// device node for each. The kernel reads the table of a new disk by itself, but
// not a table of which only the backup is left.
func showPartitions(ctx context.Context, file *os.File, dev device, t *gpt.Table) error {
	ctx, cancel := context.WithTimeout(ctx, nodeTimeout)
	defer cancel()
	for _, p := range t.Partitions {
		if p.Type == gpt.Unused {
			continue
		}
		if err := dev.showPartition(ctx, file, p); err != nil {
			return fmt.Errorf("partition %d (%s) of %s: %w", p.Index, p.Name, dev.Path, err)
		}
	}
	return nil
}

func (dev device) showPartition(ctx context.Context, file *os.File, p *gpt.Partition) error {
	if _, there := dev.partitionPath(p.Index); there {
		return nil
	}
	start, size := int64(p.Start)*int64(dev.Sector), int64(p.End-p.Start+1)*int64(dev.Sector)
	// EBUSY: the partition exists, only its node is missing.
	if err := changePartition(file, unix.BLKPG_ADD_PARTITION, p.Index, start, size); err != nil && !errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("show it to the kernel: %w", err)
	}
	for range sleep.Every(ctx, nodePoll) {
		if _, there := dev.partitionPath(p.Index); there {
			return nil
		}
	}
	return fmt.Errorf("wait for its device: %w", ctx.Err())
}

// changePartition is ioctl BLKPG with one of its operations (linux/blkpg.h).
func changePartition(file *os.File, op, n int, start, size int64) error {
	part := unix.BlkpgPartition{Start: start, Length: size, Pno: int32(n)}
	arg := unix.BlkpgIoctlArg{
		Op:      int32(op),
		Datalen: int32(unsafe.Sizeof(part)),
		Data:    (*byte)(unsafe.Pointer(&part)),
	}
	defer runtime.KeepAlive(&part)
	return ioctl(file, unix.BLKPG, unsafe.Pointer(&arg))
}

// discard is ioctl BLKDISCARD (linux/fs.h): the disk may drop the content of a range.
func discard(file *os.File, start, size int64) error {
	bounds := [2]uint64{uint64(start), uint64(size)}
	return ioctl(file, unix.BLKDISCARD, unsafe.Pointer(&bounds))
}

func ioctl(file *os.File, request uintptr, arg unsafe.Pointer) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, file.Fd(), request, uintptr(arg))
	runtime.KeepAlive(arg)
	if errno != 0 {
		return errno
	}
	return nil
}
