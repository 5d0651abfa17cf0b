//go:build kernel

package volumes

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/system/disk"
	"github.com/garboard-os/garboard/tools/testing/loopdisk"
)

const hidden = "a word that is on no disk"

// sealed gives a partition keys.
func sealed(p config.DataPartition, keys ...config.EncryptionKey) config.DataPartition {
	p.Encryption = &config.Encryption{Keys: keys}
	return p
}

func nodeIDKey(slot int) config.EncryptionKey {
	return config.EncryptionKey{NodeID: &config.EncryptionNodeID{}, Slot: &slot}
}

func staticKey(slot int, passphrase config.Secret) config.EncryptionKey {
	return config.EncryptionKey{Static: &config.EncryptionStatic{Passphrase: passphrase}, Slot: &slot}
}

// boots is a boot of a machine with its UUID.
func boots(t *testing.T, state string, disks ...*loopdisk.Disk) *node {
	t.Helper()
	m := withData(t, state, disks...)
	m.write("uuid", "9c3a7e21-5d48-4b0f-8f62-17e4d9c05ab3\n")
	return m
}

// settles mounts a disk, and then has the keys settled, as the controller does.
func (m *node) settles(disk config.DataDisk) map[string]Status {
	m.t.Helper()
	m.mustMount(disk)
	_, made, err := m.volumes.mount(m.t.Context(), disk)
	if err != nil {
		m.t.Fatal(err)
	}
	return made
}

// S-160 to S-171: partitions of machine.disks are encrypted when they are made, open at each boot, and get the keys of
// the configuration. Another one on the same disk isn't. What is there already is neither encrypted nor decrypted.
func TestEncryptedDataDisk(t *testing.T) {
	system, data := t.TempDir(), loopdisk.New(t, 2*gib)
	secret, plain := partitionOf("secret", 400*mib, config.Ext4), partitionOf("plain", 0, config.XFS)
	m := boots(t, system, data)
	made := m.settles(dataDisk(data.Path, sealed(secret, nodeIDKey(0)), plain))
	if made["secret"].Layers != "LUKS2 (0 nodeID), ext4" || made["plain"].Layers != "xfs" || made["secret"].Problem != "" {
		t.Errorf("%+v", made)
	}
	m.write("var/mnt/secret/mine", hidden)
	d, err := disk.At(data.Path)
	if err != nil {
		t.Fatal(err)
	}
	if busy, err := d.InUse(filepath.Join(m.dir, "var/mnt")); busy != "" || err != nil { // so a reset may wipe it
		t.Errorf("in use: %s, %v", busy, err)
	}
	if busy, err := d.InUse(); busy == "" || err != nil {
		t.Errorf("not in use, %v", err)
	}
	m.off()
	if data.Holds(hidden) {
		t.Error("the disk has what is encrypted")
	}

	// It has another key, and the other partition is to be encrypted, too.
	m = boots(t, system, data)
	made = m.settles(dataDisk(data.Path, sealed(secret, staticKey(2, "open sesame"), nodeIDKey(0)), sealed(plain, nodeIDKey(0))))
	if made["secret"].Layers != "LUKS2 (0 nodeID, 2 static), ext4" || m.read("var/mnt/secret/mine") != hidden {
		t.Errorf("%+v", made)
	}
	if why := made["plain"].Problem; made["plain"].Layers != "xfs" || !strings.Contains(why, "isn't encrypted") || !strings.Contains(why, "--user-disks-to-wipe") {
		t.Errorf("%+v", made)
	}
	m.off()

	// The machine has lost its UUID: the passphrase opens it. Then it has no key that works.
	m = withData(t, system, data)
	m.write("uuid", "00000000-0000-0000-0000-000000000000\n")
	made = m.settles(dataDisk(data.Path, sealed(secret, nodeIDKey(0), staticKey(2, "open sesame")), plain))
	if m.read("var/mnt/secret/mine") != hidden || !strings.Contains(made["secret"].Problem, "isn't random") {
		t.Errorf("%+v", made)
	}
	m.off()
	before := data.Edges()
	m = boots(t, system, data)
	_, _, err = m.volumes.mount(t.Context(), dataDisk(data.Path, sealed(secret, staticKey(2, "wrong")), plain))
	refused(t, err, "open secret", "the static key of slot 2")
	if string(before) != string(data.Edges()) {
		t.Error("what isn't opened was written to")
	}
	m.off()
	m = boots(t, system, data)
	made = m.settles(dataDisk(data.Path, sealed(secret, staticKey(2, "open sesame")), plain))
	if made["secret"].Layers != "LUKS2 (2 static), ext4" || m.read("var/mnt/secret/mine") != hidden {
		t.Errorf("%+v", made)
	}
}

// S-168: nothing is made with a key that the machine doesn't have.
func TestDataDiskWithoutItsKey(t *testing.T) {
	data := loopdisk.New(t, gib)
	before := data.Edges()
	m := withData(t, t.TempDir(), data)
	m.write("uuid", "ffffffff-ffff-ffff-ffff-ffffffffffff\n")
	_, _, err := m.volumes.mount(t.Context(), dataDisk(data.Path, sealed(partitionOf("data", 0, config.XFS), nodeIDKey(0))))
	refused(t, err, "the nodeID key of slot 0", "isn't random")
	if string(before) != string(data.Edges()) {
		t.Error("the disk was written to")
	}
}
