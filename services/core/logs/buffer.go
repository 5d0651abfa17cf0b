package logs

import (
	"context"
	"slices"
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
		b.shift()
	}
}

// shift lets the oldest item go. The caller holds mu.
func (b *buffer[T]) shift() {
	b.bytes -= b.size(b.items[0])
	clear(b.items[:1]) // append reuses the array only later
	b.items = b.items[1:]
}

// oldest is the number of the oldest item. The caller holds mu.
func (b *buffer[T]) oldest() uint64 { return b.added - uint64(len(b.items)) }

// since returns the items from a number on, and how many before them were lost. The caller holds mu.
func (b *buffer[T]) since(next uint64) (items []T, lost uint64) {
	oldest := b.oldest()
	if next < oldest {
		lost, next = oldest-next, oldest
	}
	return b.items[next-oldest:], lost
}

// tail returns the last n items; n <= 0 means all.
func (b *buffer[T]) tail(n int) []T {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n <= 0 || n > len(b.items) {
		n = len(b.items)
	}
	return slices.Clone(b.items[len(b.items)-n:])
}

// await waits until there is an item with a number, for stop, or for ctx, whose error it returns.
func (b *buffer[T]) await(ctx context.Context, stop <-chan struct{}, next uint64) error {
	b.mu.Lock()
	if b.added > next {
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
