//go:build kernel

package disks

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-tpm/tpm2/transport"

	"github.com/garboard-os/garboard/api/client"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/tpm"
	"github.com/garboard-os/garboard/services/system/volume"
	"github.com/garboard-os/garboard/tools/testing/owner"
	"github.com/garboard-os/garboard/tools/testing/softtpm"
)

func tpmKey(slot int) config.EncryptionKey {
	return config.EncryptionKey{TPM: &config.EncryptionTPM{}, Slot: new(slot)}
}

// A measuredBoot is what a firmware starts and measures.
type measuredBoot struct {
	firmware string // its keys
	owner    *softtpm.Owner
	system   string
	secure   string // the value of SecureBoot
}

// measured boots a machine with a TPM and Secure Boot.
func measured(t *testing.T, on *softtpm.Machine, b measuredBoot, disk *loop) *machineUnderTest {
	t.Helper()
	left := on.Boot(b.firmware, b.owner, softtpm.Section{Name: ".linux", Content: []byte(b.system)})
	m := bootMachine(t, disk)
	m.disks.Firmware = t.TempDir()
	m.disks.tpm.TPM = tpm.New(left)
	m.disks.tpm.TPM.Open = on.Open
	value := []byte("\x06\x00\x00\x00" + b.secure)
	if err := os.WriteFile(filepath.Join(m.disks.Firmware, "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"), value, 0o600); err != nil {
		t.Fatal(err)
	}
	return m
}

func partition(t *testing.T, disk *loop, label string) string {
	t.Helper()
	device, err := volume.Partition(t.Context(), disk.Path, label)
	if err != nil {
		t.Fatal(err)
	}
	return device
}

// headers are those of both volumes.
func headers(t *testing.T, disk *loop) (all string) {
	t.Helper()
	for _, label := range []string{boot.LabelState, boot.LabelEphemeral} {
		f, err := os.Open(partition(t, disk, label))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		head := make([]byte, 64<<10)
		if _, err := io.ReadFull(f, head); err != nil {
			t.Fatal(err)
		}
		all += string(head)
	}
	return all
}

// STATE and EPHEMERAL open by the TPM alone, for each system of the owner, and for none that isn't his; what else the
// firmware starts finds a closed TPM. After a change of the firmware's keys, the recovery key opens them, and the TPM's
// slots are sealed anew by themselves.
func TestKeysOfTheTPM(t *testing.T) {
	disk := newLoop(t, boot.MinDisk)
	_, keys := owner.Keys(t)
	_, thief := owner.Keys(t)
	machine := softtpm.New(t)
	install := config.Install{Disk: disk.Path}
	wanted := config.SystemDiskEncryption{State: sealed(tpmKey(0)), Ephemeral: sealed(tpmKey(2))}
	v1 := measuredBoot{"db", keys, "v1", "\x01"}

	m := measured(t, machine, measuredBoot{"db", keys, "v1", "\x00"}, disk)
	m.encryption = wanted
	if err := m.up(install); err == nil || !strings.Contains(err.Error(), "it needs Secure Boot") {
		t.Errorf("without Secure Boot: %v", err)
	}
	m.off()

	m = measured(t, machine, v1, disk)
	shown := m.comesUp(install, wanted)
	if state, ephemeral := shown[boot.LabelState], shown[boot.LabelEphemeral]; state.Layers != "LUKS2 (0 tpm), xfs" || ephemeral.Layers != "LUKS2 (2 tpm), xfs" || state.Problem+ephemeral.Problem != "" {
		t.Errorf("%+v", shown)
	}
	recovery := client.NewRecoveryKey()
	if err := m.disks.AddRecoveryKey(t.Context(), recovery); err != nil {
		t.Fatal(err)
	}
	m.write("state/mark", hidden)
	m.write("var/mark", hidden)
	m.off()
	if disk.Holds(hidden) {
		t.Error("the disk has what is encrypted")
	}

	// The next release of the owner; nothing is written to the headers.
	v2 := v1
	v2.system = "v2"
	before := headers(t, disk)
	m = measured(t, machine, v2, disk)
	if found, err := m.mountState(); !found || err != nil {
		t.Fatalf("STATE isn't open without a configuration: %v", err)
	}
	m.comesUp(install, wanted)
	m.isMarked()
	if got := m.disks.Measured(); got.Is != "as signed" || len(got.PCR7) != 64 || len(got.PCR11) != 64 {
		t.Errorf("%+v", got)
	}
	if headers(t, disk) != before {
		t.Error("a boot as always has written to the headers")
	}
	if len(m.disks.tpm.known) != 2 {
		t.Errorf("%d keys were unsealed", len(m.disks.tpm.known))
	}
	for sealed := range m.disks.tpm.known {
		if _, err := m.disks.tpm.TPM.Unseal([]byte(sealed)); err == nil {
			t.Error("the TPM still gives keys")
		}
	}
	m.off()

	for what, b := range map[string]measuredBoot{
		"another owner's system":     {"db", thief, "v1", "\x01"},
		"other keys in the firmware": {"db of a thief", keys, "v1", "\x01"},
		"Secure Boot was turned off": {"none", keys, "v1", "\x00"},
	} {
		m = measured(t, machine, b, disk)
		if found, err := m.mountState(); found || err == nil || !strings.Contains(err.Error(), "the tpm key of slot 0") {
			t.Errorf("%s: %v, %v", what, found, err)
		}
		m.off()
	}
	other := softtpm.New(t)
	m = measured(t, other, v1, disk)
	if found, err := m.mountState(); found || err == nil || !strings.Contains(err.Error(), "another TPM") {
		t.Errorf("the disk in another machine: %v, %v", found, err)
	}
	m.off()

	// A machine without a disk of ours closes the TPM, too, before anybody can tell it anything.
	empty := measured(t, machine, v1, newLoop(t, boot.MinDisk))
	if found, err := empty.mountState(); found || err != nil {
		t.Fatal(found, err)
	}
	empty.off()
	err := empty.disks.layers[0].Sealed(t.Context(), partition(t, disk, boot.LabelState), kindTPM, func(sealed []byte) {
		if _, err := empty.disks.tpm.TPM.Unseal(sealed); err == nil || !strings.Contains(err.Error(), "opened before") {
			t.Errorf("STATE of another disk: %v", err)
		}
	})
	if err != nil {
		t.Error(err)
	}

	// Keys of the firmware were changed: once with the recovery key, then by itself.
	changed := v1
	changed.firmware = "db and dbx of today"
	m = measured(t, machine, changed, disk)
	if found, err := m.mountState(); found || err == nil {
		t.Fatalf("%v, %v", found, err)
	}
	if err := m.disks.Unlock(t.Context(), recovery); err != nil {
		t.Fatal(err)
	}
	shown = m.comesUp(install, wanted)
	m.isMarked()
	for label, v := range shown {
		if v.Problem != "" {
			t.Errorf("%s: %+v", label, v)
		}
	}
	m.off()
	m = measured(t, machine, changed, disk)
	if found, err := m.mountState(); !found || err != nil {
		t.Fatalf("the next boot: %v", err)
	}
	m.comesUp(install, wanted)
	m.isMarked()
	m.off()

	// A thief makes STATE anew: the signed system takes his configuration, and doesn't open EPHEMERAL for it.
	state, err := os.OpenFile(partition(t, disk, boot.LabelState), os.O_WRONLY|os.O_SYNC, 0)
	if err == nil {
		_, err = state.Write(make([]byte, 32<<20))
		err = errors.Join(err, state.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	m = measured(t, machine, changed, disk)
	m.encryption = wanted
	if err := m.up(install); err == nil || !strings.Contains(err.Error(), "STATE isn't the one that was there") {
		t.Errorf("a new STATE opens EPHEMERAL: %v", err)
	}
	if _, err := os.Stat(filepath.Join(m.dir, "var/mark")); err == nil {
		t.Error("the thief has the data")
	}
}

// The TPM takes the place of another key once a boot has opened the disk with it.
func TestMoveToTheTPM(t *testing.T) {
	disk := newLoop(t, boot.MinDisk)
	_, keys := owner.Keys(t)
	machine := softtpm.New(t)
	install := config.Install{Disk: disk.Path}
	former := config.SystemDiskEncryption{State: sealed(staticKey()), Ephemeral: sealed(staticKey())}
	wanted := config.SystemDiskEncryption{State: sealed(tpmKey(0)), Ephemeral: sealed(tpmKey(2))}
	good := measuredBoot{"db", keys, "v1", "\x01"}
	m := measured(t, machine, good, disk)
	m.comesUp(install, former)
	m.write("state/mark", hidden)
	m.write("var/mark", hidden)
	m.off()

	m = measured(t, machine, good, disk)
	both := config.SystemDiskEncryption{State: wanted.State, Ephemeral: sealed(staticKey(), tpmKey(2))}
	for label, v := range m.comesUp(install, both) {
		if label == boot.LabelEphemeral && v.Problem != "" || label == boot.LabelState && !strings.Contains(v.Problem, "the former keys (slot 3) stay until a boot has opened it with the tpm key") {
			t.Errorf("%s: %+v", label, v)
		}
	}
	m.isMarked()
	m.off()
	m = measured(t, machine, measuredBoot{"another db", keys, "v1", "\x01"}, disk)
	if found, err := m.mountState(); !found || err != nil {
		t.Fatalf("the former key doesn't open STATE: %v", err)
	}
	m.off()

	m = measured(t, machine, good, disk)
	open, there := m.disks.tpm.Open, false
	m.disks.tpm.Open = func() (transport.TPMCloser, error) {
		if !there {
			return nil, os.ErrNotExist
		}
		return open()
	}
	m.disks.Keeper.Disks.Began = time.Now()
	if state, err := m.disks.MountState(t.Context()); state != configuration.StateLate || err == nil {
		t.Errorf("without the TPM: %v, %v", state, err)
	}
	there = true
	for label, v := range m.comesUp(install, wanted) {
		if v.Problem != "" {
			t.Errorf("%s: %+v", label, v)
		}
	}
	m.isMarked()
	if got := m.slotsOf(disk, boot.LabelState); !slices.Equal(got, []int{0}) {
		t.Errorf("STATE has the slots %v", got)
	}
	m.off()
}

// An upgrade to a system of another PCR key opens the disk, and so does the way back. The upgrade after that ends the
// first key.
func TestNextPCRKey(t *testing.T) {
	disk := newLoop(t, boot.MinDisk)
	machine := softtpm.New(t)
	install := config.Install{Disk: disk.Path}
	wanted := config.SystemDiskEncryption{State: sealed(tpmKey(0), staticKey()), Ephemeral: sealed(tpmKey(2))}
	var owners []*softtpm.Owner
	for range 3 {
		_, keys := owner.Keys(t)
		owners = append(owners, keys)
	}
	runs := func(n, next int) {
		t.Helper()
		m := measured(t, machine, measuredBoot{"db", owners[n], fmt.Sprint("v", n), "\x01"}, disk)
		for label, v := range m.comesUp(install, wanted) {
			if v.Problem != "" || !v.Mounted {
				t.Errorf("system %d: %s: %+v", n, label, v)
			}
		}
		if next != n {
			key, err := owners[next].PolicyKey()
			if err = errors.Join(err, m.disks.SealFor(t.Context(), string(key))); err != nil {
				t.Fatal(err)
			}
		}
		m.off()
	}
	runs(0, 1)
	runs(1, 1)
	runs(0, 1) // back, and forward again
	runs(1, 2)
	m := measured(t, machine, measuredBoot{"db", owners[0], "v0", "\x01"}, disk)
	m.encryption = wanted
	if err := m.up(install); err == nil || !strings.Contains(err.Error(), "another PCR key") {
		t.Errorf("the first key still opens EPHEMERAL: %v", err)
	}
	m.off()
	runs(2, 2)
}
