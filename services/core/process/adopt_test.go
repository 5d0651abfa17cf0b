package process

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// In a process of its own, which becomes a subreaper.
func TestAdoptedChildTellsItsEnd(t *testing.T) {
	if out, err := helper("adopter").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

// helperMidwife starts a process that ends with status 7 once its input is closed,
// prints its PID, and ends when its own input is closed.
func helperMidwife([]string) {
	cmd := helper("late", "7")
	in, err := cmd.StdinPipe()
	check(err)
	check(cmd.Start())
	// The parent's end goes with this process.
	fmt.Println(cmd.Process.Pid)
	_, _ = os.Stdin.Read(make([]byte, 1))
	_ = in
}

func helperLate(args []string) {
	_, _ = os.Stdin.Read(make([]byte, 1))
	code, err := strconv.Atoi(args[0])
	check(err)
	os.Exit(code)
}

func helperAdopter([]string) {
	becomeReaper()
	table := New()
	cmd := helper("midwife")
	in, err := cmd.StdinPipe()
	check(err)
	read, write, err := os.Pipe()
	check(err)
	cmd.Stdout = write
	midwife, err := table.Start(cmd)
	check(err)
	var pid int
	_, err = fmt.Fscan(read, &pid)
	check(err)

	child, err := table.Adopt(midwife, pid, "late", "7")
	check(err)
	if _, err := table.Adopt(midwife, pid, "late"); err == nil || !strings.Contains(err.Error(), "is known as late 7") {
		check(fmt.Errorf("adopted twice: %w", err))
	}
	in.Close()
	check(midwife.Wait())
	// Its end follows from that of the midwife; sweeps meanwhile must not take it.
	for done := false; !done; {
		_, err := table.Reap()
		check(err)
		select {
		case <-child.Done():
			done = true
		default:
		}
	}
	var exit *exec.ExitError
	if err := child.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 7 || !strings.HasPrefix(err.Error(), "run late 7: ") {
		check(fmt.Errorf("its end: %w", err))
	}
	if err := child.Signal(unix.SIGTERM); !errors.Is(err, os.ErrProcessDone) {
		check(fmt.Errorf("signal after the end: %w", err))
	}
	if table.Reaped() != 0 {
		check(errors.New("the sweep took it"))
	}
	if _, err := table.Adopt(midwife, pid, "late"); !errors.Is(err, os.ErrProcessDone) {
		check(fmt.Errorf("adopted from one that has ended: %w", err))
	}
}

// A process that isn't left to us after all (who started it has waited for it) is
// an error, not a hang.
func TestAdoptionThatFails(t *testing.T) {
	table := New()
	cmd := helper("midwife")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	midwife, err := table.Start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	child, err := table.Adopt(midwife, os.Getpid(), "ourselves")
	if err != nil {
		t.Fatal(err)
	}
	in.Close()
	if err := child.Wait(); !errors.Is(err, unix.ECHILD) {
		t.Errorf("error: %v", err)
	}
}
