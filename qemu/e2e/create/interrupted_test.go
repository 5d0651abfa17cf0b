//go:build e2e

package create

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/qemu/container/snapshot"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

// After Ctrl-C while the nodes boot: nothing is left of the new cluster, and
// another one of that name can be made at once.
func TestInterruptedWhileItWaits(t *testing.T) {
	const name = "regretted"
	u := newUser(t, name)
	before := snapshot.Take(t, name)
	for range 2 {
		out, code := e2etest.InterruptedGbctl(t, createBudget, "waiting for API", "cluster", "create", "--provisioner", "container", "--name", name, "--workers", "1")
		inOrder(t, out, "generating PKI", "creating control plane nodes", "creating worker nodes", "waiting for API", "Interrupted: removing cluster "+name)
		if code != 130 {
			t.Errorf("exit code %d, not 130, after\n%s", code, out)
		}
		if strings.Contains(out, "serves") || strings.Contains(out, "error:") {
			t.Errorf("it says\n%s", out)
		}
		if diff := before.Diff(snapshot.Take(t, name)); diff != "" {
			t.Errorf("left behind:\n%s", diff)
		}
		if _, err := os.Stat(filepath.Join(u.home, "clusters", name)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the directory is still there: %v", err)
		}
		u.untouched("work")
	}
	if out := u.gbctl(askBudget, "cluster", "destroy", "--name", name); out != "there is no cluster "+name+"\n" {
		t.Errorf("destroy says %q", out)
	}
}
