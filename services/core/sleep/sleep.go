// Package sleep waits in loops that end with a context.
package sleep

import (
	"context"
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
