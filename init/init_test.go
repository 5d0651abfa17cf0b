package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/process"
	"github.com/garboard-os/garboard/services/operations/lifecycle"
)

// screen is a console that a test reads.
type screen struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *screen) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func newTestPID1(mode boot.Mode) (*pid1, *screen) {
	s := &screen{}
	p := &pid1{
		mode:      mode,
		processes: process.New(),
		requests:  make(chan request, 1),
		heartbeat: make(chan chan struct{}),
	}
	p.useLogs(logs.New(s))
	return p, s
}

// The promise to users who press the power button.
func TestShutdownBudgetIsBelowThirtySeconds(t *testing.T) {
	if shutdownBudget > 29*time.Second {
		t.Errorf("shutdown may take %s, and the kernel wants its part of 30 s", shutdownBudget)
	}
	p, _ := newTestPID1(boot.Machine)
	var sum time.Duration
	for _, ph := range p.orderlyPhases(request{}, nil, nil) {
		sum += ph.budget
	}
	if sum += consoleBudget; sum != shutdownBudget {
		t.Errorf("phases take up to %s, the budget says %s", sum, shutdownBudget)
	}
	if watchdogTimeout <= shutdownBudget || watchdogPeriod*3 > watchdogTimeout {
		t.Error("the watchdog cuts an orderly shutdown, or a late beat")
	}
}

// pressedNode is a node that records how it is ended.
type pressedNode struct {
	node
	end   func() error
	asked chan string
}

func (n pressedNode) Run(ctx context.Context) error { <-ctx.Done(); return nil }

func (n pressedNode) End(_ context.Context, p boot.Power, why string) error {
	n.asked <- fmt.Sprint(p, " ", why)
	return n.end()
}

// The power button and a signal have the same effect as gbctl shutdown. A shutdown that can't
// begin, hangs or exceeds its budget ends at once, and so does one that is requested twice.
func TestPress(t *testing.T) {
	t.Parallel()
	const soon = time.Second
	for name, c := range map[string]struct {
		end   func() error
		again bool
		after time.Duration // until the funnel is asked
	}{
		"goes on":        {func() error { return nil }, false, lifecycle.PressBudget},
		"can't begin":    {func() error { return errors.New("STATE isn't mounted") }, false, soon},
		"panics":         {func() error { panic("oh") }, false, soon},
		"is asked twice": {func() error { return nil }, true, soon},
		"hangs":          {func() error { time.Sleep(time.Hour); return nil }, false, lifecycle.PressBudget},
		"hangs, twice":   {func() error { time.Sleep(time.Hour); return nil }, true, soon},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				p, _ := newTestPID1(boot.Machine)
				asked := make(chan string, 1)
				var n node = pressedNode{end: c.end, asked: asked}
				p.node.Store(&n)
				begin := time.Now()
				p.signalled(syscall.SIGINT)
				if got := <-asked; got != fmt.Sprint(boot.Reboot, " ctrl-alt-del") {
					t.Errorf("the node is asked for %s", got)
				}
				if c.again {
					p.signalled(syscall.SIGTERM)
				}
				r := <-p.requests
				if took := time.Since(begin); took > c.after || took < c.after-soon {
					t.Errorf("it ends after %s, not %s", took, c.after)
				}
				if want := map[bool]intent{true: powerOff, false: reboot}[c.again]; r.intent != want {
					t.Errorf("%+v", r)
				}
				p.leaving.Store(true)
				time.Sleep(2 * time.Hour) // until all its goroutines have ended
			})
		})
	}
}

func TestSignalsMean(t *testing.T) {
	for _, c := range []struct {
		mode   boot.Mode
		signal syscall.Signal
		want   intent
	}{
		{boot.Machine, syscall.SIGTERM, powerOff},
		{boot.Machine, syscall.SIGINT, reboot},
		{boot.Machine, syscall.SIGUSR1, halt},
		{boot.Container, syscall.SIGINT, powerOff},
		{boot.Container, rtmin + 3, powerOff},
		{boot.Container, rtmin + 5, reboot},
	} {
		p, _ := newTestPID1(c.mode)
		p.signalled(c.signal)
		if r := <-p.requests; r.intent != c.want || r.why == "" {
			t.Errorf("%s: %s means %+v", c.mode, unix.SignalName(c.signal), r)
		}
	}
	p, _ := newTestPID1(boot.Machine)
	p.signalled(syscall.SIGHUP)
	select {
	case r := <-p.requests:
		t.Errorf("SIGHUP means %+v", r)
	default:
	}
}

func TestRecordReason(t *testing.T) {
	dir := t.TempDir()
	if err := recordReason(dir, request{intent: reboot, why: "x"}); err != nil {
		t.Error(err)
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 0 {
		t.Error("written to where STATE isn't mounted")
	}
}

func TestStepTurnsPanicIntoError(t *testing.T) {
	err := step{"do it", func() error { panic("x") }}.run()
	if err == nil || err.Error() != "do it: panic: x" {
		t.Errorf("got %v", err)
	}
}

func TestApplySettings(t *testing.T) {
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "net/ipv4"), 0o755); err != nil {
		t.Fatal(err)
	}
	var skipped []string
	applySettings(dir, []boot.Setting{{Name: "net/ipv4/ip_forward", Value: "1"}, {Name: "vm/none", Value: "1"}}, func(s boot.Setting, err error) {
		skipped = append(skipped, s.Name)
	})
	got, err := os.ReadFile(filepath.Join(dir, "net/ipv4/ip_forward"))
	if string(got) != "1\n" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	if d := cmp.Diff([]string{"vm/none"}, skipped); d != "" {
		t.Error(d)
	}
}

// A container must not change what belongs to the whole host.
func TestContainerTouchesOnlyItsOwn(t *testing.T) {
	for _, s := range settingsFor(boot.Container) {
		if !strings.HasPrefix(s.Name, "net/") {
			t.Errorf("setting %s", s.Name)
		}
	}
	for _, m := range forMode(mounts, boot.Container) {
		if strings.HasPrefix(m.target, "/sys/") || strings.HasPrefix(m.target, "/proc/") {
			t.Errorf("mount %s", m.target)
		}
	}
	p, _ := newTestPID1(boot.Container)
	for _, s := range p.bootSteps() {
		if strings.Contains(s.what, "ctrl-alt-del") || strings.Contains(s.what, "watchdog") || strings.Contains(s.what, "hostname") {
			t.Errorf("step %q", s.what)
		}
	}
}

// At boot a machine sets the kernel parameters that its kubelet requires.
func TestKubeletFindsItsKernelDefaults(t *testing.T) {
	set := map[string]string{}
	for _, s := range settingsFor(boot.Machine) {
		set[s.Name] = s.Value
	}
	for _, s := range boot.KubeletParameters {
		if set[s.Name] != s.Value {
			t.Errorf("%s is set to %q, want %q", s.Name, set[s.Name], s.Value)
		}
	}
}

func TestTablesAreSound(t *testing.T) {
	seen := map[string]bool{}
	programs := map[string]string{"kernel/modprobe": self, "kernel/poweroff_cmd": self + " " + askPowerOff}
	for _, s := range settingsFor(boot.Machine) {
		if want, is := programs[s.Name]; is && s.Value != want {
			t.Errorf("%s is %q, want %q", s.Name, s.Value, want)
		}
		if s.Why == "" || s.Value == "" || seen[s.Name] || filepath.Clean(s.Name) != s.Name {
			t.Errorf("setting %+v", s)
		}
		seen[s.Name] = true
	}
	for name := range programs {
		if !seen[name] {
			t.Errorf("no setting %s", name)
		}
	}
	for _, m := range mounts {
		if m.fstype == "" || filepath.Clean(m.target) != m.target || seen[m.target] {
			t.Errorf("mount %+v", m)
		}
		seen[m.target] = true
	}
}

func TestProcessesThatAreLeft(t *testing.T) {
	line := func(name, state string, flags uint) string {
		return fmt.Sprintf("42 (%s) %s 1 42 42 0 -1 %d%s\n", name, state, flags, strings.Repeat(" 7", 43))
	}
	for _, c := range []struct{ line, want string }{
		{line("etcd", "S", 0x400100), "etcd (42)"},
		{line("a) S (b", "D", 0), "a) S (b (42)"},
		{line("kworker/0:1", "I", 0x4208060), ""},
		{line("sh", "Z", 0x400100), ""},
		{"junk", ""},
		{"1 (x) S", ""},
	} {
		proc := t.TempDir()
		for _, pid := range []int{42, os.Getpid()} {
			dir := filepath.Join(proc, strconv.Itoa(pid))
			if err := errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(filepath.Join(dir, "stat"), []byte(c.line), 0o600)); err != nil {
				t.Fatal(err)
			}
		}
		if found, err := processes(proc); strings.Join(found, ", ") != c.want || err != nil {
			t.Errorf("%s: %q, %v", c.line, found, err)
		}
	}
}

func TestHasKey(t *testing.T) {
	path := filepath.Join(t.TempDir(), "key")
	for text, want := range map[string]bool{
		"10000000000000 0\n": true, // the ACPI power button: 116 = 64 + 52
		"10000000000000\n":   false,
		"402000000 3803078f800d001 feffffdfffefffff fffffffffffffffe\n": true,  // a keyboard with a power key
		"402000000 3803078f800d001 feefffdfffefffff fffffffffffffffe\n": false, // a keyboard without one
		"junk x\n": false,
		"":         false,
	} {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if got := hasKey(path, keyPower); got != want {
			t.Errorf("%q: %v", text, got)
		}
	}
	if hasKey(path+".none", keyPower) {
		t.Error("a device without capabilities has a key")
	}
}

func TestButtonAsksForPowerOffWhenPressed(t *testing.T) {
	event := func(kind, code uint16, value uint32) []byte {
		b := make([]byte, 16, 24)
		b = append(b, byte(kind), byte(kind>>8), byte(code), byte(code>>8))
		return append(b, byte(value), 0, 0, 0)
	}
	path := filepath.Join(t.TempDir(), "event0")
	var stream []byte
	for _, e := range [][]byte{event(eventKey, 30, 1), event(eventKey, keyPower, 0), event(0, keyPower, 1)} {
		stream = append(stream, e...)
	}
	read := func() (request, bool) {
		p, _ := newTestPID1(boot.Machine)
		if err := os.WriteFile(path, stream, 0o644); err != nil {
			t.Fatal(err)
		}
		if err := p.watchButton(path); err == nil {
			t.Error("no error at the end of the device")
		}
		select {
		case r := <-p.requests:
			return r, true
		default:
			return request{}, false
		}
	}
	if r, asked := read(); asked {
		t.Errorf("other keys, and letting go: %+v", r)
	}
	stream = append(stream, event(eventKey, keyPower, 1)...)
	if r, _ := read(); r.intent != powerOff || r.why != "power button" {
		t.Errorf("got %+v", r)
	}
}
