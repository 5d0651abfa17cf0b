package isolate

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestMain(m *testing.M) { Main(m, syscall.CLONE_NEWNET|syscall.CLONE_NEWNS) }

const (
	// role is what TestRole does in a program that another test starts.
	role       = "GARBOARD_TEST_ROLE"
	exits      = "exits"
	stays      = "stays"
	ownCode    = 7
	longEnough = time.Minute // for whoever should end before it to have ended
)

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes namespaces")
	}
}

// program is this one as go test starts it, with only TestRole.
func program(what string) *exec.Cmd {
	cmd := exec.Command(os.Args[0], "-test.run=^TestRole$")
	cmd.Env = append(slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, isolated+"=") }), role+"="+what)
	return cmd
}

// TestRole is what the others start.
func TestRole(t *testing.T) {
	switch os.Getenv(role) {
	case exits:
		os.Exit(ownCode)
	case stays:
		fmt.Println("started")
		<-time.After(longEnough)
		fmt.Println("nobody ended it")
	default:
		t.Skip("another test starts it")
	}
}

func TestTheNamespacesAreOwn(t *testing.T) {
	needRoot(t)
	for kind, own := range map[string]bool{"net": true, "mnt": true, "uts": false} {
		here, err := os.Readlink("/proc/self/ns/" + kind)
		if err != nil {
			t.Fatal(err)
		}
		there, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", os.Getppid(), kind))
		if err != nil {
			t.Fatal(err)
		}
		if (here != there) != own {
			t.Errorf("%s: it is %s, and that of the parent %s", kind, here, there)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(mounts), " shared:") {
		t.Errorf("mounts are shared:\n%s", mounts)
	}
}

func TestTheExitCodeIsPassedOn(t *testing.T) {
	needRoot(t)
	var exit *exec.ExitError
	if err := program(exits).Run(); !errors.As(err, &exit) || exit.ExitCode() != ownCode {
		t.Errorf("it ended with %v, not %d", err, ownCode)
	}
	if err := program("").Run(); err != nil {
		t.Errorf("nothing failed, and it ended with %v", err)
	}
}

// The output ends when nobody is left who could write to it.
func TestItEndsWithItsParent(t *testing.T) {
	needRoot(t)
	cmd := program(stays)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(out)
	if line, err := lines.ReadString('\n'); err != nil || line != "started\n" {
		t.Errorf("it says %q (%v)", line, err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if rest, err := io.ReadAll(lines); err != nil || len(rest) > 0 {
		t.Errorf("its parent was killed, and it says %q (%v)", rest, err)
	}
	_ = cmd.Wait() // it was killed
}
