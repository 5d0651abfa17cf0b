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
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/disk"
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
		if k.Static != nil {
			kept.Static = string(k.Static.Passphrase)
		}
		if k.KMS != nil {
			kept.KMS = &server{Endpoint: k.KMS.Endpoint.String(), CA: k.KMS.CA}
		}
		if k.TPM != nil {
			kept.TPM = &struct{}{}
		}
		keys = append(keys, d.keyOf(kept, label))
	}
	return keys
}

// keyOf is a static key, or one of a server or the TPM; else it is of the machine's UUID.
func (d *Disks) keyOf(k keptKey, label string) luks.Key {
	switch {
	case k.Static != "":
		return luks.Key{Slot: k.Slot, Kind: "static", Passphrase: []byte(k.Static)}
	case k.KMS != nil:
		k.KMS.disks = d
		_, err := luks.UUID(d.o.uuidFile)
		return luks.Key{Slot: k.Slot, Kind: "kms", Sealer: k.KMS, Err: err}
	case k.TPM != nil:
		var sealer luks.Sealer = &d.tpm
		if label != boot.LabelState {
			sealer = ofEphemeral{d}
		}
		return luks.Key{Slot: k.Slot, Kind: kindTPM, Sealer: sealer, Err: d.usableTPM()}
	}
	passphrase, err := luks.NodePassphrase(d.o.uuidFile, label)
	return luks.Key{Slot: k.Slot, Kind: "nodeID", Passphrase: passphrase, Err: err}
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
	var kept []keptKey
	for _, k := range keys {
		key := keptKey{Slot: k.Slot}
		switch s, _ := k.Sealer.(*server); {
		case s != nil:
			key.KMS = s
		case k.Kind == kindTPM:
			key.TPM = &struct{}{}
		case k.Kind == "static":
			key.Static = string(k.Passphrase)
		default:
			key.NodeID = &struct{}{}
		}
		kept = append(kept, key)
	}
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
			err = errors.Join(l.Settle(ctx, device), l.Note())
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

// Shown is a volume of the system's disk, for users.
type Shown struct {
	Disk, Size, Layers string
	Opened             string // which slots have opened it, and when
	Mounted            bool
	Encrypted, Lacks   bool   // a recovery key
	Problem            string // with its encryption
	Unlike             bool   // the configuration: a wipe is needed
}

// Shown are the volumes of the system's disk by their labels; false: they may change without a further event.
func (d *Disks) Shown() (all map[string]Shown, settled bool) {
	problems, system := d.settled.Load(), d.System()
	if d.o.Mode == boot.Container {
		return nil, true
	}
	if system == nil || problems == nil {
		return nil, false
	}
	all = map[string]Shown{}
	for i, v := range d.volumes {
		shown := Shown{Disk: system.Path, Layers: v.FileSystem, Mounted: d.Keeper.Mounted(v.Dir)}
		if err := (*problems)[v.Label]; err != nil {
			shown.Problem, shown.Unlike = err.Error(), errors.As(err, new(luks.Unlike))
		}
		f, err := system.Inspect()
		var p disk.Partition
		if err == nil {
			p, err = f.Device(v.Label)
		}
		if err == nil {
			shown.Size = disk.SizeText(p.Size)
			var sealed string
			if sealed, shown.Opened, err = d.layers[i].Show(p.Path); sealed != "" {
				shown.Encrypted, shown.Layers = true, sealed+", "+shown.Layers
				shown.Lacks = !strings.Contains(sealed, luks.Recovery)
			}
		}
		if err != nil && shown.Problem == "" {
			shown.Problem = err.Error()
		}
		all[v.Label] = shown
	}
	return all, true
}
