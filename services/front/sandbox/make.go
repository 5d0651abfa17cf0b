package sandbox

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"time"

	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/process"
)

const (
	// goLine gives the service leave to run.
	goLine = "go\n"
	// maxReply bounds what the sandbox program may answer: a number, and why there
	// is no user namespace.
	maxReply = 16 << 10
	// goRuntimeShare is the part of the ceiling, in percent, that becomes the limit of Go's
	// runtime (GOMEMLIMIT). The rest is for the program's pages, stacks of threads
	// and the kernel's buffers of sockets.
	goRuntimeShare = 75
)

// spec is what the sandbox program reads: its serviceSpec.
type spec struct {
	ID          string   `json:"id"`
	Args        []string `json:"args"`
	Env         []string `json:"env"`
	UID         int      `json:"uid"`
	Work        string   `json:"work"`
	Cgroup      string   `json:"cgroup"`
	Dir         string   `json:"dir"`
	MemoryMax   int64    `json:"memoryMax"`
	TasksMax    int64    `json:"tasksMax"`
	OOMScoreAdj int      `json:"oomScoreAdj"`
}

// reply is what the sandbox program answers: its serviceReply.
type reply struct {
	PID     int      `json:"pid"`
	Without []string `json:"without,omitempty"`
}

func (r Runner) spec() spec {
	return spec{
		ID: r.ID, Args: r.args, UID: r.UID, Work: r.work, Cgroup: r.parent + "/" + r.ID, Dir: r.Dir,
		Env:         []string{"GOMEMLIMIT=" + strconv.FormatInt(r.memory*goRuntimeShare/100, 10)},
		MemoryMax:   r.memory,
		TasksMax:    tasksMax,
		OOMScoreAdj: oomScoreAdj,
	}
}

// make has the sandbox made, and returns the service in it, which runs.
func (r Runner) make(ctx context.Context, h *dag.Handle, output *os.File) (*process.Child, error) {
	ctx, cancel := context.WithTimeout(ctx, makeBudget)
	defer cancel()
	// The root of a user namespace must be able to come here.
	if err := os.MkdirAll(r.work, 0o755); err != nil {
		return nil, err
	}
	m, err := r.startMaker(output)
	if err != nil {
		return nil, err
	}
	defer m.close()
	child, without, err := m.service(ctx, r)
	if err != nil {
		return nil, m.giveUp(ctx, err)
	}
	for _, what := range without {
		h.Log.Warn("the sandbox lacks something here", "without", what)
	}
	return child, nil
}

// maker is the sandbox program while it makes a sandbox.
type maker struct {
	child   *process.Child
	answers *os.File
	orders  *os.File
}

func (r Runner) startMaker(output *os.File) (*maker, error) {
	stdin, orders, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer stdin.Close()
	answers, stdout, err := os.Pipe()
	if err != nil {
		orders.Close()
		return nil, err
	}
	defer stdout.Close()
	cmd := exec.Command(r.sandbox, "service", "-")
	cmd.Stdin, cmd.Stdout, cmd.ExtraFiles = stdin, stdout, []*os.File{output, r.Socket.path.Load()}
	cmd.Env = []string{}
	m := &maker{answers: answers, orders: orders}
	if m.child, err = r.Processes.Start(cmd); err != nil {
		m.close()
		return nil, err
	}
	return m, nil
}

func (m *maker) close() {
	m.answers.Close()
	m.orders.Close()
}

// giveUp ends the program, and returns its last words or, where it had none because
// it was ours to end it, err.
func (m *maker) giveUp(ctx context.Context, err error) error {
	m.close()
	if ctx.Err() == nil {
		select {
		case <-m.child.Done():
			if end := m.child.Wait(); end != nil {
				return end
			}
			return err
		case <-time.After(drainBudget):
		}
	}
	_ = m.child.Kill() // an error means that it has just ended
	_ = m.child.Wait()
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fmt.Errorf("not done after %s: %w", makeBudget, err)
	}
	return err
}

// service is the program's side of the protocol: the spec, the answer, the leave,
// the end.
func (m *maker) service(ctx context.Context, r Runner) (*process.Child, []string, error) {
	// What ends ctx ends all reads and writes.
	stop := context.AfterFunc(ctx, func() {
		past := time.Unix(1, 0)
		_ = m.answers.SetDeadline(past)
		_ = m.orders.SetDeadline(past)
	})
	defer stop()
	line, err := json.Marshal(r.spec())
	if err != nil {
		return nil, nil, err
	}
	// If ctx has ended, the error of a pipe follows from that.
	if _, err := m.orders.Write(append(line, '\n')); err != nil {
		return nil, nil, cmp.Or(ctx.Err(), err)
	}
	answer, err := m.answer()
	if err != nil {
		return nil, nil, cmp.Or(ctx.Err(), err)
	}
	child, err := r.Processes.Adopt(m.child, answer.PID, r.args...)
	if err != nil {
		return nil, nil, err
	}
	r.Socket.PID.Store(int64(child.Pid()))
	if _, err := m.orders.WriteString(goLine); err != nil {
		return nil, nil, cmp.Or(ctx.Err(), err)
	}
	select {
	case <-m.child.Done():
	case <-ctx.Done():
		return nil, nil, ctx.Err()
	}
	if err := m.child.Wait(); err != nil {
		return nil, nil, err
	}
	return child, answer.Without, nil
}

func (m *maker) answer() (reply, error) {
	line, err := bufio.NewReaderSize(m.answers, maxReply).ReadSlice('\n')
	if err != nil {
		return reply{}, fmt.Errorf("read the sandbox program's answer: %w", err)
	}
	var a reply
	d := json.NewDecoder(bytes.NewReader(line))
	d.DisallowUnknownFields()
	if err := d.Decode(&a); err != nil {
		return reply{}, fmt.Errorf("decode the sandbox program's answer: %w", err)
	}
	if a.PID <= 1 {
		return reply{}, fmt.Errorf("the sandbox program answers with process %d", a.PID)
	}
	return a, nil
}
