// Package sandbox runs a service of the node as a process in a sandbox, for the
// programs that accept connections from unauthenticated clients: apid and trustd.
//
// Another program, /usr/bin/sandbox, makes the sandbox, because that takes cgo. It
// exits when the sandbox is ready, and the service becomes PID 1's own child: it
// costs no more memory than the service itself, and PID 1 reaps it like any child.
// The two programs' protocol is drawn above runService there.
//
// That program's tables list what a sandbox has: an own mount, PID, IPC, UTS,
// cgroup and (where possible) user namespace, the node's network; a read-only root
// with nothing in it but Runner.Dir and the program, /proc of its own processes only,
// /tmp, /dev/null and /dev/urandom; no capability, no new privileges, a list of
// system calls; a cgroup with ceilings; a user of its own.
package sandbox

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/option"
	"github.com/garboard-os/garboard/services/core/process"
)

const (
	// Program is the program of PID 1 and of the sandboxed services. Its first argument
	// selects the service.
	Program = "/sbin/init"

	sandboxProgram = "/usr/bin/sandbox"
	workDir        = boot.PrivateDir + "/sandbox"

	// memoryMax is the ceiling in bytes, beyond which the kernel kills the service. A Go server
	// of few clients idles at 10 MiB, and 200 clients at once take 40. The Go runtime gets a limit
	// below it, and collects garbage more often near it.
	memoryMax = 64 << 20
	// tasksMax bounds threads: a Go server has a dozen, and one for each file
	// operation that a disk holds up.
	tasksMax = 64
	// oomScoreAdj makes the kernel end pods first, and the service before what the
	// node can't be without (kubelet, containerd at -999).
	oomScoreAdj = -900

	// makeBudget is what making a sandbox may take: 0.2 s on an idle machine, and
	// this program runs while everything starts, under emulation too.
	makeBudget = 60 * time.Second
	// drainBudget is how long output is read on after the end of the service. All
	// processes that could write have ended by then.
	drainBudget = time.Second
	// stopBudget is for servers that end their calls on SIGTERM, and ServiceStop for removing the sandbox, too.
	stopBudget  = 5 * time.Second
	ServiceStop = stopBudget + 2*time.Second
)

// Runner runs one service. Run is for dag.Service.
type Runner struct {
	Processes *process.Table
	Logs      *logs.Logs
	// ID is the service's, the argument of Program, and the name of its log and of its cgroup.
	ID string
	// UID is the user and the group that it runs as (image/rootfs has their names).
	UID int
	// Dir is a directory that they can read, and that is inside under the same path.
	Dir string

	// Socket is the service's way to PID 1. Its PID is the process of the service, from before the program runs until
	// it has ended; 0 otherwise.
	Socket *Socket

	// What tests have in another way.
	args    []string      // nil: Program and ID. The program is static, so that it needs no other files.
	memory  int64         // 0: memoryMax
	stop    time.Duration // between SIGTERM and SIGKILL; 0: stopBudget
	sandbox string        // "": sandboxProgram
	work    string        // "": workDir/ID
	parent  string        // of the cgroup; "": boot.SystemCgroup
}

// Run makes the sandbox, runs the service in it and returns when that has ended or,
// after ctx has, has been stopped. Whatever an earlier run has left is removed
// first, and nothing is left after.
func (r Runner) Run(ctx context.Context, h *dag.Handle) error {
	r.setDefaults()
	group := cgroup(filepath.Join(r.parent, r.ID))
	if err := group.remove(ctx); err != nil {
		return fmt.Errorf("remove what the last %s left: %w", r.ID, err)
	}
	output, err := r.openOutput()
	if err != nil {
		return err
	}
	defer output.drain()
	defer r.Socket.PID.Store(0)
	child, err := r.make(ctx, h, output.write)
	// The service's end of the pipe is its own now.
	output.write.Close()
	defer func() {
		// Not ctx: that has ended when the service had to stop.
		if err := group.remove(context.WithoutCancel(ctx)); err != nil {
			h.Log.Warn("remove cgroup", "err", err)
		}
	}()
	if err != nil {
		return fmt.Errorf("make the sandbox of %s: %w", r.ID, err)
	}
	h.Started(fmt.Sprintf("Started process %s (PID %d) in a sandbox", r.ID, child.Pid()))
	select {
	case <-child.Done():
		r.Socket.PID.Store(0) // the number may soon be another process'
		return r.why(group, child.Wait())
	case <-ctx.Done():
	}
	_ = child.Stop(r.stop) // it was asked to end: its status is no news
	return nil
}

func (r *Runner) setDefaults() {
	option.Default(&r.args, []string{Program, r.ID})
	r.memory = cmp.Or(r.memory, memoryMax)
	r.stop = cmp.Or(r.stop, stopBudget)
	r.sandbox = cmp.Or(r.sandbox, sandboxProgram)
	r.work = cmp.Or(r.work, filepath.Join(workDir, r.ID))
	r.parent = cmp.Or(r.parent, boot.SystemCgroup)
}

// why puts the end of a service that should have gone on into words.
func (r Runner) why(group cgroup, end error) error {
	switch killed, err := group.outOfMemory(); {
	case err != nil:
		return fmt.Errorf("%s ended by itself: %w (and whether for want of memory is unknown: %w)", r.ID, process.OrClean(end), err)
	case killed && end != nil:
		return fmt.Errorf("%s hit its memory ceiling of %d MiB, and the kernel killed it: %w", r.ID, r.memory>>20, end)
	}
	return fmt.Errorf("%s ended by itself: %w", r.ID, process.OrClean(end))
}

// output is the pipe from the service, which writes to it without PID 1's help, to
// its log.
type output struct {
	read, write *os.File
	done        chan struct{}
}

func (r Runner) openOutput() (*output, error) {
	read, write, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("pipe for the output of %s: %w", r.ID, err)
	}
	o := &output{read: read, write: write, done: make(chan struct{})}
	go func() {
		defer close(o.done)
		log := r.Logs.Writer(r.ID)
		defer log.Close()
		_, _ = io.Copy(log, o.read) // its end, or drain's deadline
	}()
	return o, nil
}

// drain waits until all that was written is in the log.
func (o *output) drain() {
	_ = o.read.SetReadDeadline(time.Now().Add(drainBudget)) // pipes have deadlines
	<-o.done
	o.read.Close()
}
