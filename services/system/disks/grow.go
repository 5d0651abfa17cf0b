package disks

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"

	"github.com/diskfs/go-diskfs/partition/gpt"
	"github.com/garboard-os/garboard/boot"
	"golang.org/x/sys/unix"
)

const (
	growfs = "/usr/sbin/xfs_growfs"
	// growTimeout: it writes some KiB for each part (allocation group) of the file system.
	growTimeout = time.Minute
	// growFrom is how much is left over by making a file system, and isn't worth growing it.
	growFrom = 16 << 20
)

// grow gives EPHEMERAL the rest of a disk that has become larger: one of a virtual machine, or one that the image of a smaller disk was written to.
// The library writes the table so that a complete one is there at each moment. If the power goes before the file system is grown, the next boot does it.
func (d *Disks) grow(ctx context.Context, dev device, f found) error {
	var last *gpt.Partition
	for _, p := range f.table.Partitions {
		if p.Type != gpt.Unused && (last == nil || p.Start > last.Start) {
			last = p
		}
	}
	end := uint64(boot.Usable(dev.Size)/int64(dev.Sector)) - 1
	if last.Name != boot.LabelEphemeral || last.End >= end {
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
			d.log.Info(fmt.Sprintf("%s has %s now: %s has the rest of it, %s", dev.Path, bytesText(dev.Size), last.Name, bytesText(int64(last.Size))))
			return changePartition(file, unix.BLKPG_RESIZE_PARTITION, last.Index, int64(last.Start)*int64(dev.Sector), int64(last.Size))
		}})
}

// growFileSystem makes a mounted file system as large as its device.
func (d *Disks) growFileSystem(ctx context.Context, path, dir string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	size, err := file.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	// sb_blocksize and sb_dblocks ("XFS Algorithms & Data Structures", Superblocks).
	super := make([]byte, 16)
	if _, err := file.ReadAt(super, 0); err != nil {
		return err
	}
	has := int64(binary.BigEndian.Uint32(super[4:])) * int64(binary.BigEndian.Uint64(super[8:]))
	if size-has < growFrom {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, growTimeout)
	defer cancel()
	return d.o.Processes.Run(ctx, exec.Command(growfs, "-d", dir))
}
