package disks

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/logs"
)

// S-168: who applies a configuration hears that this machine has no key of its own, before anything is made.
func TestS168UnableToEncrypt(t *testing.T) {
	t.Parallel()
	nodeID := config.EncryptionKey{Slot: new(0), NodeID: &config.EncryptionNodeID{}}
	static := config.EncryptionKey{Slot: new(1), Static: &config.EncryptionStatic{Passphrase: "open sesame"}}
	cfg := &config.Config{}
	cfg.Machine.SystemDiskEncryption.Ephemeral = &config.Encryption{Keys: []config.EncryptionKey{nodeID, static}}
	for uuid, want := range map[string]string{
		"9c3a7e21-5d48-4b0f-8f62-17e4d9c05ab3": "",
		"ffffffff-ffff-ffff-ffff-ffffffffffff": "encryption of EPHEMERAL: the nodeID key of slot 0: the machine's UUID ffffffff-ffff-ffff-ffff-ffffffffffff isn't random: use a static key",
	} {
		file := filepath.Join(t.TempDir(), "uuid")
		if err := os.WriteFile(file, []byte(uuid+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := New(Options{Logs: logs.New(io.Discard), uuidFile: file}).Unable(cfg); got != want && (want == "" || !strings.HasPrefix(got, want)) {
			t.Errorf("%s: %q, want %q", uuid, got, want)
		}
	}
	data := config.DataPartition{Mountpoint: "/var/mnt/data", Encryption: &config.Encryption{Keys: []config.EncryptionKey{nodeID}}}
	cfg = &config.Config{Machine: config.Machine{Disks: []config.DataDisk{{Partitions: []config.DataPartition{data}}}}}
	d := New(Options{Logs: logs.New(io.Discard), uuidFile: "/nowhere"})
	if got := d.Unable(cfg); !strings.HasPrefix(got, "encryption of data: the nodeID key of slot 0") {
		t.Error(got)
	}
	if got := d.Unable(&config.Config{}); got != "" {
		t.Error(got)
	}
}
