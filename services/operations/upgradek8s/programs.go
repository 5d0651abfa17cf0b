package upgradek8s

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
)

const (
	// pollPeriod is between two looks at a node.
	pollPeriod = 500 * time.Millisecond

	// watchPeriod is that of a program that is watched: it has a count of its restarts, so
	// none is missed.
	watchPeriod = 2 * time.Second

	// watchFirst is how long the first node of a component is watched after it is ready: a
	// program may fail only when it has read the cluster's state, or become the leader.
	watchFirst = 30 * time.Second
	// watchAll is how long all nodes of a component are watched before the next component.
	watchAll = 5 * time.Second
	// maxRestarts: a program may fail once while others change places with it.
	maxRestarts = 2
)

// component has its image in the configuration of a node.
type component struct {
	name     string
	path     []string // of its image
	fallback string   // where the configuration has none
}

// programs are the static pods of a control plane, in the order of an upgrade.
var programs = []component{
	{"kube-apiserver", []string{"cluster", "apiServer", "image"}, config.DefaultAPIServerImage},
	{"kube-controller-manager", []string{"cluster", "controllerManager", "image"}, config.DefaultControllerManagerImage},
	{"kube-scheduler", []string{"cluster", "scheduler", "image"}, config.DefaultSchedulerImage},
}

var (
	proxy   = component{"kube-proxy", []string{"cluster", "proxy", "image"}, config.DefaultProxyImage}
	kubelet = component{"kubelet", []string{"machine", "kubelet", "image"}, config.DefaultKubeletImage}
)

func (o Options) programStep(c component, a Arguments) operation.Step {
	parts := func(p *operation.Progress) ([]operation.Part, error) {
		nodes, err := inventory.Get(p)
		if err != nil {
			return nil, err
		}
		var parts []operation.Part
		for i, n := range controlPlanes(nodes) {
			watch := time.Duration(0)
			if i == 0 {
				watch = watchFirst
			}
			parts = append(parts, operation.Part{
				ID: n.Name, What: fmt.Sprintf("updating node %q", n.Address), Deadline: programTimeout,
				Run:  func(ctx context.Context, p *operation.Progress) error { return o.setProgram(ctx, p, n, c, a.To, watch) },
				Undo: func(ctx context.Context, p *operation.Progress) error { return o.setProgram(ctx, p, n, c, a.From, 0) },
			})
		}
		return parts, nil
	}
	then := func(ctx context.Context, p *operation.Progress) error {
		nodes, err := inventory.Get(p)
		if err != nil {
			return err
		}
		return o.watch(ctx, controlPlanes(nodes), c, watchAll)
	}
	return o.component(c.name, fmt.Sprintf("updating %q to version %q", c.name, strings.TrimPrefix(a.To, "v")), componentTimeout, a, parts, then)
}

// setProgram gives a program of a node its version, and waits until it is healthy.
func (o Options) setProgram(ctx context.Context, p *operation.Progress, n node, c component, version string, watch time.Duration) error {
	began := time.Now()
	changed, err := o.setImage(ctx, p, n, c, version)
	if err != nil {
		return err
	}
	if err := o.awaitProgram(ctx, p, n, c); err != nil {
		return err
	}
	if !changed {
		p.Report("has version %s and is healthy", version)
	} else {
		p.Report("healthy with version %s after %.1f s", version, time.Since(began).Seconds())
	}
	if watch == 0 {
		return nil
	}
	p.Report("watching it for %s, as the first node", watch)
	return o.watch(ctx, []node{n}, c, watch)
}

// setImage changes the image of a component in the configuration of a node.
func (o Options) setImage(ctx context.Context, p *operation.Progress, n node, c component, version string) (changed bool, err error) {
	err = poll(ctx, p, func(ctx context.Context) error {
		document, err := o.Peers.Config(ctx, n.Address)
		if err != nil {
			return err
		}
		images, err := imagesOf(document.GetDocument())
		if err != nil {
			return err
		}
		image, err := withVersion(images[c.name], version)
		if err != nil {
			return lasting{err}
		}
		if image == images[c.name] {
			return nil
		}
		var patch any = image
		for _, key := range slices.Backward(c.path) {
			patch = map[string]any{key: patch}
		}
		text, err := yaml.Marshal(patch)
		if err != nil {
			return err
		}
		_, err = o.Peers.Patch(ctx, n.Address, document.GetDigest(), text)
		if err == nil {
			changed = true
		} else if slices.Contains([]connect.Code{connect.CodeInvalidArgument, connect.CodePermissionDenied, connect.CodeFailedPrecondition}, connect.CodeOf(err)) {
			err = lasting{err}
		}
		return err
	})
	return changed, err
}

// program is how a program runs on a node.
type program struct {
	name    string
	version uint64 // of its configuration: what should run

	pod      controlplane.PodStatus // empty where the kubelet has none
	running  string                 // the version of the configuration that the pod was made of
	started  string                 // when its container was started
	restarts int
	waiting  string // why its container doesn't run
}

// running asks a node for a program.
func (o Options) running(ctx context.Context, n node, c component) (program, error) {
	run := program{name: c.name}
	configs, err := o.Peers.Resources(ctx, n.Address, controlplane.Configs.Type(), c.name)
	if err != nil {
		return run, err
	}
	if len(configs) != 1 {
		return run, fmt.Errorf("%s isn't configured", c.name)
	}
	run.version = configs[0].GetVersion()
	statuses, err := o.Peers.Resources(ctx, n.Address, controlplane.StaticPodStatuses.Type(), "")
	if err != nil {
		return run, err
	}
	for _, s := range statuses {
		if !strings.HasPrefix(s.GetId(), "kube-system/"+c.name+"-") {
			continue
		}
		var status map[string]any
		if err := yaml.Unmarshal([]byte(s.GetSpec()), &status); err != nil {
			return run, fmt.Errorf("status of %s: %w", c.name, err)
		}
		run.pod = status
		run.running, _ = status[controlplane.ConfigVersion].(string)
		for _, container := range kubeclient.Object(status).List("containerStatuses") {
			run.started = fmt.Sprint(container.At("state", "running", "startedAt"))
			restarts, _ := container["restartCount"].(int)
			run.restarts = restarts
			run.waiting = strings.Trim(container.Text("state", "waiting", "reason")+": "+container.Text("state", "waiting", "message"), ": ")
			if last := container.Text("lastState", "terminated", "message"); last != "" {
				run.waiting = strings.Trim(run.waiting+"; it ended with: "+last, "; ")
			}
		}
	}
	return run, nil
}

// unhealthy says why the program isn't what its configuration wants, and ready.
func (r program) unhealthy() error {
	switch {
	case r.pod == nil:
		return fmt.Errorf("%s has no static pod in the kubelet", r.name)
	case r.running != fmt.Sprint(r.version):
		return fmt.Errorf("config version mismatch: got %q, expected \"%d\"", r.running, r.version)
	case !r.pod.Ready() && r.waiting != "":
		return fmt.Errorf("%s isn't ready: %s", r.name, r.waiting)
	case !r.pod.Ready():
		return fmt.Errorf("%s isn't ready", r.name)
	}
	return nil
}

// failing says why waiting won't help.
func (r program) failing() error {
	if r.running != fmt.Sprint(r.version) {
		return nil
	}
	if r.restarts >= maxRestarts {
		return fmt.Errorf("%s was restarted %d times: gbctl logs -k kube-system/%s; %s", r.name, r.restarts, r.name, r.waiting)
	}
	for _, reason := range []string{"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerError", "RunContainerError"} {
		if strings.HasPrefix(r.waiting, reason) {
			return fmt.Errorf("%s can't be started: %s", r.name, r.waiting)
		}
	}
	return nil
}

// awaitProgram waits until a program runs as its configuration says, and is ready.
func (o Options) awaitProgram(ctx context.Context, p *operation.Progress, n node, c component) error {
	return poll(ctx, p, func(ctx context.Context) error {
		run, err := o.running(ctx, n, c)
		if err != nil {
			return err
		}
		if err := run.failing(); err != nil {
			return lasting{err}
		}
		return run.unhealthy()
	})
}

// watch fails where a program of one of the nodes is restarted, or isn't ready any more, for
// as long as it is watched. A node that doesn't answer for a moment isn't a failure.
func (o Options) watch(ctx context.Context, nodes []node, c component, most time.Duration) error {
	first := map[string]program{}
	end := time.Now().Add(most)
	for {
		for _, n := range nodes {
			run, err := o.running(ctx, n, c)
			if err != nil {
				if ctx.Err() != nil || time.Now().After(end) {
					return err
				}
				continue
			}
			before, seen := first[n.Name]
			if !seen {
				first[n.Name] = run
				before = run
			}
			if run.started != before.started || run.restarts != before.restarts {
				return fmt.Errorf("node %s: %s ended after it was ready: gbctl -n %s logs -k kube-system/%s; %s", n.Name, c.name, n.Address, c.name, run.waiting)
			}
			if err := run.unhealthy(); err != nil {
				return fmt.Errorf("node %s: after it was ready: %w", n.Name, err)
			}
		}
		if time.Now().After(end) {
			return nil
		}
		if !sleep.For(ctx, watchPeriod) {
			return context.Cause(ctx)
		}
	}
}

// lasting is an error that trying again doesn't change.
type lasting struct{ error }

func (l lasting) Unwrap() error { return l.error }

// poll tries again until do returns nil or a lasting error, or the time is up. It reports
// each new reason.
func poll(ctx context.Context, p *operation.Progress, do func(context.Context) error) error {
	said := ""
	for {
		err := do(ctx)
		var l lasting
		switch {
		case err == nil:
			return nil
		case errors.As(err, &l):
			return l.error
		case ctx.Err() != nil:
			return fmt.Errorf("%w: %w", context.Cause(ctx), err)
		}
		if text := err.Error(); text != said {
			said = text
			p.Report("retrying error: %s", text)
		}
		if !sleep.For(ctx, pollPeriod) {
			return fmt.Errorf("%w: %w", context.Cause(ctx), err)
		}
	}
}
