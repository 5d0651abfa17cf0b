//go:build e2e && long

package machines

import (
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

// A machine whose configuration encrypts STATE and EPHEMERAL: no secret of its configuration is on its disk, Debian's
// cryptsetup knows the volume and its static key, and after a power cut the machine opens both by itself.
// (S-160, S-166, S-169)
func TestEncryptedMachine(t *testing.T) {
	const passphrase = "correct horse battery staple"
	c, m := e2etest.Start(t, "encrypted", qemu.QEMU, e2etest.Nodes(1, 0), func(o *qemu.Options) {
		o.ControlPlanePatches = [][]byte{[]byte("machine: {systemDiskEncryption: {state: {keys: [{slot: 0, nodeID: {}}]}, ephemeral: {keys: " +
			"[{slot: 0, nodeID: {}}, {slot: 1, static: {passphrase: " + passphrase + "}}]}}}\n")}
	})
	sealed := func() {
		t.Helper()
		for label, layers := range map[string]string{"STATE": "LUKS2 (0 nodeID), xfs", "EPHEMERAL": "LUKS2 (0 nodeID, 1 static), xfs"} {
			row := regexp.MustCompile(" " + label + " .* " + regexp.QuoteMeta(layers) + " +true")
			c.Eventually(3*time.Minute, label+" is encrypted, and mounted", func() error {
				out, err := c.TryGbctl("-n", c.Nodes[0].Address.String(), "get", "volumes")
				if err == nil && !row.MatchString(out) {
					err = errors.New(out)
				}
				return err
			})
		}
	}
	sealed()
	m.Reached("both volumes are encrypted")
	if err := c.Cut(t.Context(), c.Node()); err != nil {
		t.Fatal(err)
	}
	disk, err := os.Open(filepath.Join(c.Dir(), c.Node(), "disk.img"))
	if err != nil {
		t.Fatal(err)
	}
	defer disk.Close()
	stat, err := disk.Stat()
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(c.Configuration(c.Node()))
	if err != nil {
		t.Fatal(err)
	}
	known, _, err := config.Load("configuration", text)
	if err != nil {
		t.Fatal(err)
	}
	for _, place := range boot.Places(stat.Size()) {
		volume := io.NewSectionReader(disk, place.Start, place.Size)
		switch place.Label {
		case boot.LabelState:
			content, err := io.ReadAll(volume)
			if err != nil {
				t.Fatal(err)
			}
			for _, secret := range []string{string(known.Machine.Token), string(known.Cluster.Token), passphrase, "machine:\n"} {
				if secret == "" || bytes.Contains(content, []byte(secret)) {
					t.Errorf("%q is on the disk, or isn't in the configuration", secret)
				}
			}
		case boot.LabelEphemeral:
			for key, want := range map[string]bool{passphrase: true, "another one": false} {
				if err := opens(t, volume, key); (err == nil) != want {
					t.Errorf("cryptsetup opens EPHEMERAL with %q: %v", key, err)
				}
			}
		}
	}
	m.Reached("the disk has no secret in the clear")
	if err := c.On(t.Context(), c.Node()); err != nil {
		t.Fatal(err)
	}
	sealed()
	m.Reached("both are opened after a power cut")
}

// opens asks Debian's cryptsetup whether a passphrase opens a volume.
func opens(t *testing.T, volume io.Reader, passphrase string) error {
	t.Helper()
	const header = 16 << 20
	path := filepath.Join(t.TempDir(), "header")
	f, err := os.Create(path)
	if err == nil {
		_, err = io.CopyN(f, volume, header)
	}
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("cryptsetup", "open", "--test-passphrase", "--key-file", "-", path)
	cmd.Stdin = strings.NewReader(passphrase)
	return cmd.Run()
}
