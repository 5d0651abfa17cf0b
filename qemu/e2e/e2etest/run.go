//go:build e2e

package e2etest

import (
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu/osthread"
)

// endBudget is for the end of a program that was told to end.
const endBudget = 20 * time.Second

// Run starts a program on a thread, or here, and ends it with the test. It returns the file with its output.
func Run(t testing.TB, inside *osthread.Thread, program string, args ...string) (log string) {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), filepath.Base(program)+".log"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr = f, f
	start := cmd.Start
	if inside != nil {
		start = func() error { return inside.Do(cmd.Start) }
	}
	if err := start(); err != nil {
		t.Fatalf("%s: %v", program, err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM) // it may have ended
		timer := time.AfterFunc(endBudget, func() { _ = cmd.Process.Kill() })
		defer timer.Stop()
		_ = cmd.Wait() // it was told to end
		if t.Failed() {
			text, _ := os.ReadFile(f.Name())
			t.Logf("%s:\n%s", program, text)
		}
	})
	return f.Name()
}
