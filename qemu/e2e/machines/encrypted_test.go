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
	sealed := func() { isSealed(t, c, "LUKS2 (0 nodeID), xfs", "LUKS2 (0 nodeID, 1 static), xfs") }
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

// isSealed waits until both volumes are mounted, and have these layers.
func isSealed(t *testing.T, c *e2etest.Cluster, state, ephemeral string) {
	t.Helper()
	for label, layers := range map[string]string{boot.LabelState: state, boot.LabelEphemeral: ephemeral} {
		row := regexp.MustCompile(" " + label + " .* " + regexp.QuoteMeta(layers) + " +true")
		c.Eventually(4*time.Minute, label+" is encrypted, and mounted", func() error {
			out, err := c.TryGbctl("-n", c.Nodes[0].Address.String(), "get", "volumes")
			if err == nil && !row.MatchString(out) {
				err = errors.New(out)
			}
			return err
		})
	}
}

// The mainboard of an encrypted machine is replaced: it opens nothing, takes no configuration, and shows no disks. Its
// recovery key unlocks it over the network, the boot goes on, and the next one needs no help.
func TestRecoveryKeyAfterANewMainboard(t *testing.T) {
	c, m := e2etest.Start(t, "recovery", qemu.QEMU, e2etest.Nodes(1, 0), func(o *qemu.Options) {
		o.ControlPlanePatches = [][]byte{[]byte("machine: {systemDiskEncryption: {state: {keys: [{slot: 0, nodeID: {}}]}, ephemeral: {keys: [{slot: 0, nodeID: {}}]}}}\n")}
	})
	node := c.Nodes[0].Address.String()
	const plain, layers = "LUKS2 (0 nodeID), xfs", "LUKS2 (0 nodeID, 31 recovery), xfs"
	isSealed(t, c, plain, plain)
	if out := c.Gbctl("-n", node, "doctor"); !strings.Contains(out, "recovery-key add") {
		t.Errorf("doctor doesn't say that the recovery key is missing: %s", out)
	}
	out := c.Gbctl("-n", node, "recovery-key", "add", "--yes")
	key := regexp.MustCompile(`([cbdefghijklnrtuv]{8}-){7}[cbdefghijklnrtuv]{8}`).FindString(out)
	file := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(file, []byte(key), 0o600); err != nil || key == "" {
		t.Fatalf("no key in %q, %v", out, err)
	}
	isSealed(t, c, layers, layers)
	m.Reached("there is a recovery key")

	turn := func() (console int) {
		t.Helper()
		if err := c.Cut(t.Context(), c.Node()); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(c.Dir(), c.Node(), "mainboard"), []byte("new"), 0o600); err != nil {
			t.Fatal(err)
		}
		log, err := os.ReadFile(c.Console(c.Node()))
		if err != nil {
			t.Fatal(err)
		}
		if err := c.On(t.Context(), c.Node()); err != nil {
			t.Fatal(err)
		}
		return len(log)
	}
	line := c.Says(5*time.Minute, turn(), "the disk is locked", "SHA-256", "gbctl unlock")
	print := regexp.MustCompile(`[0-9A-F]{2}(:[0-9A-F]{2}){31}`).FindString(line.Text)
	strange := []string{"--insecure", "--fingerprint", print, "-n", node}
	for _, args := range [][]string{{"disks"}, {"apply-config", "-f", c.Configuration(c.Node())}} {
		if out, err := c.TryGbctl(append(args, strange...)...); err == nil || !strings.Contains(err.Error(), "unlock it first") {
			t.Errorf("%s: %s, %v", args[0], out, err)
		}
	}
	m.Reached("it is locked")
	c.Gbctl(append([]string{"unlock", "--key-file", file}, strange...)...)
	isSealed(t, c, layers, layers)
	m.Reached("the boot went on")

	from := turn()
	isSealed(t, c, layers, layers)
	for _, line := range c.Lines(from) {
		if strings.Contains(line.Text, "is locked") || strings.Contains(line.Text, key) {
			t.Errorf("the console: %s", line.Text)
		}
	}
	m.Reached("the next boot needs no help")
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
