// Package background runs what goes on beside its caller, and ends before it.
package background

import (
	"context"
	"sync"
)

// Start runs do in a goroutine, whose context ends with ctx or by stop, which waits for it.
func Start(ctx context.Context, do func(context.Context)) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() { do(ctx) })
	return func() {
		cancel()
		running.Wait()
	}
}
