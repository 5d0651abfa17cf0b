package process

import (
	"os"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// The same storm with the reaper as a real PID 1, of a PID namespace.
func TestStormAsPID1(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("a PID namespace with its own /proc needs root")
	}
	cmd := helper("init")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Logf("%s", out)
}

func helperInit([]string) {
	check(unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	check(unix.Mount("proc", "/proc", "proc", 0, ""))
	helperStorm(nil)
}
