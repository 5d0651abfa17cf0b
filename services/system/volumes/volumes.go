// Package volumes makes and mounts the partitions of machine.disks. They have a type of their own, and the last
// elements of their mount points as labels: a disk that has one of them is found by it, and a disk without them is
// chosen by its name or its properties.
//
//	chosen ─ empty ─▶ lay out ─┐
//	       └ known ─▶ extend ──┴▶ finish ─▶ record ─▶ open
package volumes

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/option"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/disk"
	"github.com/garboard-os/garboard/services/system/disks"
	"github.com/garboard-os/garboard/services/system/luks"
	"github.com/garboard-os/garboard/services/system/media"
	"github.com/garboard-os/garboard/services/system/volume"
	"golang.org/x/sys/unix"
)

// retryData is how often a disk that can't be used is looked at again: somebody may plug in another one.
const retryData = 2 * time.Second

// recoveryPoll is how often encrypted volumes are looked at: somebody may give them a recovery key.
const recoveryPoll = time.Minute

// Status is a partition of machine.disks; its ID is the last element of its mount point. Or it is STATE or EPHEMERAL
// of a machine, once the service disks has them. Or it is what machine.kubelet.persist keeps: its ID is persist/NAME.
type Status = volume.Status

// Statuses has an object for each of these.
var Statuses = resource.Define[Status](resource.Definition{
	Type:      "VolumeStatuses.runtime.garboard.dev",
	Kind:      "VolumeStatus",
	Aliases:   []string{"volumes", "volume"},
	Namespace: "runtime",
})

// WithoutRecovery are the encrypted volumes without a recovery key.
func WithoutRecovery(r resource.Reader) []resource.Object[Status] {
	return slices.DeleteFunc(Statuses.List(r), func(o resource.Object[Status]) bool { return !o.Spec.NoRecovery })
}

// Volumes are those of machine.disks.
type Volumes struct {
	Mode   boot.Mode
	Keeper *volume.Keeper
	Media  *media.Finder
	System func() (all map[string]Status, settled bool) // the volumes of the system's disk
	KeysOf func(configured []config.EncryptionKey, label string) []luks.Key

	derivation []string // luks.Derivation; tests have a faster one

	mu      sync.Mutex       // held during all changes of the disks, which may take many minutes
	settled map[string]error // what is wrong with the encryption of volumes that have their keys since this boot
}

// Controller mounts the partitions of machine.disks.
func (d *Volumes) Controller() resource.Controller {
	option.Default(&d.derivation, luks.Derivation)
	return resource.Controller{
		Name: "runtime.VolumeController", Reconcile: d.reconcile,
		// A boot is recorded as soon as the system disk is mounted.
		Inputs:  []resource.Input{{Type: configuration.Configs.Type(), ID: configuration.ConfigID}, {Type: configuration.Boots.Type()}},
		Outputs: []string{Statuses.Type()},
	}
}

func (d *Volumes) reconcile(ctx context.Context, v resource.View) (again time.Duration, err error) {
	wanted, err := configuration.Wanted(v, func(c *config.Config) config.Machine { return c.Machine })
	if err != nil {
		return 0, err
	}
	if len(wanted.Disks) > 0 && d.Mode == boot.Machine && !d.Keeper.Mounted(d.Keeper.Dirs.Var) {
		return retryData, nil
	}
	statuses, settled := d.System()
	switch {
	case !settled:
		again = retryData
	case slices.ContainsFunc(slices.Collect(maps.Values(statuses)), Status.Encrypted):
		again = recoveryPoll
	}
	if statuses == nil {
		statuses = map[string]Status{}
	}
	for _, disk := range wanted.Disks {
		path, made, problem := d.mount(ctx, disk)
		for _, p := range disk.Partitions {
			id := filepath.Base(p.Mountpoint)
			status, mounted := made[id]
			status.Disk, status.Mounted = path, problem == nil || mounted
			if _, settled := d.settled[id]; !settled && mounted {
				again = retryData
			}
			if !status.Mounted {
				again = retryData
				status.Problem, _, _ = strings.Cut(problem.Error(), " The disks here:")
			}
			if old, err := Statuses.Get(v, id); (err != nil || old.Spec != status) && !status.Mounted {
				v.Log().Warn(p.Mountpoint+" isn't mounted", "problem", problem)
			}
			statuses[id] = status
		}
	}
	for _, name := range wanted.Kubelet.Persist {
		status := Status{Disk: boot.LabelEphemeral, Mounted: d.Keeper.Mounted(filepath.Join(d.Keeper.Dirs.Etc, disks.Kept[name][1]))}
		if !status.Mounted {
			status.Problem = "what pods leave there is kept from the next boot on"
		}
		statuses["persist/"+name] = status
	}
	// the service disks is still to mount it
	if len(wanted.Kubelet.Persist) > 0 && !d.Keeper.Mounted(filepath.Join(d.Keeper.Dirs.Var, "opt/cni/bin")) {
		again = retryData
	}
	return again, Statuses.Replace(v, statuses)
}

// mount mounts the partitions of a disk, after it has made those that the disk lacks. It returns those that are
// mounted, also with an error.
func (d *Volumes) mount(ctx context.Context, wanted config.DataDisk) (path string, made map[string]Status, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	all := lists.Of(wanted.Partitions, d.volume)
	if d.Mode == boot.Container {
		for _, v := range all {
			err = errors.Join(err, untrusted.MkdirAll(v.Dir, 0o755))
		}
		return "", nil, err
	}
	system := d.Media.System()
	if system == nil {
		return "", nil, errors.New("the system's disk isn't mounted yet")
	}
	f, err := d.choose(system.Path, wanted, all)
	if err != nil {
		return "", nil, err
	}
	var lacks error // those that are there are mounted without the others
	if lacking := missing(f, all); f.Data() && len(lacking) < len(all) {
		if _, err := behind(f, lacking); err != nil {
			lacks = d.Keeper.Disks.Refuse(f, err.Error(), "Correct the partitions in machine.disks")
			all = slices.DeleteFunc(all, func(v volume.Volume) bool { return !has(f, v) })
		}
	}
	before := slices.DeleteFunc(slices.Clone(all), func(v volume.Volume) bool { return !d.Keeper.Mounted(v.Dir) })
	for _, step := range []func() error{
		func() error { return d.take(ctx, f, wanted, all) },
		func() (err error) { f, err = f.Inspect(); return err },
		func() error { return d.keepFileSystems(ctx, f, all) },
		func() error { return d.Keeper.Finish(ctx, f, all) },
		func() error { return d.record(wanted.Name, f) }, // before the first file is written to it
		func() error { return d.settle(ctx, f, before) },
	} {
		if err := step(); err != nil {
			return f.Path, nil, err
		}
	}
	made = map[string]Status{}
	for _, v := range all {
		err := untrusted.MkdirAll(v.Dir, 0o755)
		if err == nil {
			err = d.Keeper.Open(ctx, f, v)
		}
		if err != nil {
			return f.Path, nil, err
		}
		encryption(v).Note()
		made[v.Label] = v.Status(f, encryption(v).Show, d.settled[v.Label])
	}
	return f.Path, made, lacks
}

// keepFileSystems mounts a file system as what it is, whatever the configuration wants by now.
func (d *Volumes) keepFileSystems(ctx context.Context, f disk.Disk, all []volume.Volume) error {
	for i, v := range all {
		if f.Pending.Interrupted(v.Label) {
			continue
		}
		kind, err := d.Keeper.Kind(ctx, f, v)
		if err != nil {
			return err
		}
		v.FileSystem = cmp.Or(kind, v.FileSystem)
		all[i] = d.Keeper.Volume(v.Volume, encryption(v))
	}
	return nil
}

// volume is a partition of machine.disks, whose size is rounded up to MiB.
func (d *Volumes) volume(p config.DataPartition) volume.Volume {
	name := filepath.Base(p.Mountpoint)
	return d.Keeper.Volume(boot.Volume{
		Label: name, Type: boot.TypeData, Size: (int64(p.Size) + disk.Edge - 1) &^ (disk.Edge - 1),
		FileSystem: string(p.FileSystem), Dir: filepath.Join(d.Keeper.Dirs.Var, "mnt", name), Flags: unix.MS_NOATIME | unix.MS_NODEV,
	}, d.layer(name, p.Encryption))
}

// choose is the disk that has one of these volumes, or else the one that the configuration chooses: an empty one, if
// several fit.
func (d *Volumes) choose(system string, wanted config.DataDisk, volumes []volume.Volume) (none disk.Disk, err error) {
	all, err := d.Keeper.Disks.All()
	if err != nil {
		return none, err
	}
	records, err := d.records()
	if err != nil {
		return none, err
	}
	on, made := records[wanted.Name]
	other := func(f disk.Disk) bool { return on.Serial+on.WWID == "" || f.Serial != on.Serial || f.WWID != on.WWID }
	path := disk.Resolved(wanted.Device)
	var known, free, fits []disk.Disk
	why := disk.Rejected{}
	for _, f := range all {
		why[f.Path] = cmp.Or(d.Media.Unfit(f, wanted.Device, wanted.DiskSelector), attached(f, wanted))
		chosen := (wanted.Device == "" || f.Path == path) && why[f.Path] == ""
		switch {
		case f.Path == system:
		case f.Err != nil && wanted.Device != "" && chosen:
			return f, f.Err
		case f.Err != nil:
		case f.Data() && len(missing(f, volumes)) < len(volumes) && (made || chosen || !f.Remote):
			known = append(known, f)
		case chosen && (f.Verdict == disk.Empty || f.Verdict == disk.Unfinished):
			free = append(free, f)
		case chosen && (wanted.Device != "" || f.Verdict == disk.Foreign && !f.Data()):
			fits = append(fits, f)
		}
	}
	if made && on.Serial+on.WWID != "" { // others may have a partition of this name: pods have raw disks
		known = slices.DeleteFunc(known, other)
	}
	fits = append(free, fits...)
	switch {
	case len(known) > 1:
		return none, fmt.Errorf("%s and %s both have partitions of %s: unplug the one whose data isn't wanted", known[0].Path, known[1].Path, wanted.Name)
	case len(known) == 1:
		return known[0], nil
	}
	if made {
		fits = slices.DeleteFunc(free, other) // it was erased
		if len(fits) == 0 {
			return none, fmt.Errorf("the disk of %s (%s) is missing. Plug it in, or give the entry of machine.disks another name to begin on another disk", wanted.Name, on)
		}
	}
	if len(fits) > 0 {
		return fits[0], nil
	}
	return none, fmt.Errorf("no disk fits %s of machine.disks. Plug it in, or correct device or diskSelector. The disks here:\n%s", wanted.Name, d.Keeper.Disks.Text(why))
}

// attached says why an entry doesn't get a disk on the other side of a network: a storage driver may have attached it
// for a pod. It must be named, by its device or by what no other disk has.
func attached(f disk.Disk, wanted config.DataDisk) string {
	if !f.Remote || wanted.Device != "" || wanted.DiskSelector.Serial+wanted.DiskSelector.WWID != "" {
		return ""
	}
	return "it is on the other side of a network: its device, serial or wwid must be given"
}

// take makes the partitions that a disk lacks.
func (d *Volumes) take(ctx context.Context, f disk.Disk, wanted config.DataDisk, volumes []volume.Volume) error {
	field := "machine.disks[" + wanted.Name + "]"
	switch {
	case f.Verdict == disk.Ours || f.Verdict == disk.Newer:
		return d.Keeper.Disks.Refuse(f, "holds "+f.Holds, "Name another disk in "+field+".device")
	case f.Data() && len(missing(f, volumes)) < len(volumes):
		return d.extend(ctx, f, volumes)
	}
	if err := cmp.Or(haveKeys(volumes), d.Keeper.Disks.Late(f)); err != nil {
		return err
	}
	if f.Verdict == disk.Foreign {
		consent := ""
		if wanted.Wipe {
			consent = field + ".wipe is set"
		}
		if err := d.Media.MayErase(f, consent, field+".device", field+".wipe"); err != nil {
			return err
		}
		d.Keeper.Log.Warn(fmt.Sprintf("erasing %s, which held %s: %s", f.Path, f.Holds, consent))
	}
	places, err := placesFrom(disk.Edge, f, volumes)
	if err != nil {
		return d.Keeper.Disks.Refuse(f, err.Error(), "Correct "+field+".partitions")
	}
	d.Keeper.Log.Info(fmt.Sprintf("making the partitions of %s on %s", field, f.Path))
	return d.Keeper.LayOut(ctx, f, places, volumes)
}

func has(f disk.Disk, v volume.Volume) bool { _, err := f.Partition(v.Label); return err == nil }

// missing are the volumes that a disk lacks.
func missing(f disk.Disk, volumes []volume.Volume) []volume.Volume {
	return slices.DeleteFunc(slices.Clone(volumes), func(v volume.Volume) bool { return has(f, v) })
}

// placesFrom are those of volumes on a disk, from an address on.
func placesFrom(at int64, f disk.Disk, volumes []volume.Volume) (places []boot.Place, err error) {
	for _, v := range volumes {
		rest := boot.Usable(f.Size) - at
		size := cmp.Or(v.Size, rest)
		if size > rest || size < config.MinPartition {
			return nil, fmt.Errorf("has no room for %s: %s of at least %s", v.Label, disk.SizeText(max(rest, 0)), disk.SizeText(max(v.Size, config.MinPartition)))
		}
		places = append(places, boot.Place{Volume: v.Volume, Start: at, Size: size})
		at += size
	}
	return places, nil
}

// behind are the places of volumes after the last partition of a disk.
func behind(f disk.Disk, volumes []volume.Volume) ([]boot.Place, error) {
	return placesFrom((int64(f.Last().End+1)*int64(f.Sector)+disk.Edge-1)&^(disk.Edge-1), f, volumes)
}

// extend adds the volumes that a disk lacks behind its last partition. If it lacks none, the last volume grows.
func (d *Volumes) extend(ctx context.Context, f disk.Disk, volumes []volume.Volume) error {
	lacking := missing(f, volumes)
	if err := haveKeys(lacking); err != nil {
		return err
	}
	if len(lacking) == 0 {
		v := volumes[len(volumes)-1]
		if d.Keeper.Mounted(v.Dir) {
			return nil // the next boot does it
		}
		return d.Keeper.Grow(ctx, f, v.Label, v.Size)
	}
	places, err := behind(f, lacking)
	if err == nil {
		err = d.Keeper.FinishPending(ctx, f, volumes)
	}
	if err != nil {
		return err
	}
	return d.Keeper.Add(ctx, f, places, lacking)
}

// Mounted is the condition that all partitions of machine.disks are mounted.
func Mounted(store *resource.Store) dag.Condition { return mounted{store} }

type mounted struct{ store *resource.Store }

func (mounted) String() string { return "volumes of machine.disks to be mounted (gbctl get volumes)" }

// Wait implements dag.Condition. The configuration may change meanwhile.
func (m mounted) Wait(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for range m.store.Watch(ctx, configuration.Configs.Type(), Statuses.Type()) {
		if m.holds() {
			return nil
		}
	}
	return ctx.Err()
}

func (m mounted) holds() bool {
	cfg, err := configuration.Config(m.store)
	if err != nil {
		return false
	}
	lacks := func(p config.DataPartition) bool {
		s, err := Statuses.Get(m.store, filepath.Base(p.Mountpoint))
		return err != nil || !s.Spec.Mounted
	}
	return !slices.ContainsFunc(cfg.Machine.Disks, func(d config.DataDisk) bool { return slices.ContainsFunc(d.Partitions, lacks) })
}

// recordFile is a file on STATE: on which disk each entry of machine.disks was made. While that disk is missing, the
// entry isn't made on another one, whose partitions would hide the data once both are there.
const recordFile = "data-disks.json"

// records are the disks of the entries that were made, by their names.
func (d *Volumes) records() (map[string]disk.Identity, error) {
	records := map[string]disk.Identity{}
	path := filepath.Join(d.Keeper.Dirs.State, recordFile)
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return records, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &records)
	}
	if err == nil && records == nil {
		err = errors.New("it has no entries")
	}
	if err != nil {
		err = fmt.Errorf("%s, which has the disks of machine.disks: %w", path, err)
	}
	return records, err
}

// record notes on which disk an entry was made.
func (d *Volumes) record(name string, f disk.Disk) error {
	records, err := d.records()
	on := f.Identity
	on.Path = "" // it may be another one after the next start
	if err != nil || records[name] == on {
		return err
	}
	records[name] = on
	text, err := json.Marshal(records)
	if err != nil {
		return err
	}
	return boot.WriteFile(filepath.Join(d.Keeper.Dirs.State, recordFile), text, 0o600)
}
