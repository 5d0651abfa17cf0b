package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// A node's mounts are never seen where it was started, even if the starter gave it
// no mount namespace. (Here the starter itself has one, in case that this fails.)
func TestNodeMountsNothingWhereItIsStarted(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: namespaces and mounts")
	}
	dir := t.TempDir()
	spec := strings.NewReplacer(`"/w"`, `"`+filepath.Join(dir, "work")+`"`, "/c.log", filepath.Join(dir, "console.log")).Replace(goodSpec)
	if err := os.WriteFile(filepath.Join(dir, "spec"), []byte(spec), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "work"), 0o700); err != nil {
		t.Fatal(err)
	}
	script := `cat /proc/self/mountinfo >before; unshare --pid --fork "$1" node - <spec; echo "ended: $?"; cat /proc/self/mountinfo >after`
	cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "sh", "-c", script, "sh", os.Args[0])
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	// It comes as far as the root filesystem, which isn't there.
	if err != nil || !strings.Contains(string(out), "/r.sqsh: no such file or directory\nended: 1") {
		t.Fatalf("%v: %s", err, out)
	}
	before, err := os.ReadFile(filepath.Join(dir, "before"))
	if err != nil {
		t.Fatal(err)
	}
	if after, err := os.ReadFile(filepath.Join(dir, "after")); err != nil || string(after) != string(before) {
		t.Errorf("mounts changed: %v\n%s", err, after)
	}
}
