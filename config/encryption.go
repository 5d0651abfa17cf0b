package config

import "slices"

// SystemDiskEncryption encrypts partitions of the system's disk with LUKS2 when they are made. One with content stays
// as it is until a reset wipes it. No effect in containers.
type SystemDiskEncryption struct {
	State     *Encryption `yaml:"state"`     // the configuration, keys and journals
	Ephemeral *Encryption `yaml:"ephemeral"` // all other data: images, pods, etcd, logs
}

// part is a partition with its keys.
type part struct {
	name string
	keys []EncryptionKey
}

// parts are those that are encrypted.
func (e *SystemDiskEncryption) parts() (all []part) {
	if e.State != nil {
		all = append(all, part{"state", e.State.Keys})
	}
	if e.Ephemeral != nil {
		all = append(all, part{"ephemeral", e.Ephemeral.Keys})
	}
	return all
}

// Encryption has the keys of one partition.
type Encryption struct {
	Keys []EncryptionKey `yaml:"keys" key:"slot"` // required, at least one
}

// EncryptionKey is a key in a slot: exactly one of nodeID, static and kms. The slots of the partition become those of
// the list at each boot; at least one key has to stay.
type EncryptionKey struct {
	NodeID *EncryptionNodeID `yaml:"nodeID"` // {}: a key of the machine's UUID, if it is random, and of the label
	Static *EncryptionStatic `yaml:"static"` // a passphrase; that of state is on META, where it isn't encrypted
	KMS    *EncryptionKMS    `yaml:"kms"`    // a random key, which a server seals for this machine
	Slot   *int              `yaml:"slot"`   // required, 0 to 31; keySlot is a deprecated alias
}

// EncryptionKMS is a key server. Without its answer, the key opens nothing.
type EncryptionKMS struct {
	Endpoint URL `yaml:"endpoint"` // required, https://HOST:PORT
	CA       PEM `yaml:"ca"`       // required; the only authority of the server's certificate
}

// EncryptionNodeID is a key of this machine's UUID and the label.
type EncryptionNodeID struct{}

// EncryptionStatic is a passphrase in the configuration.
type EncryptionStatic struct {
	Passphrase Secret `yaml:"passphrase"` // required, at most 512 characters
}

// unlocking: the keys of a partition are changed with one that opens it.
func unlocking(row *applyRow, _ place, _ Change, from, to *Config) (Effect, string) {
	was, is := from.Machine.SystemDiskEncryption, to.Machine.SystemDiskEncryption
	for _, p := range [][2]*Encryption{{was.State, is.State}, {was.Ephemeral, is.Ephemeral}} {
		if p[0] == nil || p[1] == nil {
			continue
		}
		if !slices.ContainsFunc(p[0].Keys, func(k EncryptionKey) bool { return slices.ContainsFunc(p[1].Keys, k.same) }) {
			return row.Effect, "no key of a partition stays, so the node can't open it unless a reset wipes it: add the new key first, and remove the old one with a further change"
		}
	}
	return row.Effect, row.Note
}

// same reports whether two keys open the same, in any slot.
func (k EncryptionKey) same(other EncryptionKey) bool {
	if k.KMS != nil || other.KMS != nil {
		return k.KMS != nil && other.KMS != nil && k.KMS.Endpoint == other.KMS.Endpoint
	}
	if k.Static == nil || other.Static == nil {
		return k.Static == other.Static
	}
	return *k.Static == *other.Static
}
