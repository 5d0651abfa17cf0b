package disks

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/diskfs/go-diskfs/partition/gpt"
	"github.com/garboard-os/garboard/boot"
	"golang.org/x/sys/unix"
)

const (
	// growTimeout: it writes some KiB for each part (allocation group) of the file system.
	growTimeout = time.Minute
	// growFrom is how much is left over by making a file system, and isn't worth growing it.
	growFrom = 16 << 20
)

// lastPartition is the one with the highest address; nil if there is none.
func lastPartition(t *gpt.Table) (last *gpt.Partition) {
	for _, p := range t.Partitions {
		if p.Type != gpt.Unused && (last == nil || p.Start > last.Start) {
			last = p
		}
	}
	return last
}

// grow gives a partition that size in bytes, if it is the last one and smaller. Size 0 is the rest of the disk, which may have become larger: one of
// a virtual machine, or one that the image of a smaller disk was written to.
// The library writes the table so that a complete one is there at each moment. If the power goes before the file system is grown, the next boot does it.
func (d *Disks) grow(ctx context.Context, dev device, f found, label string, size int64) error {
	last := lastPartition(f.table)
	end := uint64(boot.Usable(dev.Size)/int64(dev.Sector)) - 1
	if size > 0 {
		end = min(end, last.Start+uint64(size/int64(dev.Sector))-1)
	}
	if last.Name != label || last.End >= end {
		return nil
	}
	file, err := os.OpenFile(dev.Path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer file.Close()
	last.End, last.Size = end, (end-last.Start+1)*uint64(dev.Sector)
	f.table.Resize(uint64(dev.Size))
	return d.do(ctx,
		step{"grow", func() error { return f.table.Write(file, dev.Size) }},
		step{"resize", func() error {
			d.log.Info(fmt.Sprintf("%s of %s, which has %s, grows to %s", last.Name, dev.Path, bytesText(dev.Size), bytesText(int64(last.Size))))
			return changePartition(file, unix.BLKPG_RESIZE_PARTITION, last.Index, int64(last.Start)*int64(dev.Sector), int64(last.Size))
		}})
}

// growFileSystem makes a mounted file system as large as its device.
func (d *Disks) growFileSystem(ctx context.Context, kind fsType, path, dir string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	size, err := file.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	super := make([]byte, 4096)
	if _, err := file.ReadAt(super, 0); err != nil {
		return err
	}
	block, blocks := kind.size(super)
	if size-block*blocks < growFrom {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, growTimeout)
	defer cancel()
	return kind.grow(ctx, d.o.Processes, dir, size/block)
}
