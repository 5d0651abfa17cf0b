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
	// lookEvery is how often is looked who has the address: one that moves is nobody's for
	// 300 ms at least.
	lookEvery = 50 * time.Millisecond
	// keptLooks is how many looks it takes to say that an address stays. On a machine that
	// is busy with other things they are seconds apart.
	keptLooks = 10
)

// change is who has the address from a time on, as this machine's kernel sees it.
type change struct {
	at  time.Time
	who []string
}

// monitor looks all the while who has the address.
type monitor struct {
	c     *scenario
	began time.Time
	stop  func()

	mu      sync.Mutex // guards all below
	changes []change
	looks   int
	last    time.Time     // the last look
	blind   time.Duration // the longest time between two
	err     error         // of the last look that failed
}

// watch begins to look; the end of the test ends it.
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

// look takes one look. One may fail: processes end, and lists of addresses change, while
// they are read.
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

// seen is what was seen so far.
func (l *monitor) seen() []change {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.changes)
}

// count is how many looks were taken, and why the last one wasn't that failed.
func (l *monitor) count() (looks int, failed error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.looks, l.err
}

// history lists the changes that were seen, for the reader.
func (l *monitor) history() string {
	var parts []string
	for _, c := range l.seen() {
		parts = append(parts, fmt.Sprintf("%.2fs %v", c.at.Sub(l.began).Seconds(), c.who))
	}
	return strings.Join(parts, ", ")
}

// moves are who got the address, and who lost it, in order.
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

// when is when a node first didn't have the address any more, or first had it.
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

// moved waits until the address has stayed for a while, and ends the looking. It went
// from one node to the other, once, and did nothing else.
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
