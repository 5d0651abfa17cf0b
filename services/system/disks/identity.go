package disks

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/garboard-os/garboard/boot"
)

const (
	machineIDFile = "/etc/machine-id"
	machineIDLen  = 32 // hexadecimal digits (machine-id(5))
)

// nameMachine gives the node its machine ID: it is made once, kept on STATE,
// and written where programs look for it. The kubelet identifies nodes by it.
func (d *Disks) nameMachine() error {
	kept := filepath.Join(d.o.stateDir, "machine-id")
	text, err := os.ReadFile(kept)
	if boot.IgnoreMissing(err) != nil {
		return fmt.Errorf("read the machine ID: %w", err)
	}
	id := strings.TrimSpace(string(text))
	if raw, err := hex.DecodeString(id); err != nil || len(raw) != machineIDLen/2 {
		var random [machineIDLen / 2]byte
		_, _ = rand.Read(random[:]) // never fails (crypto/rand)
		id = hex.EncodeToString(random[:])
		if err := boot.WriteFile(kept, []byte(id+"\n"), 0o444); err != nil {
			return err
		}
	}
	return boot.WriteFile(d.o.idFile, []byte(id+"\n"), 0o444)
}
