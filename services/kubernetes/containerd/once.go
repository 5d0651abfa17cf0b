package containerd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"

	client "github.com/containerd/containerd/v2/client"

	"github.com/garboard-os/garboard/services/core/reason"
)

// maxOutput bounds what is kept of what a container said, for people to read.
const maxOutput = 2 << 10

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
	to, end := r.Containerd.Logs.Writer(log), &tail{}
	defer to.Close()
	err = r.with(ctx, io.MultiWriter(to, end), func(reason.Code, string) {}, func(nctx context.Context, cl *client.Client, task client.Task, exited <-chan client.ExitStatus) error {
		err := r.supervise(nctx, cl, task, exited)
		var exit *ExitError
		switch {
		case !errors.As(err, &exit):
			return cmp.Or(err, ctx.Err()) // it was stopped
		case exit.Status == 0:
			err = nil
		}
		task.IO().Wait() // for its last output
		return err
	})
	return end.String(), err
}

// tail keeps the end of what is written to it.
type tail struct {
	mu   sync.Mutex // guards data: both streams of a container come at once
	data []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.data = append(t.data, p...)
	if over := len(t.data) - maxOutput; over > 0 {
		t.data = append(t.data[:0], t.data[over:]...)
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.TrimSpace(string(t.data))
}
