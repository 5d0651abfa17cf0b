// Package isolate runs the tests of a package in Linux namespaces of their own: what they
// do to links, kernel parameters, mounts or the host name stays theirs, and is gone with
// the process, also after a test that failed.
package isolate

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"
)

// isolated marks the process that already has namespaces of its own.
const isolated = "GARBOARD_TEST_ISOLATED"

// Main is for TestMain, and doesn't return. For root it runs the test program once more,
// in new namespaces of the kinds that the flags name (unshare(2)), and ends as that does.
// Without root the tests run as they are.
//
//	TestMain ── unshare, exec ──► TestMain: m.Run
//	         ◄── exit code ──
func Main(m *testing.M, flags uintptr) {
	if os.Geteuid() != 0 || os.Getenv(isolated) != "" {
		os.Exit(m.Run())
	}
	code, err := again(flags)
	if err != nil {
		fmt.Fprintln(os.Stderr, "run the tests in namespaces of their own:", err)
	}
	os.Exit(code)
}

func again(flags uintptr) (code int, err error) {
	runtime.LockOSThread() // Pdeathsig is sent when the thread ends that started the process
	defer runtime.UnlockOSThread()
	cmd := exec.Command(os.Args[0], os.Args[1:]...)
	cmd.Env = append(os.Environ(), isolated+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	// With Unshareflags, unlike with Cloneflags, package syscall makes the mounts of a new
	// mount namespace private.
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: flags, Pdeathsig: syscall.SIGKILL}
	err = cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.Exited() {
		return exit.ExitCode(), nil
	}
	if err != nil {
		return 1, err
	}
	return 0, nil
}
