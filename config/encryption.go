package config

import (
	"path"
	"slices"
)

// SystemDiskEncryption encrypts partitions of the system's disk with LUKS2 when they are made. One with content stays
// as it is until a reset wipes it. No effect in containers.
type SystemDiskEncryption struct {
	State     *Encryption `yaml:"state"`     // the configuration, keys and journals
	Ephemeral *Encryption `yaml:"ephemeral"` // all other data: images, pods, etcd, logs
}

// Encryption has the keys of one partition.
type Encryption struct {
	Keys []EncryptionKey `yaml:"keys" key:"slot"` // required, at least one
}

// EncryptionKey is a key in a slot: exactly one of nodeID, static, kms and tpm. The slots of the partition become those
// of the list at each boot; at least one key has to stay.
type EncryptionKey struct {
	NodeID *EncryptionNodeID `yaml:"nodeID"` // {}: a key of the machine's UUID, if it is random, and of the label
	Static *EncryptionStatic `yaml:"static"` // a passphrase; that of state is on META, and others on STATE
	KMS    *EncryptionKMS    `yaml:"kms"`    // a random key, which a server seals for this machine
	TPM    *EncryptionTPM    `yaml:"tpm"`    // {}: a random key, which the TPM seals for signed systems
	Slot   *int              `yaml:"slot"`   // required, 0 to 31; keySlot is a deprecated alias
}

// EncryptionKMS is a key server. Without its answer, the key opens nothing.
type EncryptionKMS struct {
	Endpoint URL `yaml:"endpoint"` // required, https://HOST:PORT
	CA       PEM `yaml:"ca"`       // required; the only authority of the server's certificate
}

// EncryptionTPM is a key that only a signed system gets back from the machine's TPM, with the same keys of Secure Boot.
type EncryptionTPM struct{}

// EncryptionNodeID is a key of this machine's UUID and the label.
type EncryptionNodeID struct{}

// EncryptionStatic is a passphrase in the configuration.
type EncryptionStatic struct {
	Passphrase Secret `yaml:"passphrase"` // required, at most 512 characters
}

// Encrypted is a partition that is to be encrypted.
type Encrypted struct {
	Label string
	Keys  []EncryptionKey
	where place
}

// Encrypted are those of the system's disk and of machine.disks.
func (c *Config) Encrypted() (all []Encrypted) {
	add := func(label string, e *Encryption, where place) {
		if e != nil {
			all = append(all, Encrypted{label, e.Keys, where})
		}
	}
	system := at("machine", "systemDiskEncryption")
	add("STATE", c.Machine.SystemDiskEncryption.State, system.with("state"))
	add("EPHEMERAL", c.Machine.SystemDiskEncryption.Ephemeral, system.with("ephemeral"))
	for i, d := range c.Machine.Disks {
		for n, p := range d.Partitions {
			add(path.Base(p.Mountpoint), p.Encryption, at("machine", "disks", i, "partitions", n, "encryption"))
		}
	}
	return all
}

// unlocking: the keys of a partition are changed with one that opens it.
func unlocking(row *applyRow, _ place, _ Change, from, to *Config) (Effect, string) {
	is := to.Encrypted()
	for _, was := range from.Encrypted() {
		i := slices.IndexFunc(is, func(e Encrypted) bool { return e.Label == was.Label })
		if i >= 0 && !slices.ContainsFunc(was.Keys, func(k EncryptionKey) bool { return slices.ContainsFunc(is[i].Keys, k.same) }) {
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
		return k.Static == other.Static && (k.TPM == nil) == (other.TPM == nil)
	}
	return *k.Static == *other.Static
}
