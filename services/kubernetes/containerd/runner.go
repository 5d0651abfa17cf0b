package containerd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	client "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/contrib/seccomp"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/process"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/system/configuration"
)

const (
	snapshotter = "overlayfs"
	fifoDir     = boot.RunDir + "/fifo"

	// cleanupTimeout bounds what is done after a container has ended: removing
	// task, container and snapshot is a few metadata writes.
	cleanupTimeout = 10 * time.Second
	// reattachPoll is how often a Runner looks whether a restarted containerd
	// answers again.
	reattachPoll = 200 * time.Millisecond

	// TrialEnds of a new image's program before it was healthy are the image's fault: a single one may have another
	// cause.
	TrialEnds = 3
	// startTime is more than a healthy image needs to be healthy again when it starts anew.
	startTime = time.Minute
	// TrialTime is how long such a program may run without being healthy: an API server on a small machine needs a
	// minute or two, and so does etcd with a large database.
	TrialTime = 5 * time.Minute

	// ImageSick is that the program of a new image doesn't work, and the former one goes on.
	ImageSick reason.Code = "ImageSick"
)

var errUnhealthy = fmt.Errorf("it wasn't healthy within %s", TrialTime)

// Runner runs one OCI image as a service of the node: Prepare pulls it, Run
// keeps one task of it and ends with it. With Proves, another image is on trial until it is healthy:
//
//	good ── another image is configured ──▶ on trial ── healthy ──▶ good
//	 ▲                                        │
//	 └── TrialEnds, or TrialTime is over ─────┘ and the image is sick until the service is configured otherwise
//
// What was healthy once stays: etcd may have changed its data so that its former version can't read it. All of this is
// in memory: after a boot, there is nothing to go back to.
type Runner struct {
	Containerd *Containerd
	ID         string
	// Image is the reference to run, read at each start, and Field what has it in the configuration.
	Image func(*config.Config) string
	Field string
	// RootFS is a directory that is the root file system of the container instead of an image's.
	RootFS string
	// Spec is the container's OCI runtime specification, on top of the image's
	// own configuration, made at each start.
	Spec func(ctx context.Context) ([]oci.SpecOpts, error)
	// StopBudget is the time between SIGTERM and SIGKILL.
	StopBudget time.Duration
	// OOMScoreAdj of the container's processes. Without it they would have that of their
	// shim, which is containerd's.
	OOMScoreAdj int

	// the reference that Prepare has made present last, and the one that was healthy at its last check
	ran, good atomic.Pointer[string]
	ends      int // of ran
	sick      atomic.Pointer[sick]
}

// sick is why the image that a configuration names isn't what runs.
type sick struct {
	with *config.Config
	why  error
}

// Prepare makes the image present and unpacked: the former one while a restart waits for that of the configuration.
func (r *Runner) Prepare(ctx context.Context, h *dag.Handle) error {
	cfg, err := configuration.Config(r.Containerd.Store)
	if err != nil {
		return err
	}
	ref, ran := r.Image(cfg), r.ran.Load()
	if ran != nil && r.Lacks(ctx) != nil {
		ref = *ran
	}
	if _, err = r.Containerd.Pull(ctx, Namespace, ref, h.EventOf); err == nil && (ran == nil || *ran != ref) {
		r.take(ref)
	}
	return err
}

// take notes what the next run has.
func (r *Runner) take(ref string) {
	r.ran.Store(&ref)
	r.sick.Store(nil)
	r.ends = 0
}

// Lacks is an error for as long as the image of the configuration isn't the one that ran last, and is sick or isn't on
// the node: then it is pulled meanwhile.
func (r *Runner) Lacks(ctx context.Context) error {
	cfg, err := configuration.Config(r.Containerd.Store)
	ran := r.ran.Load()
	if err != nil || ran == nil || *ran == r.Image(cfg) {
		r.sick.Store(nil) // another try of the image is one of another configuration
		return err
	}
	instead := fmt.Sprintf("goes on with %s, and not with what %s names", *ran, r.Field)
	own := func(e config.Effect) bool { id, _ := e.Service(); return id == r.ID }
	if s := r.sick.Load(); s != nil && !slices.ContainsFunc(config.Effects(config.Diff(s.with, cfg)), own) {
		return reason.With(ImageSick, fmt.Errorf("%s: %w", instead, s.why))
	}
	return r.Containerd.Have(ctx, Namespace, r.Image(cfg), instead)
}

// Proves is a health check that decides about an image on trial.
func (r *Runner) Proves(check func(context.Context) error) func(context.Context) error {
	served := time.Now()
	return func(ctx context.Context) error {
		ran := r.ran.Load()
		err := check(ctx)
		if err == nil {
			served = time.Now()
			r.good.Store(ran)
		} else if ctx.Err() == nil && time.Since(served) > startTime { // it isn't stopped, and doesn't start anew
			r.good.CompareAndSwap(ran, nil) // there is nothing to go back to
		}
		return err
	}
}

func (r *Runner) onTrial() bool {
	good := r.good.Load()
	return good != nil && good != r.ran.Load()
}

// late ends a run that doesn't become healthy.
func (r *Runner) late(ctx context.Context) error {
	if r.onTrial() && sleep.For(ctx, TrialTime) && r.onTrial() {
		return errUnhealthy
	}
	return nil
}

// over is for a run that wasn't asked to end. It goes back if the image on trial is sick.
func (r *Runner) over(why error, said string) {
	if r.ends++; !r.onTrial() || r.ends < TrialEnds && !errors.Is(why, errUnhealthy) {
		return
	}
	cfg, _ := configuration.Config(r.Containerd.Store) // without one, no service runs
	if said = said[strings.LastIndex(said, "\n")+1:]; said != "" {
		why = fmt.Errorf("%w; it said last: %s", why, said)
	}
	r.sick.Store(&sick{cfg, fmt.Errorf("image %s doesn't work: %w", *r.ran.Load(), why)})
	r.ran.Store(r.good.Load())
}

// Pull fetches ref into the given containerd namespace unless it is there.
func (c *Containerd) Pull(ctx context.Context, namespace, ref string, event pullEvent, options ...client.RemoteOpt) (client.Image, error) {
	cl, err := c.Client()
	if err != nil {
		return nil, err
	}
	ctx = namespaces.WithNamespace(ctx, namespace)
	img, err := cl.GetImage(ctx, ref)
	if errdefs.IsNotFound(err) {
		c.fromMedium(ctx, namespace, ref)
		img, err = cl.GetImage(ctx, ref)
	}
	switch {
	case errdefs.IsNotFound(err):
		event(Pulling, "Pulling image "+ref)
		return c.fromRegistry(ctx, cl, ref, options...)
	case err != nil:
		return nil, fmt.Errorf("look up image %s: %w", ref, err)
	}
	// A power cut can leave an image whose layers aren't all unpacked. A part that is missing is pulled.
	if err := unpack(ctx, cl, img); errdefs.IsNotFound(err) {
		return c.fromRegistry(ctx, cl, ref, options...)
	} else if err != nil {
		return nil, pullError(ref, err)
	}
	return img, nil
}

// fromRegistry is fetch by the present configuration.
func (c *Containerd) fromRegistry(ctx context.Context, cl *client.Client, ref string, options ...client.RemoteOpt) (client.Image, error) {
	cfg, err := configuration.Config(c.Store)
	if err != nil {
		return nil, err
	}
	return c.fetch(ctx, cl, ref, origin{hostsDir: hostsDir, bundle: boot.CABundle, machine: cfg.Machine}, options...)
}

// fetch pulls ref from its registry, if the rule for it accepts it.
func (c *Containerd) fetch(ctx context.Context, cl *client.Client, ref string, o origin, options ...client.RemoteOpt) (client.Image, error) {
	over, err := c.alone(ctx, ref)
	if err != nil {
		return nil, pullError(ref, err)
	}
	defer over()
	from, done := o.resolver(ctx)
	defer done()
	accepted, err := accept(ctx, from, ref, o.machine.Images)
	if err != nil {
		return nil, pullError(ref, err)
	}
	img, err := cl.Pull(ctx, ref, append(options, client.WithResolver(accepted))...)
	if err == nil {
		err = unpack(ctx, cl, img)
	}
	if err != nil {
		return nil, pullError(ref, err)
	}
	return img, nil
}

// alone waits until no other pull of an image is under way: each would unpack it, and need its room.
func (c *Containerd) alone(ctx context.Context, ref string) (over func(), err error) {
	mine := make(chan struct{})
	for {
		other, there := c.pulls.LoadOrStore(ref, mine)
		if !there {
			return func() { c.pulls.Delete(ref); close(mine) }, nil
		}
		select {
		case <-other.(chan struct{}):
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// Run is the service's run function.
func (r *Runner) Run(ctx context.Context, h *dag.Handle) error {
	out, said := r.Containerd.Logs.Writer(r.ID), new(process.Tail)
	defer out.Close()
	err := dag.While(ctx, func(ctx context.Context) error {
		return r.with(ctx, io.MultiWriter(out, said), h.EventOf, func(ctx context.Context, cl *client.Client, task client.Task, exited <-chan client.ExitStatus) error {
			h.Started(fmt.Sprintf("Started task %s (PID %d) for container %s", r.ID, task.Pid(), r.ID))
			return r.supervise(ctx, cl, task, exited)
		})
	}, r.late)
	if ctx.Err() == nil {
		r.over(err, said.String())
	}
	return err
}

// with makes the container anew and starts its task, does something, and removes both.
func (r *Runner) with(ctx context.Context, out io.Writer, event pullEvent, do func(context.Context, *client.Client, client.Task, <-chan client.ExitStatus) error) error {
	cl, err := r.Containerd.Client()
	if err != nil {
		return err
	}
	ctx = namespaces.WithNamespace(ctx, Namespace)
	if err := r.remove(ctx, cl); err != nil {
		return fmt.Errorf("remove the old container %s: %w", r.ID, err)
	}
	container, err := r.create(ctx, cl, event)
	if err != nil {
		return err
	}
	var task client.Task
	defer func() {
		cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
		defer cancel()
		if err := r.remove(cctx, cl); err != nil { // the next run does it first
			r.Containerd.Logs.Logger(ID).Warn("remove container", "container", r.ID, "err", err)
		}
		if task != nil { // nobody else removes its pipes; what is still in them is read
			_ = os.RemoveAll(filepath.Dir(task.IO().Config().Stdout))
		}
	}()
	if err := os.MkdirAll(fifoDir, 0o700); err != nil {
		return err
	}
	task, err = container.NewTask(ctx, cio.NewCreator(cio.WithStreams(nil, out, out), cio.WithFIFODir(fifoDir)))
	if err != nil {
		return fmt.Errorf("create task of container %s: %w", r.ID, err)
	}
	if err := setOOMScoreAdj(task.Pid(), r.OOMScoreAdj); err != nil {
		return fmt.Errorf("create task of container %s: %w", r.ID, err)
	}
	exited, err := task.Wait(context.WithoutCancel(ctx))
	if err != nil {
		return fmt.Errorf("wait for container %s: %w", r.ID, err)
	}
	if err := task.Start(ctx); err != nil {
		return fmt.Errorf("start container %s: %w", r.ID, err)
	}
	return do(ctx, cl, task, exited)
}

func (r *Runner) create(ctx context.Context, cl *client.Client, event pullEvent) (client.Container, error) {
	root, options, err := r.from(ctx, event)
	if err != nil {
		return nil, err
	}
	spec, err := r.Spec(ctx)
	if err != nil {
		return nil, fmt.Errorf("specification of container %s: %w", r.ID, err)
	}
	container, err := cl.NewContainer(ctx, r.ID, append(options, client.WithNewSpec(append([]oci.SpecOpts{root}, spec...)...))...)
	if err != nil {
		return nil, fmt.Errorf("create container %s: %w", r.ID, err)
	}
	return container, nil
}

// from is where the container has its root file system from.
func (r *Runner) from(ctx context.Context, event pullEvent) (oci.SpecOpts, []client.NewContainerOpts, error) {
	if r.RootFS != "" {
		return oci.WithRootFSPath(r.RootFS), nil, nil
	}
	cfg, err := configuration.Config(r.Containerd.Store)
	if err != nil {
		return nil, nil, err
	}
	img, err := r.Containerd.Pull(ctx, Namespace, *cmp.Or(r.ran.Load(), new(r.Image(cfg))), event)
	if err != nil {
		return nil, nil, err
	}
	return ofImage(img), []client.NewContainerOpts{client.WithImage(img), client.WithSnapshotter(snapshotter), client.WithNewSnapshot(r.ID, img, kept)}, nil
}

// ofImage gives a container the environment and the folder of an image. Whoever runs it says its user and its command:
// to look up a user in the image, the library would bring text/template to PID 1 (see package render).
func ofImage(img client.Image) oci.SpecOpts {
	return func(ctx context.Context, cl oci.Client, c *containers.Container, s *oci.Spec) error {
		of, err := img.Spec(ctx)
		if err != nil {
			return err
		}
		return oci.Compose(oci.WithDefaultPathEnv, oci.WithEnv(of.Config.Env), oci.WithProcessCwd(cmp.Or(of.Config.WorkingDir, "/")))(ctx, cl, c, s)
	}
}

// Confined lets a container's program run as its own user, with no capability and no way to one, and with the system
// calls that Kubernetes' RuntimeDefault allows.
func Confined(program string) oci.SpecOpts {
	uid := uint32(boot.User(program))
	return func(ctx context.Context, cl oci.Client, c *containers.Container, s *oci.Spec) error {
		s.Process.User, s.Process.Capabilities, s.Process.NoNewPrivileges = specs.User{UID: uid, GID: uid}, &specs.LinuxCapabilities{}, true
		return seccomp.WithDefaultProfile()(ctx, cl, c, s) // which depends on the capabilities
	}
}

// setOOMScoreAdj is for a task that hasn't started yet: its children inherit it. Where the
// score can't be lowered (a container without CAP_SYS_RESOURCE) it stays; in the container's
// specification it would be the end of the task.
func setOOMScoreAdj(pid uint32, score int) error {
	err := os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid), []byte(strconv.Itoa(score)), 0)
	if errors.Is(err, fs.ErrPermission) {
		return nil
	}
	return err
}

// supervise returns when the task has ended, with an *ExitError, or has been stopped
// because ctx ended. An answer that never came because containerd died is not an exit: the
// shim and the task live on, so it asks the next containerd.
func (r *Runner) supervise(ctx context.Context, cl *client.Client, task client.Task, exited <-chan client.ExitStatus) error {
	for {
		select {
		case <-ctx.Done():
			return r.stop(ctx, task, exited)
		case status := <-exited:
			if status.Error() == nil {
				return &ExitError{r.ID, status.ExitCode()}
			}
		}
		var gone error
		if task, exited, gone = r.reattach(ctx, cl); gone != nil {
			return gone
		}
	}
}

// reattach finds the running task again once containerd answers.
func (r *Runner) reattach(ctx context.Context, cl *client.Client) (client.Task, <-chan client.ExitStatus, error) {
	for sleep.For(ctx, reattachPoll) {
		if r.Containerd.healthy(ctx) != nil {
			continue
		}
		var task client.Task
		var exited <-chan client.ExitStatus
		container, err := cl.LoadContainer(ctx, r.ID)
		if err == nil {
			task, err = container.Task(ctx, nil)
		}
		if errdefs.IsNotFound(err) {
			return nil, nil, fmt.Errorf("container %s ended while containerd was down", r.ID)
		}
		if err == nil {
			exited, err = task.Wait(context.WithoutCancel(ctx))
		}
		if err == nil {
			return task, exited, nil
		}
	}
	return nil, nil, ctx.Err()
}

func (r *Runner) stop(ctx context.Context, task client.Task, exited <-chan client.ExitStatus) error {
	for _, end := range []struct {
		signal syscall.Signal
		within time.Duration
		how    []client.KillOpts
	}{{syscall.SIGTERM, r.StopBudget, nil}, {syscall.SIGKILL, cleanupTimeout, []client.KillOpts{client.WithKillAll}}} {
		// Each question has its own limit: a containerd that hangs must not hold up a shutdown.
		kctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
		err := ignoreGone(task.Kill(kctx, end.signal, end.how...))
		cancel()
		if err != nil {
			return fmt.Errorf("stop container %s: %w", r.ID, err)
		}
		select {
		case <-exited:
			return nil
		case <-time.After(end.within):
		}
	}
	return fmt.Errorf("container %s survived SIGKILL for %s", r.ID, cleanupTimeout)
}

// remove deletes what a former run of the container left: task, container and
// snapshot. Nothing there is no error.
func (r *Runner) remove(ctx context.Context, cl *client.Client) error {
	container, err := cl.LoadContainer(ctx, r.ID)
	if errdefs.IsNotFound(err) {
		// A run that was cut off between snapshot and container leaves the former.
		return ignoreGone(cl.SnapshotService(snapshotter).Remove(ctx, r.ID))
	} else if err != nil {
		return err
	}
	task, err := container.Task(ctx, nil)
	if err == nil {
		_, err = task.Delete(ctx, client.WithProcessKill)
	}
	if errdefs.IsNotFound(err) {
		// Where removing the task took longer than the one who asked could wait, as with a
		// slow disk, its shim has done it since, and containerd still holds the shim: no
		// task of this name can be looked up, and none created, until that is deleted
		// (https://github.com/containerd/containerd/issues/11392).
		_, err = cl.TaskService().Delete(ctx, &tasks.DeleteTaskRequest{ContainerID: r.ID})
		err = errgrpc.ToNative(err)
	}
	if err := ignoreGone(err); err != nil {
		return err
	}
	return ignoreGone(container.Delete(ctx, client.WithSnapshotCleanup))
}
