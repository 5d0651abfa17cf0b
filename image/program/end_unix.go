//go:build unix

package program

import (
	"os/exec"
	"syscall"
)

// endWhole makes the context of a command end all processes that the command starts, too.
func endWhole(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
}
