// Package ledger remembers what a cluster has acknowledged, for the stories in which
// it loses members: whatever was acknowledged must be there afterwards. A write that
// failed, or whose answer never came, may be there or not.
package ledger

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// named is how many keys an error names; thousands can be lost at once.
const named = 5

// Ledger is written by one or many, and read at the end.
type Ledger struct {
	mu       sync.Mutex // guards all below
	acked    map[string]string
	failures int
	failure  error // the last
	last     time.Time
	pause    Pause
}

// Pause is a time in which nothing was acknowledged.
type Pause struct {
	From time.Time
	Took time.Duration
}

// New begins a ledger; its first pause begins, too.
func New(now time.Time) *Ledger {
	return &Ledger{acked: map[string]string{}, last: now}
}

// Acknowledged notes a write that the cluster has said yes to. Keys are written once.
func (l *Ledger) Acknowledged(key, value string, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.acked[key] = value
	l.passed(now)
	l.last = now
}

// Failed notes a write that may have happened or not.
func (l *Ledger) Failed(err error, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failures++
	l.failure = err
	l.passed(now)
}

// passed must be called with the mutex held.
func (l *Ledger) passed(now time.Time) {
	if took := now.Sub(l.last); took > l.pause.Took {
		l.pause = Pause{l.last, took}
	}
}

// Count is how many writes were acknowledged.
func (l *Ledger) Count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.acked)
}

// Longest is the longest pause since the beginning, or since the last call.
func (l *Ledger) Longest() Pause {
	l.mu.Lock()
	defer l.mu.Unlock()
	longest := l.pause
	l.pause = Pause{}
	return longest
}

func (l *Ledger) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	text := fmt.Sprintf("%d writes acknowledged, %d not", len(l.acked), l.failures)
	if l.failure != nil {
		text += fmt.Sprintf(", the last of them: %v", l.failure)
	}
	return text
}

// Check says which acknowledged writes aren't among those that were found, or were
// found with another value. No write at all is an error as well: such a story has
// shown nothing.
func (l *Ledger) Check(found map[string]string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.acked) == 0 {
		return errors.New("no write was acknowledged")
	}
	var lost, changed []string
	for key, value := range l.acked {
		switch now, there := found[key]; {
		case !there:
			lost = append(lost, key)
		case now != value:
			changed = append(changed, fmt.Sprintf("%s is %q, not %q", key, now, value))
		}
	}
	var errs []error
	for _, bad := range []struct {
		what string
		keys []string
	}{{"lost", lost}, {"changed", changed}} {
		if len(bad.keys) > 0 {
			slices.Sort(bad.keys)
			errs = append(errs, fmt.Errorf("of %d acknowledged writes %d are %s: %q", len(l.acked), len(bad.keys), bad.what, bad.keys[:min(named, len(bad.keys))]))
		}
	}
	return errors.Join(errs...)
}
