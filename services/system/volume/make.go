package volume

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/diskfs/go-diskfs/partition/gpt"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/system/disk"
)

// step is a part of a change.
type step struct {
	name string
	do   func() error
}

func (k *Keeper) do(ctx context.Context, steps ...step) error {
	for _, s := range steps {
		if err := errors.Join(ctx.Err(), k.Before(s.name)); err != nil {
			return err
		}
		if err := s.do(); err != nil {
			return err
		}
	}
	return nil
}

// journaled does steps that begin again from the first one if they are interrupted.
func (k *Keeper) journaled(ctx context.Context, file *os.File, begun disk.Journal, steps ...step) error {
	write := func(name string, j disk.Journal) []step {
		return []step{{name, func() error { return disk.WriteJournal(file, j) }}}
	}
	return k.do(ctx, slices.Concat(write("journal", begun), steps, write("done", disk.Journal{}))...)
}

// LayOut makes the whole disk ours, with these partitions and volumes.
func (k *Keeper) LayOut(ctx context.Context, d disk.Disk, places []boot.Place, volumes []Volume) error {
	d.Table = d.NewTable(places)
	return d.ChangeUnused(func(file *os.File) error {
		steps := []step{
			{"erase", func() error { return d.Clear(ctx, file) }},
			{"table", func() error { return d.WriteTable(file) }},
			{"partitions", func() error { return d.Show(ctx) }},
		}
		for _, v := range volumes {
			steps = append(steps, k.format(ctx, d, v))
		}
		return k.journaled(ctx, file, disk.Journal{Step: disk.StepLayout}, steps...)
	})
}

// Add adds volumes to the disk, in partitions at free places.
func (k *Keeper) Add(ctx context.Context, d disk.Disk, places []boot.Place, volumes []Volume) error {
	n := 0
	for _, p := range d.Table.Partitions {
		n = max(n, p.Index)
	}
	d.Table.Partitions = slices.DeleteFunc(d.Table.Partitions, func(p *gpt.Partition) bool { return p.Type == gpt.Unused })
	d.Table.Resize(uint64(d.Size))
	return d.Change(func(file *os.File) error {
		for i, v := range volumes {
			at := disk.Partition{Start: places[i].Start, Size: places[i].Size}
			k.Log.Info(fmt.Sprintf("adding %s to %s: %s", v.Label, d.Path, disk.SizeText(at.Size)))
			d.Table.Partitions = append(d.Table.Partitions, d.NewPartition(n+1+i, places[i]))
			err := k.journaled(ctx, file, disk.Journal{Step: disk.StepFormat, Label: v.Label},
				step{"erase", func() error { return errors.Join(at.EraseEdges(ctx, file), file.Sync()) }},
				step{"table", func() error { return d.Table.Write(file, d.Size) }},
				step{"partitions", func() error { return d.Show(ctx) }},
				k.format(ctx, d, v),
			)
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// format makes the layers of a volume, each on the one below it.
func (k *Keeper) format(ctx context.Context, d disk.Disk, v Volume) step {
	return step{"format " + v.Label, func() error {
		return k.climb(ctx, d, v, func(l Layer, on string) (bool, error) {
			if err := l.Create(ctx, on); err != nil {
				return false, fmt.Errorf("create %s of %s on %s: %w", l.Describe(), v.Label, d.Path, err)
			}
			return l != v.top(), nil
		})
	}}
}

// Make makes a volume of which the caller's journal tells.
func (k *Keeper) Make(ctx context.Context, d disk.Disk, v Volume) error {
	return k.do(ctx, k.format(ctx, d, v))
}

func (k *Keeper) formatAgain(ctx context.Context, d disk.Disk, v Volume) error {
	return d.Change(func(file *os.File) error {
		return k.journaled(ctx, file, disk.Journal{Step: disk.StepFormat, Label: v.Label}, k.format(ctx, d, v))
	})
}

// Finish makes the missing volumes of a complete layout: a reset has
// zeroed one, or its formatting was interrupted.
func (k *Keeper) Finish(ctx context.Context, d disk.Disk, volumes []Volume) error {
	if err := k.FinishPending(ctx, d, volumes); err != nil {
		return err
	}
	for _, v := range volumes {
		if k.Mounted(v.Dir) || d.Pending.Interrupted(v.Label) {
			continue
		}
		if missing, err := k.Missing(ctx, d, v); err != nil {
			return err
		} else if !missing {
			continue
		}
		k.Log.Warn(fmt.Sprintf("%s on %s has no file system: making one", v.Label, d.Path))
		if err := k.formatAgain(ctx, d, v); err != nil {
			return err
		}
	}
	return nil
}

// FinishPending makes the volume whose making was interrupted. It comes before all others, because the journal has
// room for one.
func (k *Keeper) FinishPending(ctx context.Context, d disk.Disk, volumes []Volume) error {
	for _, v := range volumes {
		if _, err := d.Partition(v.Label); err == nil && d.Pending.Interrupted(v.Label) && !k.Mounted(v.Dir) {
			k.Log.Warn(fmt.Sprintf("%s on %s has half a file system: making it anew", v.Label, d.Path))
			return k.formatAgain(ctx, d, v)
		}
	}
	return nil
}

// Missing reports whether a layer of a volume is missing, in whose place are only zeros. Other content there is an
// error.
func (k *Keeper) Missing(ctx context.Context, d disk.Disk, v Volume) (missing bool, err error) {
	err = k.climb(ctx, d, v, func(l Layer, on string) (bool, error) {
		there, err := l.On(on)
		if err != nil || there {
			return l != v.top(), err
		}
		if missing, err = disk.IsBlank(on); err != nil || missing {
			return false, err
		}
		c, err := disk.Identify(on)
		if err != nil {
			return false, err
		}
		return false, k.Disks.Refuse(d, fmt.Sprintf("holds %s in its partition %s, where %s was", cmp.Or(c.String(), "unknown data"), v.Label, l.Describe()),
			"Zero the beginning of that partition to have it made again")
	})
	return missing, err
}

// Kind is the file system that a volume has, whatever it should have.
func (k *Keeper) Kind(ctx context.Context, d disk.Disk, v Volume) (kind string, err error) {
	err = k.climb(ctx, d, v, func(l Layer, on string) (bool, error) {
		if l != v.top() {
			return true, nil
		}
		c, err := disk.Identify(on)
		if _, known := fsTypes[c.Kind]; known {
			kind = c.Kind
		}
		return false, err
	})
	return kind, err
}

// Grow gives a partition that size in bytes, if it is the last one and smaller. Size 0 is the rest of the disk, which
// may have become larger: one of a virtual machine, or one that the image of a smaller disk was written to. The
// library writes the table so that a complete one is there at each moment. If the power goes before the file system
// is grown, the next boot does it.
func (k *Keeper) Grow(ctx context.Context, d disk.Disk, label string, size int64) error {
	last := d.Last()
	end := uint64(boot.Usable(d.Size)/int64(d.Sector)) - 1
	if size > 0 {
		end = min(end, last.Start+uint64(size/int64(d.Sector))-1)
	}
	if last.Name != label || last.End >= end {
		return nil
	}
	last.End, last.Size = end, (end-last.Start+1)*uint64(d.Sector)
	d.Table.Resize(uint64(d.Size))
	return d.Change(func(file *os.File) error {
		return k.do(ctx,
			step{"grow", func() error { return d.Table.Write(file, d.Size) }},
			step{"resize", func() error {
				k.Log.Info(fmt.Sprintf("%s of %s, which has %s, grows to %s", last.Name, d.Path, disk.SizeText(d.Size), disk.SizeText(int64(last.Size))))
				return d.Resize(file, last)
			}})
	})
}
