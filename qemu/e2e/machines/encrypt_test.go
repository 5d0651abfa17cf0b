//go:build e2e && long

package machines

import (
	"errors"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

// EPHEMERAL and STATE of a running worker are encrypted: it is drained, wiped, and comes back to its cluster. The
// client ends while that goes on, and the power of the worker, too; the same command goes on, and then has nothing to
// do. STATE keeps what is on it.
func TestEncryptRunningNode(t *testing.T) {
	c, m := e2etest.Start(t, "encrypt", qemu.QEMU, func(o *qemu.Options) { o.Workers, o.MemoryMiB = 1, memoryMiB })
	c.Ready(m)
	worker := c.Nodes[1]
	node := worker.Address.String()
	says := func(text string, args ...string) func() error {
		return func() error {
			out, err := c.TryGbctl(append([]string{"-n", node}, args...)...)
			if err == nil && !strings.Contains(out, text) {
				err = errors.New(out)
			}
			return err
		}
	}
	const done = "STATE is as its configuration says"
	if out := c.Gbctl("-n", node, "encrypt", "--dry-run"); !strings.Contains(out, done) {
		t.Errorf("a worker whose configuration has no keys: %s", out)
	}
	c.Gbctl("-n", node, "patch", "mc", "-p", "machine: {systemDiskEncryption: {state: {keys: [{slot: 0, nodeID: {}}]}, ephemeral: {keys: [{slot: 0, nodeID: {}}]}}}")
	c.Eventually(6*time.Minute, "the worker knows that EPHEMERAL isn't encrypted", says("isn't encrypted, because it was made before it had keys", "get", "volumes"))
	m.Reached("the worker has a key")

	if out, err := c.TryGbctl("-n", node, "encrypt", "--yes", "--wait", "1s"); err == nil || !strings.Contains(out, "wipes EPHEMERAL and restarts") {
		t.Fatalf("the worker was there within a second: %v: %s", err, out)
	}
	if err := c.Cut(t.Context(), worker.Name); err != nil {
		t.Fatal(err)
	}
	if err := c.On(t.Context(), worker.Name); err != nil {
		t.Fatal(err)
	}
	m.Reached("the power failed")
	sealed := regexp.MustCompile(`(?s) EPHEMERAL [^\n]* LUKS2 \(0 nodeID\), xfs +true.* STATE [^\n]* LUKS2 \(0 nodeID\), xfs +true`)
	c.Eventually(15*time.Minute, "the same command ends", func() error {
		_, err := c.Patient(15*time.Minute).TryGbctl("-n", node, "encrypt", "--yes")
		return err
	})
	if out := c.Gbctl("-n", node, "get", "volumes"); !sealed.MatchString(out) {
		t.Errorf("they aren't encrypted:\n%s", out)
	}
	m.Reached("EPHEMERAL and STATE are encrypted")
	c.Eventually(10*time.Minute, "the worker is Ready", says(" serves ", "health"))
	if out := c.Gbctl("-n", node, "encrypt", "--yes"); !strings.Contains(out, done) {
		t.Errorf("it is done again: %s", out)
	}
}
