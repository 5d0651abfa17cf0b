package rollout

import (
	"context"
	"fmt"
	"strings"
	"time"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
)

const (
	// watchPeriod is that of a program that is watched: it has a count of its restarts, so
	// none is missed.
	watchPeriod = 2 * time.Second
	unreadyFor  = 10 * time.Second
	// maxRestarts: a program may fail once while others change places with it.
	maxRestarts = 2
)

// Program is how a program runs on a node.
type Program struct {
	name    string
	version uint64 // of its configuration: what should run
	image   string // of its configuration
	logs    string // the command that shows its log

	pod      controlplane.PodStatus // empty where the kubelet has none
	running  string                 // the version of the configuration that the pod was made of
	secrets  string                 // the version of the secrets that it was made of
	started  string                 // when its container was started
	restarts int
	waiting  string // why its container doesn't run
}

// Running asks a node for a program.
func Running(ctx context.Context, peers Peers, n Node, name string) (Program, error) {
	run := Program{name: name, logs: fmt.Sprintf("gbctl -n %s logs -k kube-system/%s-%s:%s", n.Address, name, n.Name, name)}
	configs, err := peers.Resources(ctx, n.Address, controlplane.Configs.Type(), name)
	if err != nil {
		return run, err
	}
	if len(configs) != 1 {
		return run, fmt.Errorf("%s isn't configured", name)
	}
	run.version = configs[0].GetVersion()
	var configured struct{ Image string }
	if err := yaml.Unmarshal([]byte(configs[0].GetSpec()), &configured); err != nil {
		return run, fmt.Errorf("configuration of %s: %w", name, err)
	}
	run.image = configured.Image
	statuses, err := Specs[map[string]any](peers.Resources(ctx, n.Address, controlplane.StaticPodStatuses.Type(), ""))
	for id, status := range statuses {
		if !strings.HasPrefix(id, "kube-system/"+name+"-") {
			continue
		}
		run.pod = status
		run.restarts, run.waiting = run.pod.Fails()
		run.running, _ = status[controlplane.ConfigVersion].(string)
		run.secrets, _ = status[controlplane.SecretsVersion].(string)
		for _, container := range kubeclient.Object(status).List("containerStatuses") {
			if at := container.At("state", "running", "startedAt"); at != nil {
				run.started = fmt.Sprint(at)
			}
		}
	}
	return run, err
}

// Unhealthy says why the program isn't what its configuration wants, and ready.
func (r Program) Unhealthy() error {
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

// Healthy says why a program of a node isn't what its configuration wants, and ready.
func Healthy(ctx context.Context, peers Peers, n Node, name string) error {
	run, err := Running(ctx, peers, n, name)
	if err != nil {
		return err
	}
	return run.Unhealthy()
}

// Secrets is the version of the secrets that the pod was made of.
func (r Program) Secrets() string { return r.secrets }

// why is the reason why a program has ended, as far as the kubelet knows it, and where its log is.
func (r Program) why() string { return strings.TrimPrefix(r.waiting+"; "+r.logs, "; ") }

// failing says why waiting won't help.
func (r Program) failing() error {
	if r.running != fmt.Sprint(r.version) {
		return nil
	}
	if r.restarts >= maxRestarts {
		return fmt.Errorf("%s was restarted %d times: %s", r.name, r.restarts, r.why())
	}
	for _, reason := range []string{"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerError", "RunContainerError"} {
		if strings.HasPrefix(r.waiting, reason) {
			return fmt.Errorf("%s can't be started: %s", r.name, r.waiting)
		}
	}
	return nil
}

// Await waits until a program runs with an image of its configuration, and is ready. A node
// takes over a new configuration a moment after it has accepted it.
func Await(ctx context.Context, p *operation.Progress, peers Peers, n Node, name, image string) error {
	return Poll(ctx, p, func(ctx context.Context) error {
		run, err := Running(ctx, peers, n, name)
		if err != nil {
			return err
		}
		if run.image != image {
			return fmt.Errorf("the configuration of %s still has image %s", name, run.image)
		}
		if err := run.failing(); err != nil {
			return Lasting{Err: err}
		}
		return run.Unhealthy()
	})
}

// Watch fails where a program of one of the nodes is restarted, or isn't ready any more, for
// as long as it is watched. A node that doesn't answer for a moment isn't a failure, and a
// program that isn't ready for less than unreadyFor isn't either: a kubelet that was
// restarted reports each pod as not ready until it has probed it.
func Watch(ctx context.Context, peers Peers, nodes []Node, name string, most time.Duration) error {
	first, unready, silent := map[string]Program{}, map[string]time.Time{}, map[string]time.Time{}
	end := time.Now().Add(most)
	for range sleep.Every(ctx, watchPeriod) {
		for _, n := range nodes {
			run, err := Running(ctx, peers, n, name)
			if err != nil {
				since, again := silent[n.Name]
				if ctx.Err() != nil || again && time.Now().After(end) && time.Since(since) > unreadyFor {
					return err
				}
				if !again {
					silent[n.Name] = time.Now()
				}
				continue
			}
			delete(silent, n.Name)
			before, seen := first[n.Name]
			if !seen {
				before = run
			}
			if before.started == "" { // the kubelet has forgotten it for a moment
				before.started = run.started
			}
			first[n.Name] = before
			if run.started != "" && run.started != before.started || run.restarts != before.restarts {
				return fmt.Errorf("node %s: %s ended after it was ready: %s", n.Name, name, run.why())
			}
			err = run.Unhealthy()
			if err == nil {
				delete(unready, n.Name)
			} else if since, ok := unready[n.Name]; !ok {
				unready[n.Name] = time.Now()
			} else if time.Since(since) > unreadyFor {
				return fmt.Errorf("node %s: after it was ready, for %s: %w", n.Name, unreadyFor, err)
			}
		}
		if len(unready) == 0 && len(silent) == 0 && time.Now().After(end) {
			return nil
		}
	}
	return context.Cause(ctx)
}

// AwaitWorkload waits until all pods of a DaemonSet or Deployment are of its present
// template, and ready.
func AwaitWorkload(ctx context.Context, p *operation.Progress, client *kubeclient.Client, ref kubeclient.Ref) error {
	return Poll(ctx, p, func(ctx context.Context) error {
		w, err := client.Get(ctx, ref)
		if kubeclient.IsNotFound(err) {
			return Lasting{Err: err}
		} else if err != nil {
			return err
		}
		return rolledOut(w)
	})
}

// rolledOut says why the pods of a DaemonSet or Deployment aren't all new and ready.
func rolledOut(w kubeclient.Object) error {
	number := func(path ...string) int { n, _ := w.At(path...).(float64); return int(n) }
	wanted, updated, ready := number("spec", "replicas"), number("status", "updatedReplicas"), number("status", "availableReplicas")
	if w.Kind() == "DaemonSet" {
		wanted, updated, ready = number("status", "desiredNumberScheduled"), number("status", "updatedNumberScheduled"), number("status", "numberAvailable")
	}
	if number("status", "observedGeneration") < number("metadata", "generation") || updated < wanted || ready < wanted {
		return fmt.Errorf("%s: %d of %d pods are updated, %d are available", w, updated, wanted, ready)
	}
	return nil
}
