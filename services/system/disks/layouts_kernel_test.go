//go:build kernel

package disks

import (
	"errors"
	"testing"

	"github.com/diskfs/go-diskfs/partition/gpt"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/system/disk"
	"github.com/garboard-os/garboard/tools/testing/loopdisk"
)

// linuxData is the type of most Linux partitions.
const linuxData = "0FC63DAF-8483-4772-8E79-3D69D8477DE4"

func putTable(t *testing.T, l *loop, table *gpt.Table) disk.Disk {
	t.Helper()
	dev := l.device()
	dev.Table = table
	if err := errors.Join(dev.ChangeUnused(dev.WriteTable), dev.Show(t.Context())); err != nil {
		t.Fatal(err)
	}
	return dev
}

// table is one of other systems.
func table(partitions ...*gpt.Partition) *gpt.Table {
	return &gpt.Table{LogicalSectorSize: 512, PhysicalSectorSize: 512, ProtectiveMBR: true, Partitions: partitions}
}

// putPartitions makes the disk that of another Linux.
func putPartitions(t *testing.T, l *loop) {
	dev := putTable(t, l, table(
		&gpt.Partition{Index: 1, Name: "ESP", Type: gpt.EFISystemPartition, Start: 2048, End: 4095},
		&gpt.Partition{Index: 2, Name: "root", Type: linuxData, Start: 4096, End: 4096 + 1<<20},
	))
	p, err := dev.Device("root")
	if err != nil {
		t.Fatal(err)
	}
	loopdisk.Run(t, "mkfs.xfs", "-q", "-L", "root", p.Path)
}

// putLookalike makes partitions with our labels and foreign types.
func putLookalike(t *testing.T, l *loop) {
	dev := l.device()
	table := dev.NewTable(boot.Places(dev.Size))
	for _, p := range table.Partitions {
		p.Type = linuxData
	}
	putTable(t, l, table)
}
