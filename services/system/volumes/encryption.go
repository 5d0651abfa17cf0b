package volumes

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/system/disk"
	"github.com/garboard-os/garboard/services/system/luks"
	"github.com/garboard-os/garboard/services/system/volume"
)

// layer is the encryption of a partition of machine.disks. Its keys are in the configuration, which is on STATE.
func (d *Volumes) layer(label string, e *config.Encryption) *luks.Layer {
	return &luks.Layer{
		Label: label, Field: "machine.disks", Derivation: d.derivation, History: luks.History(filepath.Join(d.Keeper.Dirs.State, "disk-keys.json")), Processes: d.Keeper.Processes, Log: d.Keeper.Log,
		Wipe: "gbctl reset --system-labels-to-wipe EPHEMERAL --user-disks-to-wipe DISK --reboot",
		Keys: func() ([]luks.Key, error) {
			if e == nil {
				return nil, nil
			}
			return d.KeysOf(e.Keys, label), nil
		},
		Kept: func() ([]luks.Key, error) { return nil, nil },
		Keep: func([]luks.Key) error { return nil },
	}
}

// encryption is that of a volume of machine.disks, between its partition and its file system.
func encryption(v volume.Volume) *luks.Layer { return v.Layers[1].(*luks.Layer) }

// haveKeys is an error if volumes can't be encrypted that are to be. Nothing is made then.
func haveKeys(volumes []volume.Volume) (err error) {
	for _, v := range volumes {
		keys, failed := encryption(v).Keys()
		err = errors.Join(err, failed, luks.Missing(keys))
	}
	return err
}

// settle gives volumes the keys of the configuration, once a boot. They are mounted since an earlier call: it takes a
// second for each key, for which nobody waits.
func (d *Volumes) settle(ctx context.Context, f disk.Disk, volumes []volume.Volume) error {
	for _, v := range volumes {
		if _, done := d.settled[v.Label]; done {
			continue
		}
		p, err := f.Device(v.Label)
		if err == nil {
			err = encryption(v).Settle(ctx, p.Path)
			encryption(v).Note()
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if d.settled == nil {
			d.settled = map[string]error{}
		}
		if d.settled[v.Label] = err; err != nil {
			d.Keeper.Log.Warn(fmt.Sprintf("encryption of %s: %v", v.Label, err))
		}
	}
	return nil
}
