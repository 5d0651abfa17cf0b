//go:build e2e && long

package vip

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/garboard-os/garboard/qemu"
)

const (
	// lookEvery is the interval of checks which node has the address: while it
	// moves, no node has it for at least 300 ms.
	lookEvery = 50 * time.Millisecond
	// keptLooks is how many checks are needed to conclude that an address stays.
	// On a busy machine they are seconds apart.
	keptLooks = 10
)

// change is the nodes that have the address from a time on, according to this machine's kernel.
type change struct {
	at  time.Time
	who []string
}

// monitor checks all the time which node has the address.
type monitor struct {
	c     *scenario
	began time.Time
	stop  func()

	mu      sync.Mutex // guards all below
	changes []change
	looks   int
	last    time.Time     // the last check
	blind   time.Duration // the longest time between two
	err     error         // of the last check that failed
}

// watch starts the checks; they end with the test.
func (c *scenario) watch() *monitor {
	l := &monitor{c: c, began: time.Now()}
	l.look()
	done, gone := make(chan struct{}), make(chan struct{})
	l.stop = sync.OnceFunc(func() { close(done); <-gone })
	go func() {
		defer close(gone)
		tick := time.NewTicker(lookEvery)
		defer tick.Stop()
		for {
			select {
			case <-done:
				return
			case <-tick.C:
				l.look()
			}
		}
	}()
	c.t.Cleanup(l.stop)
	return l
}

// look makes one check. A single one may fail: processes end, and lists of
// addresses change, while they are read.
func (l *monitor) look() {
	all, err := l.c.Holders(l.c.shared)
	now := time.Now()
	var who []string
	for _, n := range all {
		who = append(who, n.Name)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil {
		l.err = err
		return
	}
	if l.looks++; l.looks > 1 {
		l.blind = max(l.blind, now.Sub(l.last))
	}
	l.last = now
	if len(l.changes) == 0 || !slices.Equal(l.changes[len(l.changes)-1].who, who) {
		l.changes = append(l.changes, change{now, who})
	}
}

// seen is the changes so far.
func (l *monitor) seen() []change {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.changes)
}

// count is the number of checks, and the error of the last one that failed.
func (l *monitor) count() (looks int, failed error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.looks, l.err
}

// history lists the changes, for the test's log.
func (l *monitor) history() string {
	var parts []string
	for _, c := range l.seen() {
		parts = append(parts, fmt.Sprintf("%.2fs %v", c.at.Sub(l.began).Seconds(), c.who))
	}
	return strings.Join(parts, ", ")
}

// moves are the nodes that got the address, and those that lost it, in order.
func moves(changes []change) (got, lost []string) {
	var before []string
	for _, c := range changes {
		for _, name := range c.who {
			if !slices.Contains(before, name) {
				got = append(got, name)
			}
		}
		for _, name := range before {
			if !slices.Contains(c.who, name) {
				lost = append(lost, name)
			}
		}
		before = c.who
	}
	return got, lost
}

// when is when a node first had the address, or first didn't have it any more.
func (l *monitor) when(n qemu.Node, has bool) time.Time {
	l.c.t.Helper()
	had := false
	for _, c := range l.seen() {
		now := slices.Contains(c.who, n.Name)
		if now == has && (has || had) {
			return c.at
		}
		had = had || now
	}
	l.c.t.Fatalf("%s never was seen to have, or not to have, the address: %s", n.Name, l.history())
	return time.Time{}
}

// moved waits until the address has stayed for some time, and ends the checks.
// The address must have moved once from one node to the other, and nowhere else.
func (l *monitor) moved(was, is qemu.Node) {
	c := l.c
	c.t.Helper()
	began := time.Now()
	before, _ := l.count()
	want, astray := fmt.Sprint([]string{was.Name, is.Name}, []string{was.Name}), false
	c.Eventually(2*keepTime, "the address stays on "+is.Name, func() error {
		changes := l.seen()
		if last := changes[len(changes)-1]; !slices.Equal(last.who, []string{is.Name}) {
			return fmt.Errorf("it is on %v: %s", last.who, l.history())
		}
		got, lost := moves(changes)
		if astray = fmt.Sprint(got, lost) != want; astray {
			return nil
		}
		since := began
		if last := changes[len(changes)-1].at; last.After(since) {
			since = last
		}
		looks, failed := l.count()
		if kept := time.Since(since); kept < keepTime || looks < before+keptLooks {
			return errors.Join(fmt.Errorf("for %s and %d looks so far", kept, looks-before), failed)
		}
		return nil
	})
	l.stop()
	if astray {
		c.t.Errorf("the address wasn't to go but from %s to %s", was.Name, is.Name)
		for _, n := range c.Nodes {
			c.t.Logf("%s:\n%s", n.Name, c.Gbctl("-n", n.Address.String(), "logs", "vip"))
		}
	}
	c.t.Logf("%d looks, at most %s apart: %s", l.looks, l.blind.Round(time.Millisecond), l.history())
}
