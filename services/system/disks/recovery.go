package disks

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/system/disk"
	"github.com/garboard-os/garboard/services/system/luks"
	"github.com/garboard-os/garboard/services/system/volume"
)

// triesPause is the least time after a wrong recovery key.
const triesPause = 2 * time.Second

// ErrNotLocked is the error of Unlock on a machine whose own keys open its disk.
var ErrNotLocked = errors.New("no encrypted volume of this machine waits for a recovery key")

// Unlock takes the recovery key of the first volume that no other key has opened. After a wrong one, the next one
// waits.
func (d *Disks) Unlock(ctx context.Context, key string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	err := d.unlock(ctx, key)
	if err != nil {
		d.log.Warn("a recovery key was refused", "err", err)
		sleep.For(ctx, triesPause)
	}
	return err
}

func (d *Disks) unlock(ctx context.Context, key string) error {
	for _, l := range d.layers {
		device, err := volume.Partition(ctx, d.at, l.Label)
		if err != nil {
			return fmt.Errorf("%w: %w", ErrNotLocked, err)
		}
		if k, err := l.Recovery(device); err != nil || !k.Encrypted || l.IsOpen() {
			continue
		}
		if err := l.Unlocks(ctx, device, key); err != nil {
			return err
		}
		d.key = key
		d.log.Warn(l.Label + " is opened with its recovery key; then the machine gets its own keys of the configuration")
		sleep.Wake(d.Unlocked)
		return nil
	}
	return ErrNotLocked
}

// WipeLocked has the disk wiped whose STATE no key has opened, as a reset of all of it does. The name of its device
// says that this is wanted.
func (d *Disks) WipeLocked(device string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.locked == nil {
		return ErrNotLocked
	}
	if device != d.locked.Path {
		return fmt.Errorf("%q isn't the locked disk, which is %s", device, d.locked)
	}
	err := d.locked.Note(disk.Journal{Step: disk.StepWipe, Label: strings.Join(boot.WipeLabels, " ")})
	if err == nil {
		sleep.Wake(d.Unlocked)
	}
	return err
}

// RecoveryKeys are those of the encrypted volumes of the system's disk.
func (d *Disks) RecoveryKeys(ctx context.Context) (all []luks.RecoveryKey, err error) {
	return all, d.encrypted(ctx, func(_ *luks.Layer, _ string, k luks.RecoveryKey) error {
		all = append(all, k)
		return nil
	})
}

// AddRecoveryKey gives all encrypted volumes of the system's disk a recovery key.
func (d *Disks) AddRecoveryKey(ctx context.Context, key string) error {
	return d.encrypted(ctx, func(l *luks.Layer, device string, _ luks.RecoveryKey) error { return l.AddRecovery(ctx, device, key) })
}

// RemoveRecoveryKey removes it from all volumes of the system's disk.
func (d *Disks) RemoveRecoveryKey(ctx context.Context) error {
	return d.encrypted(ctx, func(l *luks.Layer, device string, _ luks.RecoveryKey) error { return l.RemoveRecovery(ctx, device) })
}

// encrypted calls do with each encrypted volume of the system's disk. It is an error if there is none.
func (d *Disks) encrypted(ctx context.Context, do func(l *luks.Layer, device string, k luks.RecoveryKey) error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	system := d.System()
	if system == nil {
		return ErrNoSystem
	}
	none := errors.New("no volume of this machine is encrypted (machine.systemDiskEncryption)")
	var failed error
	for _, l := range d.layers {
		device, err := volume.Partition(ctx, system.Path, l.Label)
		var k luks.RecoveryKey
		if err == nil {
			k, err = l.Recovery(device)
		}
		if err == nil && k.Encrypted {
			none, err = nil, do(l, device, k)
			l.Note()
		}
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("%s: %w", l.Label, err))
		}
	}
	return errors.Join(none, failed)
}
