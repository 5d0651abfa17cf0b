package disks

import (
	"testing"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/system/configuration"
)

// The disk that this boot is from may come late, and be broken.
func TestDiskOfThisBoot(t *testing.T) {
	t.Parallel()
	d := New(Options{Mode: boot.Machine, Installed: true, Logs: logs.New(t.Output())})
	d.Keeper.Disks.Is = func(string) bool { return false }
	if state, err := d.MountState(t.Context()); state != configuration.StateLate || err == nil {
		t.Error(state, err)
	}
	d.Keeper.Disks.Began = d.Keeper.Disks.Began.Add(-ownPatience)
	if state, err := d.MountState(t.Context()); state != configuration.StateAbsent || err != nil {
		t.Error(state, err)
	}
}
