package luks

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/garboard-os/garboard/services/system/disk"
)

const (
	// Recovery is the kind of a key that isn't in the configuration. A token marks its slot, so that it stays when the
	// slots become those of the configuration.
	Recovery      = "recovery"
	recoveryToken = tokenPrefix + Recovery
	// lastSlot is that of a header.
	lastSlot = 31
)

// Locked is the error of a volume that none of the known keys opens.
type Locked struct{ error }

func (l Locked) Unwrap() error { return l.error }

// recovery are the slots of recovery keys. There is one, but for a moment while another one takes its place.
func (m metadata) recovery() (slots []int) {
	for _, t := range m.Tokens {
		for _, text := range t.Slots {
			slot, err := strconv.Atoi(text)
			if _, there := m.Keyslots[slot]; there && err == nil && t.Type == recoveryToken {
				slots = append(slots, slot)
			}
		}
	}
	return slots
}

// given are the slots that the given recovery key may open.
func (l *Layer) given(device string) (keys []Key) {
	if l.Given == nil || l.Given() == "" {
		return nil
	}
	m, _ := read(device) // cryptsetup says what is wrong with it
	for _, slot := range m.recovery() {
		keys = append(keys, Key{Slot: slot, Kind: Recovery, Passphrase: []byte(l.Given())})
	}
	return keys
}

// tests are the keys that open a device, without opening it.
func (l *Layer) tests(ctx context.Context, device string) func(Key) error {
	return func(key Key) error { return l.run(ctx, key.Passphrase, "open", "--test-passphrase", device) }
}

// RecoveryKey is what is known of the one of a volume.
type RecoveryKey struct {
	Label     string
	Encrypted bool
	Slots     []int // none: it has none
	Added     time.Time
}

// Recovery returns what is known of the recovery key of a device.
func (l *Layer) Recovery(device string) (RecoveryKey, error) {
	k := RecoveryKey{Label: l.Label}
	c, err := disk.Identify(device)
	if err != nil || c.Kind != kind {
		return k, err
	}
	m, err := read(device)
	k.Encrypted, k.Slots = true, m.recovery()
	for _, t := range m.Tokens {
		if t.Type == recoveryToken && t.Added.After(k.Added) {
			k.Added = t.Added
		}
	}
	return k, err
}

// Unlocks is nil if a recovery key opens an encrypted device. It costs little, as other slots aren't tried.
func (l *Layer) Unlocks(ctx context.Context, device, key string) error {
	k, err := l.Recovery(device)
	if err == nil {
		err = fmt.Errorf("%s has no recovery key", l.Label)
	}
	for _, slot := range k.Slots {
		if err = l.opens(ctx, device, &Key{Slot: slot, Kind: Recovery, Passphrase: []byte(key)}); err == nil {
			return nil
		}
		err = fmt.Errorf("it isn't the recovery key of %s: %w", l.Label, err)
	}
	return err
}

// AddRecovery gives an encrypted device a recovery key. It takes the place of another one, which goes after the new one
// is proven. Whenever the power goes, one of them stays: a slot without a token is emptied by Settle.
func (l *Layer) AddRecovery(ctx context.Context, device, key string) error {
	m, err := read(device)
	if err != nil {
		return err
	}
	keys, err := l.Keys()
	if err != nil {
		return err
	}
	taken := m.slots()
	for _, k := range keys {
		taken = append(taken, k.Slot)
	}
	added := Key{Slot: lastSlot, Kind: Recovery, Passphrase: []byte(key)}
	for slices.Contains(taken, added.Slot) {
		added.Slot--
	}
	with, err := l.try(ctx, device, l.tests(ctx, device))
	if err != nil {
		return err
	}
	if err := l.add(ctx, device, &added, with, false); err != nil {
		return err
	}
	if err := l.imports(ctx, device, &token{Type: recoveryToken, Slots: []string{strconv.Itoa(added.Slot)}, Added: time.Now().UTC()}); err != nil {
		return err
	}
	return l.removeRecovery(ctx, device, m, added)
}

// RemoveRecovery removes the recovery key. It stays if no other key opens the device.
func (l *Layer) RemoveRecovery(ctx context.Context, device string) error {
	m, err := read(device)
	if err != nil {
		return err
	}
	with, err := l.try(ctx, device, l.tests(ctx, device))
	if err != nil {
		return fmt.Errorf("the recovery key stays: %w", err)
	}
	return l.removeRecovery(ctx, device, m, with)
}

// removeRecovery removes all recovery keys of a header, and their tokens.
func (l *Layer) removeRecovery(ctx context.Context, device string, m metadata, with Key) error {
	for _, slot := range m.recovery() {
		if err := l.remove(ctx, device, slot, with); err != nil {
			return err
		}
	}
	return l.sweep(ctx, device)
}
