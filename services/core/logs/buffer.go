package logs

import (
	"context"
	"sync"
)

// buffer keeps the last items that were added, within its limits. It is the buffer of all its
// readers, so that one which stalls costs nothing, holds up nobody, and learns how many went by.
type buffer[T any] struct {
	most, mostBytes int
	size            func(T) int

	mu      sync.Mutex // guards all below
	items   []T
	bytes   int
	added   uint64        // items ever
	changed chan struct{} // closed with the next one; nil: nobody waits for it
}

// add adds an item, and the oldest ones give way. The caller holds mu.
func (b *buffer[T]) add(item T) {
	b.items = append(b.items, item)
	b.bytes += b.size(item)
	b.added++
	if b.changed != nil {
		close(b.changed)
		b.changed = nil
	}
	for len(b.items) > b.most || b.bytes > b.mostBytes && len(b.items) > 1 {
		b.bytes -= b.size(b.items[0])
		clear(b.items[:1]) // append reuses the array only later
		b.items = b.items[1:]
	}
}

// read begins with the last tail items; 0: all, negative: none.
func (b *buffer[T]) read(tail int) Reader[T] {
	b.mu.Lock()
	defer b.mu.Unlock()
	there := len(b.items)
	switch {
	case tail < 0:
		there = 0
	case tail > 0:
		there = min(there, tail)
	}
	return Reader[T]{buffer: b, next: b.added - uint64(there)}
}

// Reader reads a log, or the feed, from some item on, as fast as it likes. One goroutine uses it.
type Reader[T any] struct {
	buffer *buffer[T]
	next   uint64 // number of the item to read next
}

// Next returns what has come since the last call, of about most bytes, and how many items before
// that were lost. It doesn't wait: nothing means that there is nothing yet.
func (r *Reader[T]) Next(most int) (items []T, lost uint64) {
	b := r.buffer
	b.mu.Lock()
	defer b.mu.Unlock()
	if oldest := b.added - uint64(len(b.items)); r.next < oldest {
		lost, r.next = oldest-r.next, oldest
	}
	for _, item := range b.items[uint64(len(b.items))-(b.added-r.next):] {
		if most -= b.size(item); most < 0 && len(items) > 0 {
			break
		}
		items = append(items, item)
	}
	r.next += uint64(len(items))
	return items, lost
}

// Wait returns nil when Next has something, or stop is closed; else ctx's error.
func (r *Reader[T]) Wait(ctx context.Context, stop <-chan struct{}) error {
	b := r.buffer
	b.mu.Lock()
	if b.added > r.next {
		b.mu.Unlock()
		return nil
	}
	if b.changed == nil {
		b.changed = make(chan struct{})
	}
	changed := b.changed
	b.mu.Unlock()
	select {
	case <-changed:
	case <-stop:
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}
