package disks

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/garboard-os/garboard/api/kms"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/meta"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/luks"
	"github.com/garboard-os/garboard/services/system/volume"
)

// keptKeys are those that open STATE, which has the configuration: so they are on META. A static one is no secret
// there, which a warning says (config/warnings.go).
var keptKeys = meta.Key[[]keptKey]{Name: "state-encryption"}

type keptKey struct {
	Slot   int       `json:"slot"`
	NodeID *struct{} `json:"nodeID,omitempty"`
	Static string    `json:"static,omitempty"` // a passphrase
	KMS    *server   `json:"kms,omitempty"`
	TPM    *struct{} `json:"tpm,omitempty"`
}

// encryption is that of one of the system's volumes. The configuration has its keys, and META those of STATE, until the
// configuration is known.
func (d *Disks) encryption(label string) *luks.Layer {
	l := &luks.Layer{
		Label: label, Field: "machine.systemDiskEncryption", Wipe: "gbctl reset --system-labels-to-wipe " + label + " --reboot", Encrypt: "gbctl -n ADDRESS encrypt",
		Derivation: d.o.derivation, History: luks.History(filepath.Join(d.o.dirs.State, "disk-keys.json")), Processes: d.o.Processes, Log: d.log,
		Keys: func() ([]luks.Key, error) {
			if label == boot.LabelState && len(d.making) > 0 {
				return d.making, nil
			}
			cfg, err := configuration.Config(d.o.Store)
			if err != nil {
				return nil, resource.IgnoreNotFound(err)
			}
			for _, e := range cfg.Encrypted() {
				if e.Label == label {
					return d.KeysOf(e.Keys, label), nil
				}
			}
			return nil, nil
		},
		Kept:  func() ([]luks.Key, error) { return nil, nil },
		Keep:  func([]luks.Key) error { return nil },
		Given: func() string { return d.key },
	}
	if label == boot.LabelState {
		l.Kept, l.Keep = d.kept, func(stay []luks.Key) error {
			keys, err := l.Keys()
			if err != nil {
				return err
			}
			return d.keep(append(keys, stay...))
		}
	}
	return l
}

// KeysOf are the keys of the configuration for the volume with a label.
func (d *Disks) KeysOf(configured []config.EncryptionKey, label string) (keys []luks.Key) {
	for _, k := range configured {
		kept := keptKey{Slot: *k.Slot}
		switch {
		case k.Static != nil:
			kept.Static = string(k.Static.Passphrase)
		case k.KMS != nil:
			kept.KMS = &server{Endpoint: k.KMS.Endpoint.String(), CA: k.KMS.CA}
		case k.TPM != nil:
			kept.TPM = &struct{}{}
		default:
			kept.NodeID = &struct{}{}
		}
		keys = append(keys, d.keyOf(kept, label))
	}
	return keys
}

// keyOf is a static key, or one of a server or the TPM; else it is of the machine's UUID.
func (d *Disks) keyOf(k keptKey, label string) luks.Key {
	key := luks.Key{Slot: k.Slot, Kept: k}
	switch {
	case k.Static != "":
		key.Kind, key.Passphrase = "static", []byte(k.Static)
	case k.KMS != nil:
		k.KMS.disks = d
		key.Kind, key.Sealer = "kms", k.KMS
		_, key.Err = luks.UUID(d.o.uuidFile)
	case k.TPM != nil && label == boot.LabelState:
		key.Kind, key.Sealer, key.Err = kindTPM, &d.tpm, d.usableTPM()
	case k.TPM != nil:
		key.Kind, key.Sealer, key.Err = kindTPM, ofEphemeral{d}, d.usableTPM()
	default:
		key.Kind = "nodeID"
		key.Passphrase, key.Err = luks.NodePassphrase(d.o.uuidFile, label)
	}
	return key
}

// Unable says which keys of a configuration this machine doesn't have; "": it has all of them.
func (d *Disks) Unable(cfg *config.Config) string {
	var all []string
	for _, e := range cfg.Encrypted() {
		if err := luks.Missing(d.KeysOf(e.Keys, e.Label)); err != nil {
			all = append(all, fmt.Sprintf("encryption of %s: %s", e.Label, strings.ReplaceAll(err.Error(), "\n", "; ")))
		}
	}
	return strings.Join(all, "; ")
}

// haveKeys is an error if volumes can't be encrypted that are to be.
func (d *Disks) haveKeys() (err error) {
	for _, l := range d.layers {
		keys, failed := l.Keys()
		err = errors.Join(err, failed, luks.Missing(keys))
	}
	return err
}

// kept are the keys on META of the disk whose STATE is opened.
func (d *Disks) kept() (keys []luks.Key, err error) {
	err = d.useMeta(func(c meta.Change) error {
		kept, err := keptKeys.In(c)
		for _, k := range kept {
			keys = append(keys, d.keyOf(k, boot.LabelState))
		}
		return err
	})
	return keys, err
}

// keep writes the keys of STATE to META, with what they need.
func (d *Disks) keep(keys []luks.Key) error {
	kept := lists.Of(keys, func(k luks.Key) keptKey { return k.Kept.(keptKey) })
	if err := d.useMeta(func(c meta.Change) error { return keptKeys.Put(c, kept) }); err != nil {
		return err
	}
	return d.keepNetwork()
}

func (d *Disks) useMeta(use func(c meta.Change) error) error {
	device, err := volume.Partition(context.Background(), d.at, boot.LabelMeta)
	if err != nil {
		return err
	}
	return meta.Use(device, use)
}

// settle gives the volumes the keys of the configuration, and records what is wrong with their encryption. It comes
// after the start of others, because it takes a second for each key.
func (d *Disks) settle(ctx context.Context) {
	d.mu.Lock()
	defer d.mu.Unlock()
	system := d.System()
	if system == nil {
		return
	}
	problems := map[string]error{}
	d.opened.Store(true)
	d.again = time.Time{}
	for _, l := range d.layers {
		device, err := volume.Partition(ctx, system.Path, l.Label)
		if err == nil {
			err = l.Settle(ctx, device)
			l.Note()
		}
		if ctx.Err() != nil {
			return // the service ends
		}
		if err != nil {
			if _, silent := errors.AsType[kms.Silent](err); silent {
				d.again = time.Now().Add(settleAgain)
			}
			problems[l.Label] = err
			d.log.Warn(fmt.Sprintf("encryption of %s: %v", l.Label, err))
		}
	}
	d.key = ""
	d.settled.Store(&problems)
}

// Shown are the volumes of the system's disk by their labels; false: they may change without a further event.
func (d *Disks) Shown() (all map[string]volume.Status, settled bool) {
	problems, system := d.settled.Load(), d.System()
	if d.o.Mode == boot.Container {
		return nil, true
	}
	if system == nil || problems == nil {
		return nil, false
	}
	here, _ := system.Inspect() // Err is in it
	all = map[string]volume.Status{}
	for i, v := range d.volumes {
		problem := (*problems)[v.Label]
		s := v.Status(here, d.layers[i].Show, problem)
		s.Mounted, s.Unlike = d.Keeper.Mounted(v.Dir), errors.As(problem, new(luks.Unlike))
		s.NoRecovery = s.Encrypted() && !strings.Contains(s.Layers, luks.Recovery)
		all[v.Label] = s
	}
	return all, true
}
