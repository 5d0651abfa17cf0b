package disks

import (
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"

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
