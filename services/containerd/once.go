package containerd

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"

	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/namespaces"
)

// lastWords bounds what is kept of what a container said, for people to read.
const lastWords = 2 << 10

// ExitError is a container that ended by itself, and said that something is wrong.
type ExitError struct {
	ID     string
	Status uint32
}

func (e *ExitError) Error() string {
	return fmt.Sprintf("container %s ended with status %d", e.ID, e.Status)
}

// Once runs the container to its end, and returns the last of what it said; all of it
// goes to the log. The error is an *ExitError where it ended with a status.
func (r *Runner) Once(ctx context.Context, log string) (said string, err error) {
	cl, err := r.Containerd.Client()
	if err != nil {
		return "", err
	}
	nctx := namespaces.WithNamespace(ctx, Namespace)
	if err := r.remove(nctx, cl); err != nil {
		return "", fmt.Errorf("remove the old container %s: %w", r.ID, err)
	}
	container, err := r.create(nctx, cl, func(string) {})
	if err != nil {
		return "", err
	}
	defer func() {
		cctx, cancel := context.WithTimeout(context.WithoutCancel(nctx), cleanupTimeout)
		defer cancel()
		_ = r.remove(cctx, cl) // the next run does it first
	}()
	if err := os.MkdirAll(fifoDir, 0o700); err != nil {
		return "", err
	}
	to := r.Containerd.Logs.Writer(log)
	defer to.Close()
	words := &tail{}
	out := io.MultiWriter(to, words)
	task, err := container.NewTask(nctx, cio.NewCreator(cio.WithStreams(nil, out, out), cio.WithFIFODir(fifoDir)))
	if err != nil {
		return "", fmt.Errorf("create task of container %s: %w", r.ID, err)
	}
	exited, err := task.Wait(context.WithoutCancel(nctx))
	if err != nil {
		return "", fmt.Errorf("wait for container %s: %w", r.ID, err)
	}
	if err := task.Start(nctx); err != nil {
		return "", fmt.Errorf("start container %s: %w", r.ID, err)
	}
	select {
	case <-ctx.Done():
		_ = r.stop(nctx, task, exited) // why it was stopped is the error
		return "", ctx.Err()
	case status := <-exited:
		task.IO().Wait() // for its last words
		if err := status.Error(); err != nil {
			return "", fmt.Errorf("wait for container %s: %w", r.ID, err)
		}
		if status.ExitCode() != 0 {
			return words.String(), &ExitError{r.ID, status.ExitCode()}
		}
		return words.String(), nil
	}
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
	if over := len(t.data) - lastWords; over > 0 {
		t.data = append(t.data[:0], t.data[over:]...)
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.TrimSpace(string(t.data))
}
