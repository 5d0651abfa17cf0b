package containerd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"

	client "github.com/containerd/containerd/v2/client"

	"github.com/garboard-os/garboard/services/core/process"
	"github.com/garboard-os/garboard/services/core/reason"
)

// ExitError is a container that ended by itself.
type ExitError struct {
	ID     string
	Status uint32
}

func (e *ExitError) Error() string {
	return fmt.Sprintf("container %s ended with status %d", e.ID, e.Status)
}

// Once runs the container to its end, and returns the end of its output; all of it goes
// to the log. The error is an *ExitError if it ended with another status than 0.
func (r *Runner) Once(ctx context.Context, log string) (output string, err error) {
	to, end := r.Containerd.Logs.Writer(log), new(process.Tail)
	defer to.Close()
	err = r.with(ctx, io.MultiWriter(to, end), func(reason.Code, string) {}, func(nctx context.Context, cl *client.Client, task client.Task, exited <-chan client.ExitStatus) error {
		err := r.supervise(nctx, cl, task, exited)
		switch exit, isExit := errors.AsType[*ExitError](err); {
		case !isExit:
			return cmp.Or(err, ctx.Err()) // it was stopped
		case exit.Status == 0:
			err = nil
		}
		task.IO().Wait() // for its last output
		return err
	})
	return end.String(), err
}
