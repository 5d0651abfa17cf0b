// Package container runs nodes as containers: the sandbox program of package
// services/front/sandbox/cmd/sandbox starts PID 1 in namespaces and a cgroup of its own.
package container

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"

	"github.com/garboard-os/garboard/qemu/container/cgroup"
	"github.com/garboard-os/garboard/qemu/exit"
	"github.com/garboard-os/garboard/qemu/osthread"
)

// initPath is PID 1 in the node's root filesystem.
const initPath = "/sbin/init"

// Exit codes of the sandbox program (services/front/sandbox/cmd/sandbox/node.go).
const (
	sandboxReboot = 10
	sandboxDied   = 11
	sandboxKilled = 12
)

// sandboxSpec is the input of the sandbox program (services/front/sandbox/cmd/sandbox/node.go).
type sandboxSpec struct {
	ID        string        `json:"id"`
	Hostname  string        `json:"hostname"`
	Rootfs    string        `json:"rootfs"`
	Work      string        `json:"work"`
	Cgroup    string        `json:"cgroup"`
	NetDevice string        `json:"netDevice,omitempty"`
	Binds     []sandboxBind `json:"binds,omitempty"`
	Args      []string      `json:"args"`
	Console   string        `json:"console"`
}

type sandboxBind struct {
	Source   string `json:"source"`
	Target   string `json:"target"`
	ReadOnly bool   `json:"readOnly,omitempty"`
}

// Config describes one node.
type Config struct {
	ID, Hostname string
	Sandbox      string // the program
	Rootfs       string // squashfs image or directory
	Init         string // PID 1, if Rootfs has only an empty file in its place; "": that of Rootfs
	// Work is the sandbox's own directory. State and Ephemeral keep the node's data.
	Work, State, Ephemeral string
	Configuration          string // file with the node's configuration
	Console                string // file to which the console is appended
	Cgroup                 string // below each cgroup hierarchy
	Link                   string // the node's network device, in the namespace of the thread
	// CPUs and MemoryMiB are limits, 0: none.
	CPUs, MemoryMiB int
}

// Prepare makes the directories, and removes the cgroups of the last run. It must be called
// before Start.
func (c Config) Prepare() error {
	for _, dir := range []string{c.Work, c.State, c.Ephemeral} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	if err := cgroup.Remove(c.Cgroup); err != nil {
		return fmt.Errorf("remove cgroups of the last run: %w", err)
	}
	return nil
}

func (c Config) spec() sandboxSpec {
	spec := sandboxSpec{
		ID:        c.ID,
		Hostname:  c.Hostname,
		Rootfs:    c.Rootfs,
		Work:      c.Work,
		Cgroup:    c.Cgroup,
		NetDevice: c.Link,
		Binds: []sandboxBind{
			{Source: c.State, Target: "/system/state"},
			{Source: c.Ephemeral, Target: "/var"},
			{Source: c.Configuration, Target: "/run/garboard-seed/config.yaml", ReadOnly: true},
		},
		Args:    []string{initPath, "--mode=container"},
		Console: c.Console,
	}
	if c.Init != "" {
		spec.Binds = append(spec.Binds, sandboxBind{Source: c.Init, Target: initPath, ReadOnly: true})
	}
	return spec
}

// Start starts a node. It ends when the thread ends. ctx is needed only until the node runs.
func Start(ctx context.Context, thread *osthread.Thread, c Config) (*Running, error) {
	text, err := json.Marshal(c.spec())
	if err != nil {
		return nil, err
	}
	r := &Running{cgroup: c.Cgroup, done: make(chan struct{})}
	r.cmd = exec.Command(c.Sandbox, "node", "-")
	r.cmd.Stdin = bytes.NewReader(text)
	r.cmd.Stderr = &r.complaint
	r.cmd.SysProcAttr = &syscall.SysProcAttr{
		// The sandbox program requires it; its runNode has the reason.
		Cloneflags: syscall.CLONE_NEWPID,
		Pdeathsig:  syscall.SIGKILL,
		Setpgid:    true,
	}
	out, err := r.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := thread.Do(r.cmd.Start); err != nil {
		return nil, err
	}
	// The sandbox program prints one line when the node's PID 1 runs. If its output ends
	// without one, PID 1 has not started.
	started := make(chan error, 1)
	go func() {
		_, err := bufio.NewReader(out).ReadString('\n')
		started <- err
		_, _ = io.Copy(io.Discard, out)
		r.collect()
	}()
	select {
	case err := <-started:
		if err != nil {
			<-r.done
			return nil, r.err
		}
		if err := cgroup.Limit(c.Cgroup, cgroup.Limits{CPUs: c.CPUs, MemoryMiB: c.MemoryMiB}); err != nil {
			r.Cut()
			<-r.done
			return nil, err
		}
		return r, nil
	case <-ctx.Done():
		r.Cut()
		<-r.done
		return nil, ctx.Err()
	}
}

// Running is a node from power-on to power-off.
type Running struct {
	cmd       *exec.Cmd
	cgroup    string
	complaint bytes.Buffer // standard error; complete when done is closed

	done chan struct{} // closed when the two below are set
	end  exit.Reason
	err  error
}

func (r *Running) collect() {
	defer close(r.done)
	err := r.cmd.Wait()
	code := r.cmd.ProcessState.ExitCode()
	switch {
	case err == nil:
		r.end = exit.Off
	case code == sandboxReboot:
		r.end = exit.Reboot
	case code == sandboxDied:
		r.end = exit.Died
	case code == sandboxKilled || r.cmd.ProcessState.Sys().(syscall.WaitStatus).Signaled():
		r.end = exit.Killed
	default:
		r.end = exit.Failed
		r.err = err
		if text := strings.TrimSpace(r.complaint.String()); text != "" {
			r.err = errors.New(text)
		}
	}
}

// Wait blocks until the node has ended. Several goroutines may call it.
func (r *Running) Wait() (exit.Reason, error) {
	<-r.done
	return r.end, r.err
}

// PowerOff presses the power button: the node shuts down in order, in its own time.
func (r *Running) PowerOff(context.Context) error {
	_ = cgroup.Freeze(r.cgroup, false) // fails where the cgroup is gone already
	return r.cmd.Process.Signal(syscall.SIGTERM)
}

// Cut ends the node at once, as a power failure does. It kills the sandbox program, which is
// PID 1 of the PID namespace of all the node's processes. It can have ended already. With
// cgroup v1, frozen processes end only after they are thawed.
func (r *Running) Cut() {
	_ = r.cmd.Process.Kill()
	_ = cgroup.Freeze(r.cgroup, false)
}

// Interrupt can't be done to a container.
func (r *Running) Interrupt(context.Context) error {
	return errors.New("a container has no processor of its own: only a machine in QEMU has an NMI")
}

// Freeze stops the node's processes, or lets them run again.
func (r *Running) Freeze(_ context.Context, frozen bool) error {
	return cgroup.Freeze(r.cgroup, frozen)
}
