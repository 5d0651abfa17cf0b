// Package process starts the node's child processes and knows them.
//
// PID 1 inherits every orphan and must reap it, but a bare wait4(-1) loop would
// also take the exit status of children that os/exec waits for. So every child
// is started through Table, and one lock is held across each start and across
// each collection of an exit status: a PID is in the table exactly as long as
// the kernel keeps it for us, and the orphan sweep, under the same lock, reaps
// only PIDs that aren't in it.
//
//	Start ──lock── fork, exec, record PID ──unlock──▶ child runs
//	collector      waitid(WNOWAIT): it has ended, the zombie stays
//	        ──lock── wait, forget PID ──unlock──▶ Child.Wait returns
//	Reap  ──lock── wait4 each zombie whose PID isn't recorded ──unlock──▶
//
// Nothing else in the program may fork: a child that os/exec starts by itself
// is an orphan to the sweep.
package process

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/garboard-os/garboard/config"
	"golang.org/x/sys/unix"
)

// outputGrace is how long Wait reads on after the child has ended while a
// grandchild still holds its output open. The status is known then; what a
// daemonized grandchild may still say is not worth more.
const outputGrace = 2 * time.Second

// maxCommand bounds how much of a command line goes into an error.
const maxCommand = 256

// Table holds the child processes that this program has started. Its methods
// may be called from any goroutine.
type Table struct {
	// mu guards all following fields, and is held while a child is forked and
	// while an exit status is taken from the kernel.
	mu    sync.Mutex
	known map[int]*Child
	// cutShort is set when a sweep has left what is behind one of our own
	// zombies; whoever collects that one sweeps again.
	cutShort bool
	reaped   uint64
}

// New returns an empty table.
func New() *Table {
	return &Table{known: make(map[int]*Child)}
}

// Child is a process that Table.Start has started.
type Child struct {
	table *Table
	cmd   *exec.Cmd
	pid   int
	tail  *Tail

	done chan struct{} // closed when err is final
	err  error
}

// Start starts cmd in a process group of its own (unless cmd.SysProcAttr asks
// for a session or another group) and watches it. cmd has no Stdout and no Stderr, Stdout
// only, or one writer for both. Standard error, and standard
// output too where cmd has none, are kept in part for the error that Wait
// returns; an *os.File is left alone. What else is in
// cmd.SysProcAttr is kept.
func (t *Table) Start(cmd *exec.Cmd) (*Child, error) {
	c := &Child{table: t, cmd: cmd, tail: new(Tail), done: make(chan struct{})}
	tee(cmd, c.tail)
	attr := syscall.SysProcAttr{}
	if cmd.SysProcAttr != nil {
		attr = *cmd.SysProcAttr
	}
	if !attr.Setsid {
		attr.Setpgid = true
	}
	cmd.SysProcAttr = &attr
	cmd.WaitDelay = cmp.Or(cmd.WaitDelay, outputGrace)

	t.mu.Lock()
	defer t.mu.Unlock()
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", describe(cmd), err)
	}
	c.pid = cmd.Process.Pid
	t.known[c.pid] = c
	go c.collect()
	return c, nil
}

// Run starts cmd and waits for its end. When ctx ends first, the whole process
// group is killed, and the error wraps ctx's. The error of a command that failed
// wraps *exec.ExitError and ends with the last lines of its output.
func (t *Table) Run(ctx context.Context, cmd *exec.Cmd) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("run %s: %w", describe(cmd), err)
	}
	c, err := t.Start(cmd)
	if err != nil {
		return err
	}
	select {
	case <-c.done:
		return c.err
	case <-ctx.Done():
	}
	if err := c.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("run %s: %w, and kill it: %w", describe(cmd), ctx.Err(), err)
	}
	if err := c.Wait(); err != nil {
		return fmt.Errorf("%w (%w)", err, context.Cause(ctx))
	}
	return nil
}

// Reaped is how many orphans have been reaped so far.
func (t *Table) Reaped() uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.reaped
}

// Pid is the child's process ID, which is also its group's unless the caller of
// Start asked otherwise.
func (c *Child) Pid() int { return c.pid }

// Done is closed when the child has ended and Wait won't block.
func (c *Child) Done() <-chan struct{} { return c.done }

// Wait waits for the child's end. Any number of callers, at any time, get the
// same answer: nil for exit status 0, else an error that wraps *exec.ExitError.
func (c *Child) Wait() error {
	<-c.done
	return c.err
}

// Signal sends s to the child alone. After its end it returns
// os.ErrProcessDone.
func (c *Child) Signal(s os.Signal) error {
	return c.signal(s, false)
}

// Kill kills the child's process group. After the child's end it returns
// os.ErrProcessDone: its group's ID may then belong to someone else.
func (c *Child) Kill() error {
	return c.signal(unix.SIGKILL, true)
}

// Stop asks the child to end with SIGTERM, kills its group when it hasn't ended
// within grace, and returns what Wait returns.
func (c *Child) Stop(grace time.Duration) error {
	if err := c.Signal(unix.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-c.done:
	case <-time.After(grace):
		if err := c.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
			return err
		}
	}
	return c.Wait()
}

// signal holds the table's lock, so that the PID can't be collected, and reused,
// between the look and the kill.
func (c *Child) signal(s os.Signal, group bool) error {
	sig, ok := s.(syscall.Signal)
	if !ok {
		return fmt.Errorf("signal %v: not a signal of this system", s)
	}
	c.table.mu.Lock()
	defer c.table.mu.Unlock()
	if c.table.known[c.pid] != c {
		return os.ErrProcessDone
	}
	target := c.pid
	if attr := c.cmd.SysProcAttr; group && (attr.Setsid || attr.Pgid == 0) { // it leads the group
		target = -c.pid
	}
	if err := unix.Kill(target, sig); err != nil {
		return fmt.Errorf("kill %d with %s: %w", target, unix.SignalName(sig), err)
	}
	return nil
}

// describe is the command line, shortened, as errors name it.
func describe(cmd *exec.Cmd) string {
	args := append([]string{cmd.Path}, cmd.Args[min(1, len(cmd.Args)):]...)
	return config.Shorten(strings.Join(args, " "), maxCommand)
}

// OrClean makes an exit with status 0, which no daemon should do by itself, readable.
func OrClean(err error) error {
	return cmp.Or(err, errors.New("exit status 0"))
}
