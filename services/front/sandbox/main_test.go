package sandbox

import (
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"testing"

	"github.com/garboard-os/garboard/services/core/process"
	"golang.org/x/sys/unix"
)

// What the tests with root stand on: real programs, and a process that behaves like
// PID 1: orphans are its children, and a sweep follows each SIGCHLD. So nothing
// here may start a program but through processes.
var (
	processes = process.New()
	programs  string // a folder with sandbox and prober; only root may look into it
)

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	if os.Geteuid() != 0 {
		return m.Run()
	}
	dir, err := os.MkdirTemp("", "sandboxed-")
	check(err)
	defer os.RemoveAll(dir)
	programs = dir
	// So that go test sees what the tests depend on: it keeps a result until a file
	// changes that the test itself has looked at.
	for _, pattern := range []string{"cmd/sandbox/*.go", "testdata/prober/*.go"} {
		sources, err := filepath.Glob(pattern)
		check(err)
		for _, source := range sources {
			_, err := os.Stat(source)
			check(err)
		}
	}
	// As package image/program builds it.
	build("1", "-tags=netgo,osusergo,seccomp", "-ldflags=-linkmode external -extldflags -static", "-o", filepath.Join(dir, "sandbox"), "./cmd/sandbox")
	build("0", "-o", filepath.Join(dir, "prober"), "./testdata/prober")
	check(unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
	chld := make(chan os.Signal, 1)
	signal.Notify(chld, unix.SIGCHLD)
	go func() {
		for range chld {
			_, err := processes.Reap()
			check(err)
		}
	}()
	return m.Run()
}

func build(cgo string, args ...string) {
	cmd := exec.Command("go", append([]string{"build"}, args...)...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED="+cgo, "CGO_CFLAGS=-O2")
	if out, err := cmd.CombinedOutput(); err != nil {
		check(fmt.Errorf("%s: %w\n%s", cmd, err, out))
	}
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(99)
	}
}
