package disks

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
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/machine"
)

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
			if err := machine.Configs.Put(store.As("test"), machine.ConfigID, c); err != nil {
				t.Fatal(err)
			}
		}
		configure("a", "b")
		held := false
		go func() { held = Mounted(store).Wait(t.Context()) == nil }()
		for id, status := range map[string]VolumeStatus{"a": {Mounted: true}, "b": {Problem: "no disk"}} {
			if err := VolumeStatuses.Put(store.As("test"), id, status); err != nil {
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

// What machine.kubelet.persist keeps is a volume, beside the partition of the same name: it isn't mounted before the next boot.
func TestWhatIsKeptIsNamed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := resource.NewStore()
		c := &config.Config{Machine: config.Machine{
			Kubelet: config.Kubelet{Persist: []string{"cni"}},
			Disks:   []config.DataDisk{{Name: "data", Partitions: []config.DataPartition{{Mountpoint: "/var/mnt/cni"}}}},
		}}
		if err := machine.Configs.Put(store.As("test"), machine.ConfigID, c); err != nil {
			t.Fatal(err)
		}
		d := New(Options{Mode: boot.Container, Store: store, Logs: logs.New(t.Output()), varDir: t.TempDir(), etcDir: "/etc"})
		rt, err := resource.NewRuntime(store, slog.New(slog.DiscardHandler), d.VolumeController())
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var done sync.WaitGroup
		done.Go(func() { _ = rt.Run(ctx) })
		defer done.Wait()
		defer cancel()
		is := func(want VolumeStatus) {
			t.Helper()
			synctest.Wait()
			if got, err := VolumeStatuses.Get(store, "persist/cni"); err != nil || got.Spec != want {
				t.Errorf("%+v, %v", got.Spec, err)
			}
		}
		is(VolumeStatus{Disk: "EPHEMERAL", Problem: "what pods leave there is kept from the next boot on"})
		d.hold("/etc/cni/net.d")
		time.Sleep(retryData)
		is(VolumeStatus{Disk: "EPHEMERAL", Mounted: true})
		if len(VolumeStatuses.List(store)) != 2 {
			t.Errorf("%v", VolumeStatuses.List(store))
		}
	})
}

// A container has a directory in place of each partition, also when it looks again.
func TestVolumesOfAContainer(t *testing.T) {
	t.Parallel()
	store := resource.NewStore()
	dir := t.TempDir()
	d := New(Options{Mode: boot.Container, Store: store, Logs: logs.New(t.Output()), varDir: dir})
	for range 2 {
		if _, _, err := d.mountDisk(t.Context(), config.DataDisk{Partitions: []config.DataPartition{{Mountpoint: "/var/mnt/data"}}}); err != nil {
			t.Fatal(err)
		}
		if info, err := os.Stat(filepath.Join(dir, "mnt/data")); err != nil || !info.IsDir() {
			t.Errorf("%v, %v", info, err)
		}
	}
}
