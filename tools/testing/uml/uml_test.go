package uml

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/garboard-os/garboard/tools/testing/eventually"
)

const sources = "testdata/guest"

// built is the program that the guests run. This one may be built with -race, whose memory
// has no place in a guest.
var built = sync.OnceValues(func() (string, error) {
	// go test keeps a result until a file changes that this process has looked at.
	if _, err := os.Stat(sources + "/main.go"); err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp("", "uml-test-")
	if err != nil {
		return "", err
	}
	program := filepath.Join(dir, "guest")
	cmd := exec.Command("go", "build", "-o", program, "./"+sources)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%s: %w: %s", cmd, err, out)
	}
	return program, nil
})

func TestMain(m *testing.M) {
	code := m.Run()
	if program, err := built(); err == nil {
		os.RemoveAll(filepath.Dir(program))
	}
	os.Exit(code)
}

// wrapper runs something in a guest.
func wrapper(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	t.Parallel()
	program, err := built()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, append([]string{"run"}, args...)...)
	cmd.Dir = sources
	return cmd
}

// ran is the exit code, and what was printed on both files.
func ran(t *testing.T, cmd *exec.Cmd) (code int, out, errors string) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()
}

func TestOutputIsExact(t *testing.T) {
	const times = 2000 // half a MiB
	cmd := wrapper(t, "bytes", fmt.Sprint(times))
	long := strings.Repeat("long ", 20_000)
	cmd.Env = append(os.Environ(), "LONG="+long)
	code, out, said := ran(t, cmd)
	if code != 7 || said != "" {
		t.Errorf("exit code %d, and on standard error: %s", code, said)
	}
	dir, err := filepath.Abs(sources)
	if err != nil {
		t.Fatal(err)
	}
	each := make([]byte, 256)
	for i := range each {
		each[i] = byte(i)
	}
	if want := strings.Repeat(string(each), times) + long + dir; out != want {
		t.Errorf("%d bytes came of %d, or other ones", len(out), len(want))
	}
}

func TestPanic(t *testing.T) {
	if code, out, said := ran(t, wrapper(t, "panic")); code != 2 || !strings.Contains(out, "panic: as ordered\n\ngoroutine 1 [running]:\n") || said != "" {
		t.Errorf("exit code %d, %s%s", code, out, said)
	}
}

func TestKilled(t *testing.T) {
	if code, out, said := ran(t, wrapper(t, "killed")); code != 128+9 || out != "signal: killed\n" || said != "" {
		t.Errorf("exit code %d, %q, %s", code, out, said)
	}
}

// The negative twin: a guest that doesn't come to the end of the test is a failure, which
// says what the kernel said.
func TestKernelCrash(t *testing.T) {
	code, out, said := ran(t, wrapper(t, "crash"))
	if code != 1 || out != "" || !strings.Contains(said, "guest ended before the test") || !strings.Contains(said, "Kernel panic - not syncing: sysrq triggered crash") {
		t.Errorf("exit code %d, %s\n%s", code, out, said)
	}
}

// Only what go test wants to have written gets to the host.
func TestFiles(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	code, out, said := ran(t, wrapper(t, "files", "-test.testlogfile="+log))
	if code != 0 || out != "" || said != "" {
		t.Errorf("exit code %d, %s%s", code, out, said)
	}
	if text, err := os.ReadFile(log); err != nil || string(text) != "written" {
		t.Errorf("the log is %q (%v)", text, err)
	}
	if _, err := os.Stat(filepath.Join(os.TempDir(), "left")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the guest's temporary file is the host's (%v)", err)
	}
}

// asleep starts a guest whose program sleeps.
func asleep(t *testing.T) (cmd *exec.Cmd, out *bufio.Reader) {
	t.Helper()
	cmd = wrapper(t, "sleep")
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	out = bufio.NewReader(pipe)
	// It is still running: what is printed comes at once.
	if line, err := out.ReadString('\n'); err != nil || line != "asleep\n" {
		t.Fatalf("%q, %v", line, err)
	}
	return cmd, out
}

// below are the processes whose ancestor this one is.
func below(t *testing.T, ancestor int) (pids []int) {
	t.Helper()
	lists, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", ancestor))
	if err != nil {
		t.Fatal(err)
	}
	for _, list := range lists {
		text, err := os.ReadFile(list)
		if err != nil {
			continue // the thread has ended
		}
		for _, word := range strings.Fields(string(text)) {
			var pid int
			if _, err := fmt.Sscan(word, &pid); err != nil {
				t.Fatal(err)
			}
			pids = append(append(pids, pid), below(t, pid)...)
		}
	}
	return pids
}

func gone(t *testing.T, pids []int) {
	t.Helper()
	eventually.That(t, 10*time.Second, "the guest's processes are gone", func() error {
		for _, pid := range pids {
			if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
				return fmt.Errorf("%d of %v is there (%v)", pid, pids, err)
			}
		}
		return nil
	})
}

// go test ends a test that takes too long with SIGQUIT, to see what it does.
func TestSIGQUITIsTheTestsOwn(t *testing.T) {
	cmd, out := asleep(t)
	guest := below(t, cmd.Process.Pid)
	if err := cmd.Process.Signal(syscall.SIGQUIT); err != nil {
		t.Fatal(err)
	}
	rest, err := io.ReadAll(out)
	if err != nil {
		t.Fatal(err)
	}
	cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 2 || !strings.Contains(string(rest), "SIGQUIT: quit") || !strings.Contains(string(rest), "main.main()") {
		t.Errorf("exit code %d, %s", code, rest)
	}
	gone(t, guest)
}

// The guest's processes on the host must not outlive a wrapper that is killed: they would
// go on without their kernel.
func TestGuestEndsWithTheWrapper(t *testing.T) {
	cmd, _ := asleep(t)
	guest := below(t, cmd.Process.Pid)
	if len(guest) < 3 { // the keeper, the kernel, and a process of the guest
		t.Fatalf("its processes are %v", guest)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	gone(t, guest)
}

func TestWithoutKernel(t *testing.T) {
	cmd := wrapper(t, "sleep")
	cmd.Env = append(os.Environ(), "PATH=/nowhere")
	if code, _, said := ran(t, cmd); code != 1 || !strings.Contains(said, "apt-get install --no-install-recommends user-mode-linux") {
		t.Errorf("exit code %d, %s", code, said)
	}
}

// What a guest's temporary directory would hide is shared, and what is written is writable.
func TestShared(t *testing.T) {
	t.Setenv("TMPDIR", "/scratch")
	a := assignment{
		Program: "/tmp/go-build1/b001/disks.test", Dir: "/home/me/disks", Self: "/home/me/out/dev",
		Args: []string{"disks.test", "-test.testlogfile=/tmp/go-build1/b001/testlog.txt", "-test.timeout=10m", "-test.outputdir=/home/me/profiles", "-test.cpuprofile=cpu"},
	}
	a.share()
	if want := []shared{{"/home/me/profiles", true}, {"/tmp/go-build1/b001", true}}; !reflect.DeepEqual(a.Shared, want) {
		t.Errorf("shared are %v, want %v", a.Shared, want)
	}
	if !slices.Contains(a.Temporary, "/scratch") {
		t.Errorf("temporary are %v", a.Temporary)
	}
	a = assignment{Program: "/tmp/x/disks.test", Dir: "/tmp/checkout/disks", Self: "/tmp/checkout/out/dev", Args: []string{"disks.test"}}
	a.share()
	if want := []shared{{"/tmp/checkout/disks", false}, {"/tmp/checkout/out", false}, {"/tmp/x", false}}; !reflect.DeepEqual(a.Shared, want) {
		t.Errorf("shared are %v, want %v", a.Shared, want)
	}
}

// go test keeps a result only with the test's log, and leaves the flag out with -exec.
func TestLogForTheCache(t *testing.T) {
	const program = "/tmp/go-build1/b001/disks.test"
	if got := cacheable(program, []string{program, "-test.v"}); !slices.Equal(got, []string{"-test.testlogfile=/tmp/go-build1/b001/testlog.txt"}) {
		t.Errorf("go test's program gets %v", got)
	}
	for _, args := range [][]string{{"/home/me/disks.test"}, {program, "-test.testlogfile=/elsewhere"}} {
		if got := cacheable(args[0], args); got != nil {
			t.Errorf("%v gets %v", args, got)
		}
	}
}
