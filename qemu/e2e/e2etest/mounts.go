//go:build e2e

package e2etest

import (
	"os"
	"os/exec"
	"syscall"
	"testing"
)

// ownMountsVar marks the process that has a mount namespace of its own.
const ownMountsVar = "GARBOARD_E2E_OWN_MOUNTS"

// InOwnMounts runs the calling test once more, in a process with a mount namespace of its
// own. Its mounts end with that process, in which InOwnMounts returns true.
func InOwnMounts(t testing.TB) bool {
	t.Helper()
	if os.Getenv(ownMountsVar) != "" {
		return true
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v", "-test.count=1")
	cmd.Env = append(os.Environ(), ownMountsVar+"=1")
	// Go makes the mounts of a new namespace private.
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Errorf("in a mount namespace of its own: %v", err)
	}
	return false
}
