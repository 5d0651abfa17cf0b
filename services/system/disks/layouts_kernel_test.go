//go:build kernel

package disks

import (
	"errors"
	"os"
	"testing"

	"github.com/diskfs/go-diskfs/partition/gpt"
	"github.com/garboard-os/garboard/boot"
	"golang.org/x/sys/unix"
)

// linuxData is the type of most Linux partitions.
const linuxData = "0FC63DAF-8483-4772-8E79-3D69D8477DE4"

func putTable(t *testing.T, l *loop, table *gpt.Table) device {
	t.Helper()
	dev, err := readDevice(l.name)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(l.path, os.O_RDWR|unix.O_EXCL, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := errors.Join(writeTable(f, dev, table), showPartitions(t.Context(), f, dev, table)); err != nil {
		t.Fatal(err)
	}
	return dev
}

// putPartitions makes the disk that of another Linux.
func putPartitions(t *testing.T, l *loop) {
	dev := putTable(t, l, &gpt.Table{LogicalSectorSize: 512, PhysicalSectorSize: 512, ProtectiveMBR: true, Partitions: []*gpt.Partition{
		{Index: 1, Name: "ESP", Type: gpt.EFISystemPartition, Start: 2048, End: 4095},
		{Index: 2, Name: "root", Type: linuxData, Start: 4096, End: 4096 + 1<<20},
	}})
	path, there := dev.partitionPath(2)
	if !there {
		t.Fatal("no device of partition 2")
	}
	command(t, "mkfs.xfs", "-q", "-L", "root", path)
}

// putLookalike makes partitions with our labels and foreign types.
func putLookalike(t *testing.T, l *loop) {
	dev, err := readDevice(l.name)
	if err != nil {
		t.Fatal(err)
	}
	table := newTable(dev, boot.Places(dev.Size))
	for _, p := range table.Partitions {
		p.Type = linuxData
	}
	putTable(t, l, table)
}
