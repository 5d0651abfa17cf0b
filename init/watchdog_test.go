package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// fakeWatchdog records the calls.
type fakeWatchdog struct {
	mu   sync.Mutex
	done []string
}

func (d *fakeWatchdog) note(what string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.done = append(d.done, what)
	return nil
}

func (d *fakeWatchdog) SetTimeout(t time.Duration) error { return d.note("timeout " + t.String()) }
func (d *fakeWatchdog) Keepalive() error                 { return d.note("keepalive") }
func (d *fakeWatchdog) Disarm() error                    { return d.note("disarm") }

func (d *fakeWatchdog) count(what string) (n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, w := range d.done {
		if w == what {
			n++
		}
	}
	return n
}

func newTestWatchdog(p *pid1) (*watchdog, *fakeWatchdog, chan time.Time) {
	d := &fakeWatchdog{}
	beats := make(chan time.Time)
	w := newWatchdog(p)
	w.open = func(string) (watchdogTimer, error) { return d, nil }
	w.software = func(string) bool { return false }
	w.beats = beats
	return w, d, beats
}

func TestKeepalivesWhileTheMainLoopAnswers(t *testing.T) {
	p, _ := newTestPID1(boot.Machine)
	w, d, beats := newTestWatchdog(p)
	answering := true
	w.alive = func(time.Duration) bool { return answering }
	w.start("/dev/watchdog0")
	w.start("/dev/watchdog0")
	w.start("/dev/watchdog1") // a second one changes nothing
	keepalives := func(n int) {
		eventually.That(t, 5*time.Second, "keepalives of the watchdog", func() error {
			if got := d.count("keepalive"); got != n {
				return fmt.Errorf("%d times, want %d", got, n)
			}
			return nil
		})
	}
	keepalives(1)
	beats <- time.Time{}
	keepalives(2)
	answering = false // seen after the next beat, which synchronizes
	beats <- time.Time{}
	beats <- time.Time{} // received only after the previous beat was handled
	if n := d.count("keepalive"); n != 2 {
		t.Errorf("%d keepalives although the main loop is stuck", n)
	}
}

func TestMainLoopAnswersBeforeAndInsideTheFunnel(t *testing.T) {
	p, _ := newTestPID1(boot.Machine)
	if p.alive(time.Millisecond) {
		t.Error("alive without a main loop")
	}
	inPhase := make(chan bool)
	exitOf(p, request{intent: halt, why: "test"}, phase{"long", 10 * time.Second, func(context.Context) error {
		go func() { inPhase <- p.alive(5 * time.Second) }()
		if !<-inPhase {
			t.Error("no answer while a phase runs")
		}
		return nil
	}})
}

func TestWatchdogAtTheEnd(t *testing.T) {
	for i, want := range map[intent]string{powerOff: "disarm", halt: "disarm", reboot: "keepalive"} {
		p, _ := newTestPID1(boot.Machine)
		w, d, _ := newTestWatchdog(p)
		w.alive = func(time.Duration) bool { return false }
		w.start("/dev/watchdog0")
		w.release(i)
		if diff := cmp.Diff([]string{"timeout 1m0s", want}, d.done); diff != "" {
			t.Errorf("%s (-want +got):\n%s", i, diff)
		}
		if w.keepalive() {
			t.Errorf("%s: a keepalive after release", i)
		}
	}
}

// The kernel's own watchdog is used until there is one of the hardware, and is disarmed then.
func TestSoftdogGivesWay(t *testing.T) {
	const soft, hard, other = "/dev/watchdog0", "/dev/watchdog1", "/dev/watchdog2"
	disarmed := []string{"disarm"}
	for _, c := range []struct {
		order []string
		want  map[string][]string
	}{
		{[]string{soft}, map[string][]string{soft: {"timeout 1m0s"}}},
		{[]string{soft, hard, other, soft}, map[string][]string{soft: {"timeout 1m0s", "disarm"}, hard: {"timeout 1m0s"}}},
		{[]string{hard, soft, other}, map[string][]string{soft: disarmed, hard: {"timeout 1m0s"}}},
	} {
		p, _ := newTestPID1(boot.Machine)
		w, _, _ := newTestWatchdog(p)
		w.alive = func(time.Duration) bool { return false }
		devices := map[string]*fakeWatchdog{}
		w.software = func(path string) bool { return path == soft }
		w.open = func(path string) (watchdogTimer, error) {
			devices[path] = &fakeWatchdog{}
			return devices[path], nil
		}
		for _, path := range c.order {
			w.start(path)
		}
		got := map[string][]string{}
		for path, d := range devices {
			got[path] = d.done
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%v (-want +got):\n%s", c.order, diff)
		}
	}
}

func TestWatchdogThatCannotBeOpened(t *testing.T) {
	p, s := newTestPID1(boot.Machine)
	w, _, _ := newTestWatchdog(p)
	w.open = func(string) (watchdogTimer, error) { return nil, errors.New("device or resource busy") }
	w.start("/dev/watchdog0")
	w.release(powerOff)
	if !strings.Contains(s.String(), "watchdog /dev/watchdog0 isn't used: device or resource busy") {
		t.Errorf("console:\n%s", s)
	}
}
