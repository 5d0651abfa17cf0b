// Package history records which writes a cluster has acknowledged. End-to-end tests in which
// a cluster loses members compare it with the data afterwards: each acknowledged write must
// be there. A write that failed, or whose answer never came, may be there or not.
package history

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// named is the largest number of keys in an error; thousands can be lost at once.
const named = 5

// History is the record of the writes. Several goroutines may use it.
type History struct {
	mu       sync.Mutex // guards all below
	acked    map[string]string
	failures int
	failure  error // the last
	last     time.Time
	failing  bool // since last
	pause    Pause
	outages  []Pause
}

// Pause is a time in which no write was acknowledged.
type Pause struct {
	From time.Time
	Took time.Duration
}

// New returns an empty history; its first pause begins now.
func New(now time.Time) *History {
	return &History{acked: map[string]string{}, last: now}
}

// Acknowledged records a write that the cluster has acknowledged. Each key is written once.
func (h *History) Acknowledged(key, value string, now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.acked[key] = value
	h.passed(now)
	if h.failing {
		h.outages = append(h.outages, Pause{h.last, now.Sub(h.last)})
	}
	h.last, h.failing = now, false
}

// Failed records a write that may have happened or not.
func (h *History) Failed(err error, now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.failures++
	h.failing = true
	h.failure = err
	h.passed(now)
}

// passed must be called with the mutex held.
func (h *History) passed(now time.Time) {
	if took := now.Sub(h.last); took > h.pause.Took {
		h.pause = Pause{h.last, took}
	}
}

// Count returns how many writes were acknowledged.
func (h *History) Count() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.acked)
}

// Longest returns the longest pause since the beginning, or since the last call.
func (h *History) Longest() Pause {
	h.mu.Lock()
	defer h.mu.Unlock()
	longest := h.pause
	h.pause = Pause{}
	return longest
}

// Outages returns the pauses in which a write failed, without one that isn't over.
func (h *History) Outages() []Pause {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.outages)
}

func (h *History) String() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	text := fmt.Sprintf("%d writes acknowledged, %d not", len(h.acked), h.failures)
	if h.failure != nil {
		text += fmt.Sprintf(", the last of them: %v", h.failure)
	}
	return text
}

// Check returns an error that names the acknowledged writes that were not found, or were
// found with another value. No write at all is an error as well: such a test has shown
// nothing.
func (h *History) Check(found map[string]string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.acked) == 0 {
		return errors.New("no write was acknowledged")
	}
	var lost, changed []string
	for key, value := range h.acked {
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
			errs = append(errs, fmt.Errorf("of %d acknowledged writes %d are %s: %q", len(h.acked), len(bad.keys), bad.what, bad.keys[:min(named, len(bad.keys))]))
		}
	}
	return errors.Join(errs...)
}
