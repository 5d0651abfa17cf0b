package luks

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/garboard-os/garboard/services/system/disk"
)

// quick derives the keys of random passphrases, which nobody can guess.
var quick = []string{"--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"}

// tokenPrefix and the kind of a key are the type of its tokens.
const tokenPrefix = "garboard-"

// A Sealer keeps the passphrases of a kind of keys where only this machine gets them back from.
type Sealer interface {
	// Seal returns what Unseal needs. It is in the header, for everybody to read.
	Seal(ctx context.Context, passphrase []byte) (sealed []byte, err error)
	Unseal(ctx context.Context, sealed []byte) (passphrase []byte, err error)
	// Lasts reports whether a later boot surely gets back what this one did; nil: what it seals.
	Lasts(sealed []byte) bool
}

func (key Key) lasts() bool { return key.Sealer == nil || key.Sealer.Lasts(key.sealed) }

func (l *Layer) derivation(key Key) []string {
	if key.Sealer == nil && key.Kind != Recovery {
		return l.Derivation
	}
	return quick
}

// token is the part of a header that has what belongs to a slot (section 3.6 of the specification).
type token struct {
	Type   string    `json:"type"`
	Slots  []string  `json:"keyslots"`
	Sealed []byte    `json:"sealed,omitempty"`
	Added  time.Time `json:"added,omitzero"` // a recovery key
}

// tokens are those of a header. cryptsetup repairs a damaged one before it shows it.
func (l *Layer) tokens(ctx context.Context, device string) (map[int]token, error) {
	var text bytes.Buffer
	cmd := l.command(nil, "luksDump", "--dump-json-metadata", device)
	cmd.Stdout = &text
	if err := l.runs(ctx, cmd); err != nil {
		return nil, err
	}
	var m metadata
	if err := json.Unmarshal(text.Bytes(), &m); err != nil {
		return nil, fmt.Errorf("the tokens of %s: %w", l.Label, err)
	}
	return m.Tokens, nil
}

// Sealed calls do with all that the header of a device has of a kind of keys.
func (l *Layer) Sealed(ctx context.Context, device, of string, do func(sealed []byte)) error {
	if c, err := disk.Identify(device); c.Kind != kind || err != nil {
		return err
	}
	all, err := l.tokens(ctx, device)
	for _, t := range all {
		if t.Type == tokenPrefix+of && len(t.Slots) > 0 {
			do(t.Sealed)
		}
	}
	return err
}

// SealAgain gives each key of a kind that is sealed by an own token a further token, which anew makes of that, unless
// it has one that is new, or anew makes none. Then tokens that are neither go; a key without an own token keeps all.
func (l *Layer) SealAgain(ctx context.Context, device, of string, isNew, own func(sealed []byte) bool, anew func(sealed []byte) ([]byte, error)) error {
	if c, err := disk.Identify(device); c.Kind != kind || err != nil {
		return err
	}
	all, err := l.tokens(ctx, device)
	if err != nil {
		return err
	}
	known, others := map[string]token{}, map[string][]int{} // by slot
	for id, t := range all {
		if t.Type != tokenPrefix+of || len(t.Slots) == 0 {
			continue
		}
		switch slot := t.Slots[0]; {
		case isNew(t.Sealed), own(t.Sealed) && !isNew(known[slot].Sealed):
			known[slot] = t
		case !own(t.Sealed):
			others[slot] = append(others[slot], id)
		}
	}
	for slot, t := range known {
		if !isNew(t.Sealed) {
			sealed, err := anew(t.Sealed)
			if err == nil && sealed != nil {
				err = l.imports(ctx, device, &token{Type: t.Type, Slots: t.Slots, Sealed: sealed})
			}
			if err != nil {
				return fmt.Errorf("seal the %s key of %s anew: %w", of, l.Label, err)
			}
		}
		if err := l.drop(ctx, device, others[slot]...); err != nil {
			return err
		}
	}
	return nil
}

// unseal gets the passphrase of a key that is sealed in a header.
func (l *Layer) unseal(ctx context.Context, device string, key *Key) error {
	if key.Sealer == nil || key.Err != nil {
		return key.Err
	}
	all, err := l.tokens(ctx, device)
	if err != nil {
		return err
	}
	err = fmt.Errorf("the header has no token of type %s for the slot", key.token())
	for _, t := range all {
		if t.Type == key.token() && slices.Contains(t.Slots, strconv.Itoa(key.Slot)) {
			if key.Passphrase, err = key.Sealer.Unseal(ctx, t.Sealed); err == nil {
				key.sealed = t.Sealed
				return nil
			}
		}
	}
	return err
}

// seal makes a new passphrase for a key that has it sealed, and returns its token; nil for another key.
func (key *Key) seal(ctx context.Context) (*token, error) {
	if key.Sealer == nil {
		return nil, nil
	}
	key.Passphrase = []byte(rand.Text() + rand.Text()) // each has 130 bits
	sealed, err := key.Sealer.Seal(ctx, key.Passphrase)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", key, err)
	}
	return &token{Type: key.token(), Slots: []string{strconv.Itoa(key.Slot)}, Sealed: sealed}, nil
}

func (key *Key) token() string { return tokenPrefix + key.Kind }

// imports writes the token of a key that is in its slot; nil: it has none.
func (l *Layer) imports(ctx context.Context, device string, t *token) error {
	if t == nil {
		return nil
	}
	text, err := json.Marshal(t)
	if err != nil {
		return err
	}
	cmd := l.command(nil, "token", "import", device)
	cmd.Stdin = bytes.NewReader(text)
	return l.runs(ctx, cmd)
}

// sweep removes the tokens of keys that are gone: cryptsetup leaves them without a slot.
func (l *Layer) sweep(ctx context.Context, device string) error {
	all, err := l.tokens(ctx, device)
	if err != nil {
		return err
	}
	for id, t := range all {
		if len(t.Slots) == 0 {
			err = errors.Join(err, l.drop(ctx, device, id))
		}
	}
	return err
}

// drop removes tokens.
func (l *Layer) drop(ctx context.Context, device string, ids ...int) error {
	for _, id := range ids {
		if err := l.run(ctx, nil, "token", "remove", "--token-id", strconv.Itoa(id), device); err != nil {
			return err
		}
	}
	return nil
}
