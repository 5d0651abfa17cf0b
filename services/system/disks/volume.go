package disks

import (
	"context"
	"fmt"
	"os"
	"slices"

	"github.com/diskfs/go-diskfs/partition/gpt"
	"github.com/garboard-os/garboard/boot"
)

// volume is one of the system's volumes with a file system. From the disk up:
//
//	partition ── layer.open ─▶ device ── mkfs ─▶ file system ── mount ─▶ directory
type volume struct {
	boot.Volume
	layer layer
}

// layer is between the partition of a volume and its file system. Each volume
// has its own. The journal covers create: an incomplete layer is created again.
type layer interface {
	// exists reports whether the partition has the layer.
	exists(partition string) (bool, error)
	// create puts the layer on the partition. The content of the partition is lost.
	create(ctx context.Context, partition string) error
	// open returns the device of the file system. The layer may be open already.
	open(ctx context.Context, partition string) (device string, err error)
	// close is called when nothing uses the device any more. The layer may not be open.
	close() error
}

// plain is the layer of a volume that isn't encrypted: the file system is on the partition.
type plain struct{}

func (plain) exists(string) (bool, error)                              { return true, nil }
func (plain) create(context.Context, string) error                     { return nil }
func (plain) open(_ context.Context, partition string) (string, error) { return partition, nil }
func (plain) close() error                                             { return nil }

// volumes are those of the table that have a file system, each with its layer.
func volumes(dirs map[string]string) (all []volume) {
	for _, v := range boot.Volumes {
		if v.FileSystem != "" {
			v.Dir = dirs[v.Label]
			all = append(all, volume{v, plain{}})
		}
	}
	return all
}

func (d *Disks) volume(label string) volume {
	return d.volumes[slices.IndexFunc(d.volumes, func(v volume) bool { return v.Label == label })]
}

// closeLayers closes the layers of volumes that aren't mounted any more.
func (d *Disks) closeLayers() {
	for _, v := range slices.Backward(d.volumes) {
		if err := v.layer.close(); err != nil {
			d.log.Warn(fmt.Sprintf("close %s: %v", v.Label, err))
		}
	}
}

// open returns the device of a volume's file system.
func (v volume) open(ctx context.Context, dev device, t *gpt.Table) (string, error) {
	path, err := partitionDevice(ctx, dev, t, v.Label)
	if err == nil {
		path, err = v.layer.open(ctx, path)
	}
	if err != nil {
		return "", fmt.Errorf("open %s of %s: %w", v.Label, dev.Path, err)
	}
	return path, nil
}

// partitionDevice is the device node of a partition. The kernel may not have it yet.
func partitionDevice(ctx context.Context, dev device, t *gpt.Table, label string) (string, error) {
	p, err := found{table: t}.partition(dev, label)
	if err != nil {
		return "", err
	}
	file, err := os.Open(dev.Path)
	if err != nil {
		return "", err
	}
	defer file.Close()
	if err := showPartitions(ctx, file, dev, t); err != nil {
		return "", err
	}
	path, there := dev.partitionPath(p.n)
	if !there {
		return "", fmt.Errorf("partition %d (%s) of %s has no device", p.n, label, dev.Path)
	}
	return path, nil
}
