package disks

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/diskfs/go-diskfs/partition/gpt"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/machine"
	"golang.org/x/sys/unix"
)

// The disks of machine.disks. Their partitions have a type of their own, and the last elements of their mount points as labels: a disk
// that has one of them is found by it, and a disk without them is chosen by its name or its properties.
//
//	chosen ─ empty ─▶ layOut ─┐
//	       └ known ─▶ extend ─┴▶ finish ─▶ record ─▶ mountVolume

// retryData is how often a disk that can't be used is looked at again: somebody may plug in another one.
const retryData = 2 * time.Second

// VolumeStatus is a partition of machine.disks; its ID is the last element of its mount point. Or it is what machine.kubelet.persist keeps:
// its ID is persist/NAME.
type VolumeStatus struct {
	Disk    string `yaml:"disk,omitempty" column:"DISK"` // such as /dev/sdb
	Size    string `yaml:"size,omitempty" column:"SIZE"`
	Mounted bool   `yaml:"mounted" column:"MOUNTED"`
	Problem string `yaml:"problem,omitempty" column:"PROBLEM"`
}

// VolumeStatuses has an object for each partition of machine.disks, and for each entry of machine.kubelet.persist.
var VolumeStatuses = resource.Define[VolumeStatus](resource.Definition{
	Type:      "VolumeStatuses.runtime.garboard.dev",
	Kind:      "VolumeStatus",
	Aliases:   []string{"volumes", "volume"},
	Namespace: "runtime",
})

// VolumeController mounts the partitions of machine.disks.
func (d *Disks) VolumeController() resource.Controller {
	return resource.Controller{
		Name: "runtime.VolumeController", Reconcile: d.mountData,
		// A boot is recorded as soon as the system disk is mounted.
		Inputs:  []resource.Input{{Type: machine.Configs.Type(), ID: machine.ConfigID}, {Type: machine.Boots.Type()}},
		Outputs: []string{VolumeStatuses.Type()},
	}
}

func (d *Disks) mountData(ctx context.Context, v resource.View) (again time.Duration, err error) {
	wanted, err := machine.Wanted(v, func(c *config.Config) config.Machine { return c.Machine })
	if err != nil {
		return 0, err
	}
	if len(wanted.Disks) > 0 && d.o.Mode == boot.Machine && !d.isMounted(d.o.varDir) {
		return retryData, nil
	}
	statuses := map[string]VolumeStatus{}
	for _, disk := range wanted.Disks {
		path, sizes, problem := d.mountDisk(ctx, disk)
		for _, p := range disk.Partitions {
			id := filepath.Base(p.Mountpoint)
			status := VolumeStatus{Disk: path, Size: sizes[id], Mounted: problem == nil || sizes[id] != ""}
			if !status.Mounted {
				again = retryData
				status.Problem, _, _ = strings.Cut(problem.Error(), " The disks here:")
			}
			if old, err := VolumeStatuses.Get(v, id); (err != nil || old.Spec != status) && !status.Mounted {
				v.Log().Warn(p.Mountpoint+" isn't mounted", "problem", problem)
			}
			statuses[id] = status
		}
	}
	for _, name := range wanted.Kubelet.Persist {
		status := VolumeStatus{Disk: boot.LabelEphemeral, Mounted: d.isMounted(filepath.Join(d.o.etcDir, kept[name][1]))}
		if !status.Mounted {
			status.Problem = "what pods leave there is kept from the next boot on"
		}
		statuses["persist/"+name] = status
	}
	if len(wanted.Kubelet.Persist) > 0 && !d.isMounted(filepath.Join(d.o.varDir, "opt/cni/bin")) { // openPlugins is still to come
		again = retryData
	}
	return again, VolumeStatuses.Replace(v, statuses)
}

// mountDisk mounts the partitions of a disk, after it has made those that the disk lacks. Those that are mounted have a size, also with an error.
func (d *Disks) mountDisk(ctx context.Context, wanted config.DataDisk) (path string, sizes map[string]string, err error) {
	d.data.Lock()
	defer d.data.Unlock()
	all := lists.Of(wanted.Partitions, d.dataVolume)
	if d.o.Mode == boot.Container {
		for _, v := range all {
			err = errors.Join(err, untrusted.MkdirAll(v.Dir, 0o755))
		}
		return "", nil, err
	}
	system := d.systemDisk()
	if system == nil {
		return "", nil, errors.New("the system's disk isn't mounted yet")
	}
	dev, f, err := d.dataDisk(*system, wanted, all)
	if err != nil {
		return "", nil, err
	}
	var lacks error // those that are there are mounted without the others
	if lacking := missing(f, dev, all); f.data() && len(lacking) < len(all) {
		if _, err := behind(dev, f, lacking); err != nil {
			lacks = d.refuse(dev, err.Error(), "Correct the partitions in machine.disks")
			all = slices.DeleteFunc(all, func(v volume) bool { return slices.Contains(lacking, v) })
		}
	}
	if err := d.takeData(ctx, dev, f, wanted, all); err != nil {
		return dev.Path, nil, err
	}
	if f, err = d.inspect(dev); err == nil {
		err = keepFileSystems(ctx, dev, f, all)
	}
	if err == nil {
		err = d.finish(ctx, dev, f, all)
	}
	if err != nil {
		return dev.Path, nil, err
	}
	if err := d.record(wanted.Name, dev); err != nil { // before the first file is written to it
		return dev.Path, nil, err
	}
	sizes = map[string]string{}
	for _, v := range all {
		if err := errors.Join(untrusted.MkdirAll(v.Dir, 0o755), d.mountVolume(ctx, dev, v)); err != nil {
			return dev.Path, nil, err
		}
		p, err := f.partition(dev, v.Label)
		if err != nil {
			return dev.Path, nil, err
		}
		sizes[v.Label] = bytesText(p.size)
	}
	return dev.Path, sizes, lacks
}

// keepFileSystems mounts a file system as what it is, whatever the configuration wants by now.
func keepFileSystems(ctx context.Context, dev device, f found, volumes []volume) error {
	for i, v := range volumes {
		if f.pending.interrupted(v) {
			continue
		}
		path, err := partitionDevice(ctx, dev, f.table, v.Label)
		if err != nil {
			return err
		}
		c, err := identifyDevice(path)
		if err != nil {
			return err
		}
		if _, known := fsTypes[c.kind]; known {
			volumes[i].FileSystem = c.kind
		}
	}
	return nil
}

// dataVolume is a partition of machine.disks, whose size is rounded up to MiB.
func (d *Disks) dataVolume(p config.DataPartition) volume {
	name := filepath.Base(p.Mountpoint)
	return volume{boot.Volume{
		Label: name, Type: boot.TypeData, Size: (int64(p.Size) + edge - 1) &^ (edge - 1),
		FileSystem: string(p.FileSystem), Dir: filepath.Join(d.o.varDir, "mnt", name), Flags: unix.MS_NOATIME | unix.MS_NODEV,
	}, plain{}}
}

// dataDisk is the disk that has one of these volumes, or else the one that the configuration chooses: an empty one, if several fit.
func (d *Disks) dataDisk(system device, wanted config.DataDisk, volumes []volume) (device, found, error) {
	type candidate struct {
		device
		found
	}
	devices, err := d.devices()
	if err != nil {
		return device{}, found{}, err
	}
	records, err := d.records()
	if err != nil {
		return device{}, found{}, err
	}
	on, made := records[wanted.Name]
	path := resolved(wanted.Device)
	var known, free, fits []candidate
	why := rejected{}
	for _, dev := range devices {
		f, err := d.inspect(dev)
		c := candidate{dev, f}
		why[dev.Path] = cmp.Or(d.unfit(dev, f, wanted.Device, wanted.DiskSelector), attached(dev, wanted))
		chosen := (wanted.Device == "" || dev.Path == path) && why[dev.Path] == ""
		switch {
		case dev.Path == system.Path:
		case err != nil && wanted.Device != "" && chosen:
			return dev, f, err
		case err == nil && f.data() && len(missing(f, dev, volumes)) < len(volumes) && (made || chosen || !dev.Remote):
			known = append(known, c)
		case err == nil && chosen && (f.verdict == empty || f.verdict == unfinished):
			free = append(free, c)
		case err == nil && chosen && (wanted.Device != "" || f.verdict == foreign && !f.data()):
			fits = append(fits, c)
		}
	}
	if made && on.Serial+on.WWID != "" { // others may have a partition of this name: pods have raw disks
		known = slices.DeleteFunc(known, func(c candidate) bool { return !on.is(c.device) })
	}
	fits = append(free, fits...)
	switch {
	case len(known) > 1:
		return device{}, found{}, fmt.Errorf("%s and %s both have partitions of %s: unplug the one whose data isn't wanted", known[0].Path, known[1].Path, wanted.Name)
	case len(known) == 1:
		return known[0].device, known[0].found, nil
	}
	if made {
		fits = slices.DeleteFunc(free, func(c candidate) bool { return !on.is(c.device) }) // it was erased
		if len(fits) == 0 {
			return device{}, found{}, fmt.Errorf("the disk of %s (%s) is missing. Plug it in, or give the entry of machine.disks another name to begin on another disk", wanted.Name, on)
		}
	}
	if len(fits) > 0 {
		return fits[0].device, fits[0].found, nil
	}
	return device{}, found{}, fmt.Errorf("no disk fits %s of machine.disks. Plug it in, or correct device or diskSelector. The disks here:\n%s", wanted.Name, d.selection(why))
}

// attached says why an entry doesn't get a disk on the other side of a network: a storage driver may have attached it for a pod. It must be
// named, by its device or by what no other disk has.
func attached(dev device, wanted config.DataDisk) string {
	if !dev.Remote || wanted.Device != "" || wanted.DiskSelector.Serial+wanted.DiskSelector.WWID != "" {
		return ""
	}
	return "it is on the other side of a network: its device, serial or wwid must be given"
}

// takeData makes the partitions that a disk lacks.
func (d *Disks) takeData(ctx context.Context, dev device, f found, wanted config.DataDisk, volumes []volume) error {
	field := "machine.disks[" + wanted.Name + "]"
	switch {
	case f.verdict == ours || f.verdict == newer:
		return d.refuse(dev, "holds "+f.String(), "Name another disk in "+field+".device")
	case f.data() && len(missing(f, dev, volumes)) < len(volumes):
		return d.extend(ctx, dev, f, volumes)
	}
	if err := d.late(f); err != nil {
		return err
	}
	if f.verdict == foreign {
		consent := ""
		if wanted.Wipe {
			consent = field + ".wipe is set"
		}
		if err := d.mayWipe(dev, f, consent, field+".device", field+".wipe"); err != nil {
			return err
		}
		d.log.Warn(fmt.Sprintf("erasing %s, which held %s: %s", dev.Path, f.holds, consent))
	}
	places, err := placesFrom(edge, dev, volumes)
	if err != nil {
		return d.refuse(dev, err.Error(), "Correct "+field+".partitions")
	}
	d.log.Info(fmt.Sprintf("making the partitions of %s on %s", field, dev.Path))
	return d.layOut(ctx, dev, places, volumes)
}

// missing are the volumes that a disk lacks.
func missing(f found, dev device, volumes []volume) []volume {
	return slices.DeleteFunc(slices.Clone(volumes), func(v volume) bool { _, err := f.partition(dev, v.Label); return err == nil })
}

// placesFrom are those of volumes on a disk, from an address on.
func placesFrom(at int64, dev device, volumes []volume) (places []boot.Place, err error) {
	for _, v := range volumes {
		rest := boot.Usable(dev.Size) - at
		size := cmp.Or(v.Size, rest)
		if size > rest || size < config.MinPartition {
			return nil, fmt.Errorf("has no room for %s: %s of at least %s", v.Label, bytesText(max(rest, 0)), bytesText(max(v.Size, config.MinPartition)))
		}
		places = append(places, boot.Place{Volume: v.Volume, Start: at, Size: size})
		at += size
	}
	return places, nil
}

// behind are the places of volumes after the last partition of a disk.
func behind(dev device, f found, volumes []volume) ([]boot.Place, error) {
	return placesFrom((int64(lastPartition(f.table).End+1)*int64(dev.Sector)+edge-1)&^(edge-1), dev, volumes)
}

// extend adds the volumes that a disk lacks behind its last partition. If it lacks none, the last volume grows.
func (d *Disks) extend(ctx context.Context, dev device, f found, volumes []volume) error {
	lacking := missing(f, dev, volumes)
	if len(lacking) == 0 {
		v := volumes[len(volumes)-1]
		if d.isMounted(v.Dir) {
			return nil // the next boot does it
		}
		return d.grow(ctx, dev, f, v.Label, v.Size)
	}
	places, err := behind(dev, f, lacking)
	if err == nil {
		err = d.formatPending(ctx, dev, f, volumes)
	}
	if err != nil {
		return err
	}
	file, err := os.OpenFile(dev.Path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer file.Close()
	n := 0
	for _, p := range f.table.Partitions {
		n = max(n, p.Index)
	}
	f.table.Partitions = slices.DeleteFunc(f.table.Partitions, func(p *gpt.Partition) bool { return p.Type == gpt.Unused })
	f.table.Resize(uint64(dev.Size))
	for i, v := range lacking {
		p := places[i]
		d.log.Info(fmt.Sprintf("adding %s to %s: %s", v.Label, dev.Path, bytesText(p.Size)))
		f.table.Partitions = append(f.table.Partitions, newPartition(dev, n+1+i, p))
		err := d.do(ctx,
			step{"journal", func() error { return writeJournal(file, journal{step: stepFormat, label: v.Label}) }},
			step{"erase", func() error { return errors.Join(zeroEdges(ctx, file, p.Start, p.Size), file.Sync()) }},
			step{"table", func() error { return f.table.Write(file, dev.Size) }},
			step{"partitions", func() error { return showPartitions(ctx, file, dev, f.table) }},
			d.format(ctx, dev, f.table, v),
			finished(file),
		)
		if err != nil {
			return err
		}
	}
	return nil
}

// Mounted is the condition that all partitions of machine.disks are mounted.
func Mounted(store *resource.Store) dag.Condition { return mounted{store} }

type mounted struct{ store *resource.Store }

func (mounted) String() string { return "volumes of machine.disks to be mounted (gbctl get volumes)" }

// Wait implements dag.Condition. The configuration may change meanwhile.
func (m mounted) Wait(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for range m.store.Watch(ctx, machine.Configs.Type(), VolumeStatuses.Type()) {
		if m.holds() {
			return nil
		}
	}
	return ctx.Err()
}

func (m mounted) holds() bool {
	cfg, err := machine.Config(m.store)
	if err != nil {
		return false
	}
	for _, disk := range cfg.Machine.Disks {
		for _, p := range disk.Partitions {
			if s, err := VolumeStatuses.Get(m.store, filepath.Base(p.Mountpoint)); err != nil || !s.Spec.Mounted {
				return false
			}
		}
	}
	return true
}
