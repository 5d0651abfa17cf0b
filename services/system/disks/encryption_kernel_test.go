//go:build kernel

package disks

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/api/client"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/volume"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// slotsOf are the slots of a volume's header.
func (m *machineUnderTest) slotsOf(l *loop, label string) (slots []int) {
	m.t.Helper()
	device, err := volume.Partition(m.t.Context(), l.Path, label)
	if err != nil {
		m.t.Fatal(err)
	}
	for _, layer := range m.disks.layers {
		if layer.Label != label {
			continue
		}
		shown, _, err := layer.Show(device)
		if err != nil {
			m.t.Fatal(err)
		}
		for _, found := range regexp.MustCompile(`(\d+) [a-zA-Z]`).FindAllStringSubmatch(shown, -1) {
			slot, _ := strconv.Atoi(found[1])
			slots = append(slots, slot)
		}
	}
	return slots
}

// comesUp boots with keys, and waits until the volumes have them. STATE doesn't keep the configuration, so that the
// next boot has the next one.
func (m *machineUnderTest) comesUp(install config.Install, e config.SystemDiskEncryption) map[string]volume.Status {
	m.t.Helper()
	defer os.Remove(filepath.Join(m.dir, "state/config.yaml"))
	m.encryption = e
	m.mustUp(install)
	var all map[string]volume.Status
	eventually.That(m.t, time.Minute, "the keys are settled", func() error {
		settled := false
		if all, settled = m.disks.Shown(); !settled {
			return errors.New("they aren't")
		}
		return nil
	})
	return all
}

func (m *machineUnderTest) isMarked() {
	m.t.Helper()
	for _, name := range []string{"state/mark", "var/mark"} {
		if text, err := os.ReadFile(filepath.Join(m.dir, name)); err != nil || string(text) != hidden {
			m.t.Errorf("%s has %q, %v", name, text, err)
		}
	}
}

// hasOpened wants which slots have opened STATE and EPHEMERAL, today.
func hasOpened(t *testing.T, shown map[string]volume.Status, state, ephemeral string) {
	t.Helper()
	today := time.Now().UTC().Format(time.DateOnly)
	for label, want := range map[string]string{boot.LabelState: state, boot.LabelEphemeral: ephemeral} {
		if is := shown[label].Opened; !strings.HasPrefix(is, want+today) || strings.Contains(is, ",") {
			t.Errorf("%s was opened by %q, not by %s", label, is, want)
		}
	}
}

const hidden = "a word that is on no disk"

func sealed(all ...config.EncryptionKey) *config.Encryption { return &config.Encryption{Keys: all} }

func nodeIDKey() config.EncryptionKey {
	return config.EncryptionKey{NodeID: &config.EncryptionNodeID{}, Slot: new(0)}
}

func staticKey() config.EncryptionKey {
	return config.EncryptionKey{Static: &config.EncryptionStatic{Passphrase: "open sesame"}, Slot: new(3)}
}

// S-161 to S-170: the system's volumes are encrypted when they are made. STATE opens before there is a configuration;
// the configuration's keys take the place of those of META; another machine opens neither.
func TestEncryptedSystem(t *testing.T) {
	disk := newLoop(t, boot.MinDisk)
	install := config.Install{Disk: disk.Path}

	m := bootMachine(t, disk)
	shown := m.comesUp(install, config.SystemDiskEncryption{State: sealed(nodeIDKey()), Ephemeral: sealed(staticKey())})
	if state, ephemeral := shown[boot.LabelState], shown[boot.LabelEphemeral]; state.Layers != "LUKS2 (0 nodeID), xfs" || ephemeral.Layers != "LUKS2 (3 static), xfs" || !state.Mounted || state.Problem != "" {
		t.Errorf("%+v", shown)
	}
	hasOpened(t, shown, "0 ", "3 ")
	m.write("state/mark", hidden)
	m.write("var/mark", hidden)
	m.off()
	if disk.Holds(hidden) || disk.Holds("open sesame") {
		t.Error("the disk has what is encrypted")
	}

	// STATE has other keys now, and EPHEMERAL one more.
	m = bootMachine(t, disk)
	if found, err := m.mountState(); !found || err != nil {
		t.Fatalf("STATE isn't open without a configuration: %v", err)
	}
	shown = m.comesUp(install, config.SystemDiskEncryption{State: sealed(staticKey(), nodeIDKey()), Ephemeral: sealed(nodeIDKey(), staticKey())})
	hasOpened(t, shown, "0 ", "3 ") // the added keys haven't yet
	m.isMarked()
	if state, ephemeral := m.slotsOf(disk, boot.LabelState), m.slotsOf(disk, boot.LabelEphemeral); len(state) != 2 || len(ephemeral) != 2 {
		t.Errorf("slots %v of STATE, %v of EPHEMERAL", state, ephemeral)
	}
	m.off()

	m = bootMachine(t, disk)
	shown = m.comesUp(install, config.SystemDiskEncryption{State: sealed(nodeIDKey()), Ephemeral: sealed(nodeIDKey())})
	if state, ephemeral := shown[boot.LabelState], shown[boot.LabelEphemeral]; state.Layers != "LUKS2 (0 nodeID), xfs" || ephemeral.Layers != state.Layers {
		t.Errorf("%+v", shown)
	}
	m.isMarked()
	m.off()

	m = bootMachine(t, disk)
	m.write("uuid", "0d1f3b52-77c9-4e1a-a3c4-2b96f08d54e7\n")
	if found, err := m.mountState(); found || err == nil || !strings.Contains(err.Error(), "the nodeID key of slot 0") {
		t.Errorf("another machine: %v, %v", found, err)
	}
}

// S-171, S-173: what has content is neither encrypted nor decrypted, and the node says how to do it: a reset of that
// label, which destroys the key slots.
func TestS171EncryptionComesAndGoesWithAReset(t *testing.T) {
	disk := newLoop(t, boot.MinDisk)
	install := config.Install{Disk: disk.Path}
	keys := config.SystemDiskEncryption{State: sealed(nodeIDKey()), Ephemeral: sealed(staticKey())}
	reset := func(m *machineUnderTest, label string) {
		t.Helper()
		if err := m.disks.MarkWipe([]string{label}, nil, ""); err != nil {
			t.Fatal(err)
		}
		m.off()
		if err := m.disks.Erase(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	m := bootMachine(t, disk)
	m.comesUp(install, config.SystemDiskEncryption{})
	m.write("state/mark", hidden)
	m.write("var/mark", hidden)
	m.off()

	m = bootMachine(t, disk)
	for label, v := range m.comesUp(install, keys) {
		if v.Layers != "xfs" || !v.Mounted || !strings.Contains(v.Problem, "isn't encrypted") || !strings.Contains(v.Problem, "to have it encrypted: gbctl -n ADDRESS encrypt") {
			t.Errorf("%s: %+v", label, v)
		}
	}
	m.isMarked()
	reset(m, boot.LabelEphemeral)

	m = bootMachine(t, disk)
	shown := m.comesUp(install, keys)
	if shown[boot.LabelState].Layers != "xfs" || shown[boot.LabelEphemeral].Layers != "LUKS2 (3 static), xfs" || shown[boot.LabelEphemeral].Problem != "" {
		t.Errorf("%+v", shown)
	}
	device, err := volume.Partition(t.Context(), disk.Path, boot.LabelEphemeral)
	if err != nil {
		t.Fatal(err)
	}
	reset(m, boot.LabelEphemeral)
	head := make([]byte, 16<<20)
	if f, err := os.Open(device); err != nil {
		t.Error(err)
	} else if _, err := io.ReadFull(f, head); errors.Join(err, f.Close()) != nil || len(bytes.TrimLeft(head, "\x00")) > 0 {
		t.Errorf("the key slots are there: %v", err)
	}

	// Without keys, EPHEMERAL is made without encryption. With keys that the machine lacks, none is made.
	m = bootMachine(t, disk)
	if shown := m.comesUp(install, config.SystemDiskEncryption{}); shown[boot.LabelEphemeral].Layers != "xfs" {
		t.Errorf("%+v", shown)
	}
	reset(m, boot.LabelEphemeral)
	m = bootMachine(t, disk)
	m.write("uuid", "00000000-0000-0000-0000-000000000000\n")
	m.encryption = config.SystemDiskEncryption{Ephemeral: sealed(nodeIDKey())}
	if err := m.up(install); err == nil || !strings.Contains(err.Error(), "isn't random") {
		t.Errorf("EPHEMERAL was made with a key that all machines have: %v", err)
	}
}

// A machine with another UUID, such as that of a new mainboard, opens nothing by itself: neither STATE nor EPHEMERAL.
// With the recovery key it goes on, its own keys take the places of those of the old one, and the next boot needs no
// help.
func TestRecoveryKeyAfterANewMainboard(t *testing.T) {
	disk := newLoop(t, boot.MinDisk)
	install := config.Install{Disk: disk.Path}
	keys := config.SystemDiskEncryption{State: sealed(nodeIDKey()), Ephemeral: sealed(nodeIDKey())}
	key := client.NewRecoveryKey()
	ctx := t.Context()

	m := bootMachine(t, disk)
	if err := m.disks.Unlock(ctx, key); !errors.Is(err, ErrNotLocked) {
		t.Errorf("before there is a disk: %v", err)
	}
	if shown := m.comesUp(install, keys); !shown[boot.LabelState].NoRecovery || !shown[boot.LabelEphemeral].NoRecovery {
		t.Errorf("%+v", shown)
	}
	if err := m.disks.AddRecoveryKey(ctx, key); err != nil {
		t.Fatal(err)
	}
	if err := m.disks.Unlock(ctx, key); !errors.Is(err, ErrNotLocked) {
		t.Errorf("of an open disk: %v", err)
	}
	if shown, _ := m.disks.Shown(); shown[boot.LabelState].NoRecovery || shown[boot.LabelEphemeral].Layers != "LUKS2 (0 nodeID, 31 recovery), xfs" {
		t.Errorf("%+v", shown)
	}
	m.write("state/mark", hidden)
	m.write("var/mark", hidden)
	m.off()
	if disk.Holds(key) {
		t.Error("the disk has the recovery key")
	}

	const mainboard = "0d1f3b52-77c9-4e1a-a3c4-2b96f08d54e7\n"
	m = bootMachine(t, disk)
	m.write("uuid", mainboard)
	if state, err := m.disks.MountState(ctx); state != configuration.StateLocked || err == nil {
		t.Fatalf("%v, %v", state, err)
	}
	if err := m.disks.Unlock(ctx, client.NewRecoveryKey()); err == nil || !strings.Contains(err.Error(), "isn't the recovery key of STATE") {
		t.Errorf("another key: %v", err)
	}
	if err := m.disks.Unlock(ctx, key); err != nil {
		t.Fatal(err)
	}
	if found, err := m.mountState(); !found || err != nil {
		t.Fatalf("unlocked: %v, %v", found, err)
	}
	m.comesUp(install, keys)
	m.isMarked()
	if strings.Contains(m.console.String(), key) || m.disks.key != "" {
		t.Error("the key is kept")
	}
	m.off()

	m = bootMachine(t, disk)
	m.write("uuid", mainboard)
	if found, err := m.mountState(); !found || err != nil {
		t.Fatalf("the next boot: %v, %v", found, err)
	}
	shown := m.comesUp(install, keys)
	m.isMarked()
	if state, ephemeral := shown[boot.LabelState], shown[boot.LabelEphemeral]; state.Layers != "LUKS2 (0 nodeID, 31 recovery), xfs" || ephemeral.Layers != state.Layers {
		t.Errorf("%+v", shown)
	}
	if err := m.disks.RemoveRecoveryKey(ctx); err != nil {
		t.Error(err)
	}
	m.off()

	m = bootMachine(t, disk) // with the old mainboard
	if state, err := m.disks.MountState(ctx); state != configuration.StateLocked || err == nil {
		t.Errorf("%v, %v", state, err)
	}
	if err := m.disks.Unlock(ctx, key); err == nil || !strings.Contains(err.Error(), "STATE has no recovery key") {
		t.Error(err)
	}

	// Nothing opens it any more: it is wiped for who names it, and made anew.
	for device, why := range map[string]string{"": disk.Path, "/dev/sda": "isn't the locked disk"} {
		if err := m.disks.WipeLocked(device); err == nil || !strings.Contains(err.Error(), why) {
			t.Errorf("wipe %q: %v", device, err)
		}
	}
	if err := m.disks.WipeLocked(disk.Path); err != nil {
		t.Fatal(err)
	}
	<-m.disks.Unlocked
	if state, err := m.disks.MountState(ctx); state != configuration.StateAbsent || err != nil {
		t.Fatalf("wiped: %v, %v", state, err)
	}
	if err := m.disks.WipeLocked(disk.Path); !errors.Is(err, ErrNotLocked) {
		t.Errorf("wiped again: %v", err)
	}
	m.comesUp(install, keys)
	if _, err := os.Stat(filepath.Join(m.dir, "state/mark")); err == nil {
		t.Error("the former STATE is there")
	}
}
