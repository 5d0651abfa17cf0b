// Package sleep waits in loops that end with a context.
package sleep

import (
	"context"
	"io"
	"sync"
	"time"
)

// For waits for d. It returns false if ctx has ended.
func For(ctx context.Context, d time.Duration) bool { return Until(ctx, nil, d) }

// Until waits for a message on wake, for d at most. It returns false if ctx has ended.
func Until(ctx context.Context, wake <-chan struct{}, d time.Duration) bool {
	select {
	case <-wake:
	case <-time.After(d):
	case <-ctx.Done():
	}
	return ctx.Err() == nil
}

// Every repeats a loop until ctx has ended, with a pause of d after each round. There is one round at least.
func Every(ctx context.Context, d time.Duration) func(round func() bool) {
	return func(round func() bool) {
		for round() && For(ctx, d) {
		}
	}
}

// Longer is the pause after one that wasn't enough: twice as long, of at least first and at most most.
func Longer(pause, first, most time.Duration) time.Duration { return min(max(2*pause, first), most) }

// Await waits until a channel is closed, or has a message. The error is that of ctx.
func Await(ctx context.Context, c <-chan struct{}) error {
	select {
	case <-c:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Reader is a reader that ends with ctx.
func Reader(ctx context.Context, r io.Reader) io.Reader { return reader{ctx, r} }

type reader struct {
	ctx context.Context
	io.Reader
}

func (r reader) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.Reader.Read(p)
}

// Group waits for all of a group, for d at most, and reports whether they have ended.
func Group(all *sync.WaitGroup, d time.Duration) bool {
	done := make(chan struct{})
	go func() {
		defer close(done)
		all.Wait()
	}()
	select {
	case <-done:
		return true
	case <-time.After(d):
		return false
	}
}

// Closed reports whether nobody waits for a channel any more, because it is closed.
func Closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// Wake sends a message that ends Until, unless there is one already.
func Wake(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
