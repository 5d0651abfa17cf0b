//go:build !kernel

package luks

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

// budgetOpen is for what a start with encryption takes longer.
const budgetOpen = 500 * time.Millisecond

// BenchmarkEncryption measures how long the keys of STATE and EPHEMERAL take, one after the other: cryptsetup and the
// derivation of a nodeID key, at the speed of this computer.
func BenchmarkEncryption(b *testing.B) {
	header := filepath.Join(b.TempDir(), "header")
	if err := os.WriteFile(header, nil, 0o600); err != nil {
		b.Fatal(err)
	}
	if err := os.Truncate(header, 64<<20); err != nil {
		b.Fatal(err)
	}
	cryptsetup := func(args ...string) {
		b.Helper()
		cmd := exec.Command("cryptsetup", append(args, "--key-file", "-", header)...)
		cmd.Stdin = bytes.NewReader([]byte("a passphrase of a node's UUID"))
		if out, err := cmd.CombinedOutput(); err != nil {
			b.Fatalf("cryptsetup (dev setup installs it): %v: %s", err, out)
		}
	}
	cryptsetup(slices.Concat([]string{"luksFormat", "--batch-mode", "--type", "luks2", "--luks2-metadata-size", "32k"}, Derivation)...)
	start := time.Now()
	for range 2 {
		cryptsetup("open", "--test-passphrase")
	}
	took := time.Since(start)
	fmt.Printf("encryption: STATE and EPHEMERAL opened by nodeID keys  %v, ≤ %v is allowed\n", took.Round(time.Millisecond), budgetOpen)
	if took > budgetOpen {
		b.Error("over budget")
	}
}
