// Package uml runs a compiled test program in a User Mode Linux guest: a kernel that is an
// ordinary process, needs no virtualisation, and whose disks, links and modules are the
// test's alone.
//
// It is made for go test:
//
//	go test -exec "$PWD/out/dev uml" -tags=kernel ./services/system/disks
//
// Tests whose own program is that of a system (./services) need CGO_ENABLED=0: a system's program has no libraries.
//
// The guest's root is the host's file system, read-only, so that the test finds its package,
// and every tool that the host has. Temporary directories are the guest's own, in memory.
// What go test wants to have written (its log for the cache, a coverage profile) is written
// to the host.
//
//	go test ── runs ──► Run (the wrapper) ── new PID namespace ──► Keep ──► linux.uml
//	                      ▲                                                   │ boots
//	                      └────────── frames on a serial line ────────────── Init (PID 1)
//	                                                                          │ starts
//	                                                                         the test
//
// Debian's user-mode-linux has no WireGuard, no nf_tables families (ip, ip6, inet), one
// processor, and no EFI. A test program built with -race doesn't run in it: the guest's
// processes lack the addresses that the race detector's memory has.
package uml

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
)

// These are the subcommands by which the program calls itself, in the order of their calls.
const (
	KeepCommand     = "uml-keep"
	InitCommand     = "uml-init"
	ModprobeCommand = "uml-modprobe"
)

// Main is for TestMain of a package whose tests change disks or links. It runs the tests in
// a guest, and refuses to run them elsewhere.
func Main(m *testing.M) {
	if !inside() {
		fmt.Fprintln(os.Stderr, `these tests change disks and links, and run in a kernel of their own only: "make kernel", or go test -exec "$PWD/out/dev uml" -tags=kernel PACKAGE`)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// inside reports whether the kernel is User Mode Linux, which has a processor of that name.
func inside() bool {
	about, err := os.ReadFile("/proc/cpuinfo")
	return err == nil && strings.Contains(string(about), "User Mode Linux")
}

var booted sync.Once

// Booted tells the test's output, once in a run, that a kernel was booted, so that it can be
// counted: tests that were skipped boot nothing. What all kernel tests of a package call
// should call it. It fails a test that isn't in a guest.
func Booted(t testing.TB) {
	t.Helper()
	if !inside() {
		t.Fatal("this test changes the kernel, and runs in one of its own only")
	}
	booted.Do(func() { t.Attr("booted", "uml") })
}
