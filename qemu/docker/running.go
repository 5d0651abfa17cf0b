package docker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/garboard-os/garboard/qemu/exit"
	"github.com/moby/moby/api/pkg/stdcopy"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/client"
)

// endBudget is for one request about a container that ends.
const endBudget = 20 * time.Second

// Exit codes of a container whose PID 1 was ended by a signal: 128 and its number. reboot(2) in a PID namespace sends
// one of these.
const (
	codeReboot   = 128 + 1 // SIGHUP
	codePowerOff = 128 + 2 // SIGINT
	codeKilled   = 128 + 9 // SIGKILL
)

// Running is a container from its start to its end.
type Running struct {
	docker *Docker
	id     string

	done chan struct{} // closed when the two below are set
	end  exit.Reason
	err  error
}

func (r *Running) collect(output client.ContainerAttachResult, console io.WriteCloser) {
	defer close(r.done)
	_, _ = stdcopy.StdCopy(console, console, output.Reader) // until the container ends
	output.Close()
	_ = console.Close()
	wait := r.docker.api.ContainerWait(context.Background(), r.id, client.ContainerWaitOptions{Condition: container.WaitConditionNotRunning})
	select {
	case status := <-wait.Result:
		r.end = reason(status.StatusCode)
		if status.Error != nil {
			r.end, r.err = exit.Failed, errors.New(status.Error.Message)
		}
	case err := <-wait.Error:
		r.end, r.err = exit.Failed, fmt.Errorf("docker: %w", err)
	}
}

func reason(code int64) exit.Reason {
	switch code {
	case 0, codePowerOff:
		return exit.Off
	case codeReboot:
		return exit.Reboot
	case codeKilled:
		return exit.Killed
	}
	return exit.Died
}

// Wait blocks until the node has ended. Several goroutines may call it.
func (r *Running) Wait() (exit.Reason, error) {
	<-r.done
	return r.end, r.err
}

// PowerOff presses the power button: the node shuts down in order, in its own time.
func (r *Running) PowerOff(ctx context.Context) error {
	_ = r.Freeze(ctx, false) // fails where it isn't frozen
	_, err := r.docker.api.ContainerKill(ctx, r.id, client.ContainerKillOptions{Signal: "SIGTERM"})
	return err
}

// Cut ends the node at once, as a power failure does.
func (r *Running) Cut() {
	ctx, cancel := context.WithTimeout(context.Background(), endBudget)
	defer cancel()
	_ = r.Freeze(ctx, false)                                                                     // as above
	_, _ = r.docker.api.ContainerKill(ctx, r.id, client.ContainerKillOptions{Signal: "SIGKILL"}) // it may have ended
}

// Interrupt can't be done to a container.
func (r *Running) Interrupt(context.Context) error {
	return errors.New("a container has no processor of its own: only a machine in QEMU has an NMI")
}

// Freeze stops the node's processes, or lets them run again.
func (r *Running) Freeze(ctx context.Context, frozen bool) (err error) {
	if frozen {
		_, err = r.docker.api.ContainerPause(ctx, r.id, client.ContainerPauseOptions{})
	} else {
		_, err = r.docker.api.ContainerUnpause(ctx, r.id, client.ContainerUnpauseOptions{})
	}
	return err
}
