package process

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"unicode/utf8"
)

const (
	// tailBytes is how much of a child's last output is kept: a few lines of any
	// tool, and little beside a process.
	tailBytes = 4 << 10
	// tailLines is how many of them an error carries: more would hide it.
	tailLines = 8
)

// Tail keeps the last bytes that were written to it.
type Tail struct {
	mu  sync.Mutex
	buf []byte // at most tailBytes
}

func (t *Tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := len(p)
	p = p[max(0, n-tailBytes):]
	t.buf = append(t.buf[max(0, len(t.buf)+len(p)-tailBytes):], p...)
	return n, nil
}

// String is the last lines, as valid UTF-8: a cut may have split a character,
// and not every tool writes UTF-8.
func (t *Tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.buf
	for len(b) > 0 && !utf8.RuneStart(b[0]) {
		b = b[1:]
	}
	text := strings.TrimSpace(strings.ToValidUTF8(string(b), "\uFFFD"))
	lines := strings.Split(text, "\n")
	return strings.Join(lines[max(0, len(lines)-tailLines):], "\n")
}

// tee makes cmd's output pass through t. Files are left alone: a pipe in front
// of them would change what the child writes to. One writer for both streams stays one, because
// os/exec writes to it from one goroutine only.
func tee(cmd *exec.Cmd, t *Tail) {
	_, file := cmd.Stderr.(*os.File)
	switch {
	case cmd.Stdout == nil && cmd.Stderr == nil:
		cmd.Stdout, cmd.Stderr = t, t
	case cmd.Stderr == nil:
		cmd.Stderr = t
	case !file:
		cmd.Stderr = io.MultiWriter(t, cmd.Stderr)
		cmd.Stdout = cmd.Stderr
	}
}

// exitError makes the error of Wait from the exit status.
func (c *Child) exitError(state *os.ProcessState, err error) error {
	if err == nil && !state.Success() {
		err = &exec.ExitError{ProcessState: state}
	}
	if err == nil {
		return nil
	}
	killed := false
	if state != nil { // nil: the kernel had no status for us
		// A killed process can't log the reason: its last output isn't the cause.
		status, ok := state.Sys().(syscall.WaitStatus)
		killed = ok && status.Signaled() && status.Signal() == syscall.SIGKILL
	}
	if last := c.tail.String(); last != "" && !killed {
		return fmt.Errorf("run %s: %w: %s", describe(c.cmd), err, last)
	}
	return fmt.Errorf("run %s: %w", describe(c.cmd), err)
}
