package dag

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"

	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/core/sleep"
)

// Behind is the reason of a service that waits only for other services.
const Behind reason.Code = "WaitsForServices"

// await blocks until all needs of the service hold; false if ctx ended first.
// After each part that holds, an event lists the rest. A service that was up
// may have ended during the wait, so services are checked again at the end.
func (r *runner) await(ctx context.Context) bool {
	conds := append(slices.Clone(r.svc.Needs), lists.Of(r.needs, func(need *runner) Condition { return upCondition{need} })...)
	r.g.mu.Lock()
	if r.former != nil {
		conds = append(conds, formerRun{r.svc.ID, r.former})
	}
	r.g.mu.Unlock()
	for {
		open := slices.DeleteFunc(slices.Clone(conds), func(c Condition) bool {
			up, ok := c.(upCondition)
			return ok && up.holds()
		})
		if len(open) == 0 {
			return ctx.Err() == nil
		}
		if !r.awaitOnce(ctx, open) {
			return false
		}
		// Only services can be checked twice; other conditions have held once, and that is enough.
		conds = slices.DeleteFunc(conds, func(c Condition) bool {
			_, ok := c.(upCondition)
			return !ok
		})
	}
}

func (r *runner) awaitOnce(ctx context.Context, open []Condition) bool {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer func() {
		cancel()
		if !sleep.Group(&wg, r.svc.StopBudget) {
			r.report(fmt.Sprintf("Given up: a condition did not return within %s", r.svc.StopBudget), change{level: slog.LevelError})
		}
	}()
	held := make(chan int, len(open))
	for i, c := range open {
		wg.Go(func() {
			if r.awaitOne(ctx, c) {
				held <- i
			}
		})
	}
	for range len(open) {
		rest := slices.DeleteFunc(slices.Clone(open), func(c Condition) bool { return c == nil })
		text, code := describe(rest), reason.Code("")
		if !slices.ContainsFunc(rest, func(c Condition) bool { _, service := c.(upCondition); return !service }) {
			code = Behind
		}
		r.report(messageWaiting+text, change{state: Waiting, reason: code, waiting: text})
		select {
		case i := <-held:
			open[i] = nil
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// awaitOne waits for one condition. If it fails, or panics, that is logged and
// it is waited for again: an error doesn't start the service.
func (r *runner) awaitOne(ctx context.Context, c Condition) bool {
	for range sleep.Every(ctx, waitRetry) {
		err := r.guard(func() error { return c.Wait(ctx) })
		if err == nil || ctx.Err() != nil {
			return err == nil
		}
		r.log.Warn("wait for "+c.String(), "error", err)
	}
	return false
}
