// Package luks encrypts volumes with LUKS2, by cryptsetup(8) and the kernel's dm-crypt. The header of a volume is as
// cryptsetup's own: the LUKS2 On-Disk Format Specification 1.1.1.
//
// A key is a passphrase in a slot of the header. No key is ever in a file or on a command line.
package luks

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/garboard-os/garboard/services/core/process"
	"github.com/garboard-os/garboard/services/system/disk"
)

const (
	program = "/usr/sbin/cryptsetup"
	// programTimeout: the derivation of one key takes seconds on a slow machine, and cryptsetup may try each slot.
	programTimeout = 2 * time.Minute
	// mapper is where opened devices are.
	mapper = "/dev/mapper"

	// kind is the content of an encrypted device (disk.Identify).
	kind = "LUKS"
)

// Derivation is how a passphrase becomes the key of its slot. 64 MiB are there also on a machine with 1 GiB whose pods
// run already.
var Derivation = []string{"--pbkdf", "argon2id", "--pbkdf-memory", "65536", "--pbkdf-force-iterations", "4", "--pbkdf-parallel", "1"}

// A Key opens a volume.
type Key struct {
	Slot       int
	Kind       string // as in the configuration: nodeID, static or kms; or Recovery
	Passphrase []byte
	Sealer     Sealer // has the passphrase; nil: it is known
	Err        error  // why this machine doesn't have it; nil: it has
	Kept       any    // the form in which the caller keeps it
	sealed     []byte // what the sealer has it in, once that is known
}

func (k Key) String() string { return fmt.Sprintf("the %s key of slot %d", k.Kind, k.Slot) }

// A Layer is the encryption of a volume (volume.Layer). A volume without keys isn't encrypted.
type Layer struct {
	Label string
	Field string // of the configuration, with its keys
	Wipe  string // the command after which the volume is made anew
	// Encrypt is the command that encrypts it; "": that is Wipe.
	Encrypt string
	Keys    func() ([]Key, error) // those that the volume is to have; none: it isn't to be encrypted
	Kept    func() ([]Key, error) // others, which may open it
	// Keep makes Keys, and some that stay, those that are kept: called before others go.
	Keep func(stay []Key) error
	// Given is a recovery key that somebody has given to this boot; "": none.
	Given func() string
	// Derivation is that of new keys; tests have a faster one.
	Derivation []string
	History    History
	Processes  *process.Table
	Log        *slog.Logger

	uses map[int]time.Time // what is to be noted in the history, by slot
}

// Describe implements volume.Layer.
func (l *Layer) Describe() string { return "LUKS2 encryption" }

// On reports whether nothing is to be made: the volume has content, which a reset has to wipe before, or it isn't to be
// encrypted.
func (l *Layer) On(device string) (bool, error) {
	if c, err := disk.Identify(device); c.Kind != "" || err != nil {
		return true, err
	}
	keys, err := l.Keys()
	return len(keys) == 0, err
}

// Create implements volume.Layer. The journal of the disk covers it.
func (l *Layer) Create(ctx context.Context, device string) error {
	keys, err := l.Keys()
	if err = errors.Join(err, l.Close()); err != nil || len(keys) == 0 { // what was there before may be open
		return err
	}
	if err := Missing(keys); err != nil {
		return err
	}
	if err := l.Keep(nil); err != nil {
		return err
	}
	token, err := keys[0].seal(ctx)
	if err != nil {
		return err
	}
	args := slices.Concat([]string{"luksFormat", "--type", "luks2", "--cipher", "aes-xts-plain64", "--key-size", "512",
		"--luks2-metadata-size", "32k", "--label", l.Label, "--key-slot", strconv.Itoa(keys[0].Slot)}, l.derivation(keys[0]))
	if err := l.run(ctx, keys[0].Passphrase, append(args, device)...); err != nil {
		return err
	}
	if err := l.imports(ctx, device, token); err != nil {
		return err
	}
	return l.reconcile(ctx, device, keys)
}

// Missing is the error of keys that this machine doesn't have, if there are any.
func Missing(keys []Key) (err error) {
	for _, key := range keys {
		if key.Err != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", key, key.Err))
		}
	}
	return err
}

// Open implements volume.Layer. What isn't encrypted is used as it is. cryptsetup repairs a damaged header.
func (l *Layer) Open(ctx context.Context, device string) (string, error) {
	c, err := disk.Identify(device)
	if err != nil || c.Kind != kind {
		return device, err
	}
	above := filepath.Join(mapper, l.name())
	if _, err := os.Stat(above); !errors.Is(err, fs.ErrNotExist) {
		return above, err
	}
	broken := damage(device)
	by, err := l.try(ctx, device, func(key Key) error { return l.run(ctx, key.Passphrase, "open", "--allow-discards", device, l.name()) })
	if err != nil {
		if broken != nil {
			err = fmt.Errorf("its header is damaged, and isn't repaired from its copy (%w): %w", broken, err)
		}
		return above, err
	}
	l.used(by.Slot, time.Now())
	if left := damage(device); left != nil {
		l.Log.Warn(fmt.Sprintf("the header of %s is damaged: %v", l.Label, left))
	} else if broken != nil {
		l.Log.Warn(fmt.Sprintf("the header of %s was damaged, and is repaired from its copy: %v", l.Label, broken))
	}
	return above, nil
}

// try returns the first key with which do works. Those that are sealed come last: they may have to be waited for.
func (l *Layer) try(ctx context.Context, device string, do func(Key) error) (none Key, failed error) {
	keys, err := l.Keys()
	kept, keptErr := l.Kept()
	if keys = slices.Concat(keys, kept, l.given(device)); len(keys) == 0 {
		failed = fmt.Errorf("%s is encrypted, and has no keys in %s: put them back, or wipe it with %s", l.Label, l.Field, l.Wipe)
	}
	slices.SortStableFunc(keys, func(a, b Key) int { return cmp.Compare(min(1, len(b.Passphrase)), min(1, len(a.Passphrase))) })
	for _, key := range keys {
		err := l.unseal(ctx, device, &key)
		if err == nil {
			err = do(key)
		}
		if err == nil || ctx.Err() != nil {
			return key, err
		}
		failed = errors.Join(failed, fmt.Errorf("%s: %w", key, err))
	}
	return none, errors.Join(err, keptErr, Locked{failed})
}

// Unlike is the error of a volume with content that is encrypted, or isn't, unlike what is wanted.
type Unlike string

func (u Unlike) Error() string { return string(u) }

// Settle gives an encrypted device its keys. The error says, too, that a device with content is encrypted, or isn't,
// unlike what is wanted.
func (l *Layer) Settle(ctx context.Context, device string) error {
	keys, err := l.Keys()
	c, contentErr := disk.Identify(device)
	if err := errors.Join(err, contentErr, Missing(keys)); err != nil {
		return err
	}
	switch encrypted := c.Kind == kind; {
	case !encrypted && len(keys) > 0:
		return Unlike("isn't encrypted, because it was made before it had keys; to have it encrypted: " + cmp.Or(l.Encrypt, l.Wipe))
	case !encrypted:
		return nil
	case len(keys) == 0:
		return Unlike("stays encrypted without keys in the configuration, until it is wiped with " + l.Wipe)
	}
	return l.reconcile(ctx, device, keys)
}

// Close implements volume.Layer.
func (l *Layer) Close() error {
	if !l.IsOpen() {
		return nil
	}
	return l.run(context.Background(), nil, "close", l.name())
}

// IsOpen reports whether the device is open.
func (l *Layer) IsOpen() bool {
	_, err := os.Stat(filepath.Join(mapper, l.name()))
	return !errors.Is(err, fs.ErrNotExist)
}

func (l *Layer) name() string { return disk.Mapped + l.Label }

// reconcile makes the slots of a header those of some keys. Whenever the power goes, a key that is kept opens the
// device:
//
//	keys for free slots are added ─▶ one of the keys is proven ─▶ all are kept ─▶ taken slots get theirs, and others go
//
// Keys of other kinds stay until one of the keys surely opens the next boot, too.
func (l *Layer) reconcile(ctx context.Context, device string, keys []Key) error {
	m, err := read(device)
	if err != nil {
		return err
	}
	slots, keys := m.slots(), slices.Clone(keys)
	var opens *Key // one of the keys that is proven
	var replace []Key
	for i := range keys {
		switch key := &keys[i]; {
		case slices.Contains(m.recovery(), key.Slot):
			return fmt.Errorf("slot %d has the recovery key: give the %s key of the configuration another one", key.Slot, key.Kind)
		case !slices.Contains(slots, key.Slot):
			replace = append(replace, *key)
		case l.opens(ctx, device, key) == nil:
			opens = key
		default:
			replace = append(replace, *key)
		}
	}
	wanted := func(slot int) bool { return slices.ContainsFunc(keys, func(k Key) bool { return k.Slot == slot }) }
	var stay []Key
	lasts := slices.ContainsFunc(keys, Key.lasts)
	if !lasts {
		if stay, err = l.Kept(); err != nil {
			return err
		}
		stay = slices.DeleteFunc(stay, func(old Key) bool {
			return slices.ContainsFunc(keys, func(k Key) bool { return k.Slot == old.Slot && k.Kind == old.Kind })
		})
	}
	if opens == nil {
		if opens, err = l.first(ctx, device, m, replace); err != nil {
			return err
		}
	}
	if err := l.Keep(stay); err != nil {
		return err
	}
	var left []string
	for _, key := range replace {
		taken := slices.Contains(slots, key.Slot)
		if key.Slot == opens.Slot {
			continue
		}
		if taken && !lasts && !m.has(key) {
			left = append(left, strconv.Itoa(key.Slot))
		} else if err := l.add(ctx, device, &key, *opens, taken); err != nil {
			return err
		}
	}
	for _, slot := range slots {
		if slices.Contains(m.recovery(), slot) || wanted(slot) {
			continue
		}
		if !lasts {
			left = append(left, strconv.Itoa(slot))
		} else if err := l.remove(ctx, device, slot, *opens); err != nil {
			return err
		}
	}
	if err := l.sweep(ctx, device); err != nil || len(left) == 0 {
		return err
	}
	return fmt.Errorf("the former keys (slot %s) stay until a boot has opened it with %s: restart the machine", strings.Join(left, ", "), keys[0])
}

// first adds the first of some keys to a device that another key opens, or none of them does. If the slots of all are
// taken, such as by those of a former mainboard, a recovery key that was given opens it. A slot is as free if the
// power went before it had its token.
func (l *Layer) first(ctx context.Context, device string, m metadata, keys []Key) (*Key, error) {
	free := slices.DeleteFunc(slices.Clone(keys), func(k Key) bool {
		return slices.Contains(m.slots(), k.Slot) && (k.Sealer == nil || m.has(k))
	})
	if given := l.given(device); len(free) == 0 && len(given) > 0 {
		return &given[0], l.opens(ctx, device, &given[0])
	}
	none := errors.New("none of the keys of the configuration opens it: leave one as it was, and change the others first")
	if len(free) == 0 {
		return nil, none
	}
	taken := slices.Contains(m.slots(), free[0].Slot)
	with, err := l.try(ctx, device, l.tests(ctx, device))
	if err == nil && taken && with.Slot == free[0].Slot {
		err = none
	}
	if err != nil {
		return nil, err
	}
	return &free[0], l.add(ctx, device, &free[0], with, taken)
}

// opens proves a key in its slot.
func (l *Layer) opens(ctx context.Context, device string, key *Key) error {
	if err := l.unseal(ctx, device, key); err != nil {
		return err
	}
	return l.run(ctx, key.Passphrase, "open", "--test-passphrase", "--key-slot", strconv.Itoa(key.Slot), device)
}

// add adds a key, perhaps in the place of another one, and proves it. The new passphrase has a pipe of its own.
func (l *Layer) add(ctx context.Context, device string, key *Key, with Key, taken bool) error {
	l.Log.Info(fmt.Sprintf("%s gets %s", l.Label, key))
	token, err := key.seal(ctx)
	if err == nil && taken {
		err = l.remove(ctx, device, key.Slot, with)
	}
	if err != nil {
		return err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	_, err = w.Write(key.Passphrase) // a pipe has room for it
	if err := errors.Join(err, w.Close()); err != nil {
		return err
	}
	cmd := l.command(with.Passphrase, slices.Concat([]string{"luksAddKey", "--key-slot", strconv.Itoa(key.Slot)}, l.derivation(*key), []string{device, "/dev/fd/3"})...)
	cmd.ExtraFiles = []*os.File{r}
	if err := l.runs(ctx, cmd); err != nil {
		return err
	}
	if err := l.imports(ctx, device, token); err != nil {
		return err
	}
	l.used(key.Slot, time.Time{})
	return l.opens(ctx, device, key)
}

// remove empties a slot. cryptsetup refuses this with the key of that slot, which so is never the last one.
func (l *Layer) remove(ctx context.Context, device string, slot int, with Key) error {
	l.Log.Info(fmt.Sprintf("%s loses the key of slot %d", l.Label, slot))
	return l.run(ctx, with.Passphrase, "luksKillSlot", device, strconv.Itoa(slot))
}

func (l *Layer) command(passphrase []byte, args ...string) *exec.Cmd {
	cmd := exec.Command(program, append([]string{args[0], "--batch-mode"}, args[1:]...)...)
	if passphrase != nil {
		cmd.Args = append(cmd.Args, "--key-file", "-")
		cmd.Stdin = bytes.NewReader(passphrase)
	}
	cmd.Env = append(os.Environ(), "DM_DISABLE_UDEV=1") // libdevmapper would wait for udevd
	return cmd
}

func (l *Layer) run(ctx context.Context, passphrase []byte, args ...string) error {
	return l.runs(ctx, l.command(passphrase, args...))
}

func (l *Layer) runs(ctx context.Context, cmd *exec.Cmd) error {
	ctx, cancel := context.WithTimeout(ctx, programTimeout)
	defer cancel()
	return l.Processes.Run(ctx, cmd)
}

// metadata is what is read of a header (section 3 of the specification).
type metadata struct {
	Keyslots map[int]struct{} `json:"keyslots"`
	Tokens   map[int]token    `json:"tokens"`
}

func (m metadata) slots() []int { return slices.Sorted(maps.Keys(m.Keyslots)) }

// has reports whether a slot has a key of this kind that is sealed.
func (m metadata) has(key Key) bool {
	for _, t := range m.Tokens {
		if t.Type == key.token() && slices.Contains(t.Slots, strconv.Itoa(key.Slot)) {
			return true
		}
	}
	return false
}

func read(device string) (m metadata, err error) {
	file, err := os.Open(device)
	if err != nil {
		return m, err
	}
	defer file.Close()
	all, err := header(file, 0)
	if err == nil {
		err = json.NewDecoder(bytes.NewReader(all[headerSize:])).Decode(&m)
	}
	if err != nil {
		return metadata{}, fmt.Errorf("the header of %s: %w", device, err)
	}
	return m, nil
}

// Show has the slots of an encrypted device with the kinds of their keys, and when they last opened it, for users; ""
// of another device.
func (l *Layer) Show(device string) (slots, opened string, err error) {
	if c, err := disk.Identify(device); err != nil || c.Kind != kind {
		return "", "", err
	}
	m, err := read(device)
	keys, keysErr := l.Keys()
	kept, keptErr := l.Kept()
	kinds := map[int]string{}
	for _, slot := range m.recovery() {
		kinds[slot] = Recovery
	}
	for _, key := range slices.Concat(kept, keys) {
		kinds[key.Slot] = key.Kind
	}
	var all []string
	for _, slot := range m.slots() {
		all = append(all, fmt.Sprintf("%d %s", slot, cmp.Or(kinds[slot], "unknown")))
	}
	return "LUKS2 (" + strings.Join(all, ", ") + ")", l.History.text(l.Label, m.slots()), errors.Join(err, keysErr, keptErr)
}
