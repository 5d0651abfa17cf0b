package dag

import (
	"context"
	"errors"
	"sync"
)

// While calls run, and beside it each watch. The first error of a watch ends run, and is the result. Each watch ends
// with run.
func While(ctx context.Context, run func(context.Context) error, watches ...func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	for _, watch := range watches {
		wg.Go(func() {
			if err := watch(ctx); err != nil {
				cancel(err)
			}
		})
	}
	err := run(ctx)
	why := context.Cause(ctx)
	cancel(nil)
	wg.Wait()
	if why != nil && !errors.Is(why, context.Canceled) {
		return why
	}
	return err
}
