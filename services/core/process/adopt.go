package process

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"
)

// Adopt takes in a process that by, a child of ours, has started and will leave
// to us. When by ends the kernel makes us its parent, as we are PID 1 (or a
// subreaper, as tests are), and from then on it is a Child like any other: the
// sweep leaves it alone, and Wait tells its exit status.
//
//	Start(by) ──▶ by forks pid ──▶ by says so ──▶ Adopt(pid) ──▶ by ends ──▶ collect
//
// It must be called while by waits for us: only then is pid sure to be the
// process that was meant. args are its command line, for errors.
func (t *Table) Adopt(by *Child, pid int, args ...string) (*Child, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.known[by.pid] != by {
		return nil, fmt.Errorf("adopt process %d of %s: %w", pid, describe(by.cmd), os.ErrProcessDone)
	}
	if other := t.known[pid]; other != nil {
		return nil, fmt.Errorf("adopt process %d: it is known as %s", pid, describe(other.cmd))
	}
	p, err := os.FindProcess(pid)
	if err != nil {
		return nil, fmt.Errorf("adopt process %d: %w", pid, err)
	}
	c := &Child{table: t, cmd: &exec.Cmd{Path: args[0], Args: args, Process: p, SysProcAttr: &syscall.SysProcAttr{}}}
	c.pid, c.tail, c.done = pid, new(Tail), make(chan struct{})
	t.known[pid] = c
	go func() {
		<-by.done // before that it is by's to wait for
		c.collect()
	}()
	return c, nil
}
