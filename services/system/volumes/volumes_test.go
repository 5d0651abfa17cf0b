package volumes

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/disk"
	"github.com/garboard-os/garboard/services/system/volume"
)

// noSystem is a machine without volumes of a system.
func noSystem() (map[string]Status, bool) { return nil, true }

// The condition holds when each partition is mounted, or isn't in the configuration any more.
func TestVolumesAreAwaited(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := resource.NewStore()
		configure := func(names ...string) {
			disk := config.DataDisk{Name: "data"}
			for _, name := range names {
				disk.Partitions = append(disk.Partitions, config.DataPartition{Mountpoint: "/var/mnt/" + name})
			}
			c := &config.Config{Machine: config.Machine{Disks: []config.DataDisk{disk}}}
			if err := configuration.Configs.Put(store.As("test"), configuration.ConfigID, c); err != nil {
				t.Fatal(err)
			}
		}
		configure("a", "b")
		held := false
		go func() { held = Mounted(store).Wait(t.Context()) == nil }()
		for id, status := range map[string]Status{"a": {Mounted: true}, "b": {Problem: "no disk"}} {
			if err := Statuses.Put(store.As("test"), id, status); err != nil {
				t.Fatal(err)
			}
		}
		if synctest.Wait(); held {
			t.Error("b isn't mounted, and isn't awaited")
		}
		configure("a")
		if synctest.Wait(); !held {
			t.Error("b isn't configured any more, and is awaited")
		}
	})
}

// What machine.kubelet.persist keeps is a volume, beside the partition of the same name: it isn't mounted before the
// next boot.
func TestWhatIsKeptIsNamed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := resource.NewStore()
		c := &config.Config{Machine: config.Machine{
			Kubelet: config.Kubelet{Persist: []string{"cni"}},
			Disks:   []config.DataDisk{{Name: "data", Partitions: []config.DataPartition{{Mountpoint: "/var/mnt/cni"}}}},
		}}
		if err := configuration.Configs.Put(store.As("test"), configuration.ConfigID, c); err != nil {
			t.Fatal(err)
		}
		keeper := &volume.Keeper{Dirs: volume.Dirs{Var: t.TempDir(), Etc: "/etc"}}
		rt, err := resource.NewRuntime(store, slog.New(slog.DiscardHandler), (&Volumes{Mode: boot.Container, Keeper: keeper, System: noSystem}).Controller())
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var done sync.WaitGroup
		done.Go(func() { _ = rt.Run(ctx) })
		defer done.Wait()
		defer cancel()
		is := func(want Status) {
			t.Helper()
			synctest.Wait()
			if got, err := Statuses.Get(store, "persist/cni"); err != nil || got.Spec != want {
				t.Errorf("%+v, %v", got.Spec, err)
			}
		}
		is(Status{Disk: "EPHEMERAL", Problem: "what pods leave there is kept from the next boot on"})
		keeper.Hold("/etc/cni/net.d")
		time.Sleep(retryData)
		is(Status{Disk: "EPHEMERAL", Mounted: true})
		if len(Statuses.List(store)) != 2 {
			t.Errorf("%v", Statuses.List(store))
		}
	})
}

// A container has a directory in place of each partition, also when it looks again.
func TestVolumesOfAContainer(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	d := &Volumes{Mode: boot.Container, Keeper: &volume.Keeper{Dirs: volume.Dirs{Var: dir}}}
	for range 2 {
		if _, _, err := d.mount(t.Context(), config.DataDisk{Partitions: []config.DataPartition{{Mountpoint: "/var/mnt/data"}}}); err != nil {
			t.Fatal(err)
		}
		if info, err := os.Stat(filepath.Join(dir, "mnt/data")); err != nil || !info.IsDir() {
			t.Errorf("%v, %v", info, err)
		}
	}
}

// What a storage driver has attached for a pod must be named.
func TestDisksOfPodsAreNotTaken(t *testing.T) {
	t.Parallel()
	lun := disk.Disk{Remote: true}
	size := config.DiskSelector{Size: config.DiskSize{Comparison: ">", Bytes: 1}}
	for _, tt := range []struct {
		dev    disk.Disk
		wanted config.DataDisk
		fits   bool
	}{
		{lun, config.DataDisk{DiskSelector: size}, false},
		{lun, config.DataDisk{DiskSelector: config.DiskSelector{WWID: "naa.6001*"}}, true},
		{lun, config.DataDisk{Device: "/dev/disk/by-id/wwn-0x6001"}, true},
		{disk.Disk{}, config.DataDisk{DiskSelector: size}, true},
	} {
		if why := attached(tt.dev, tt.wanted); (why == "") != tt.fits {
			t.Errorf("%+v for %+v: %q", tt.dev, tt.wanted, why)
		}
	}
}
