// Package upgradek8s is the operation upgrade-k8s: it moves the Kubernetes of a running
// cluster to another version, up or down.
//
// The machine configuration of each node has the images of its components. The operation
// changes one image on one node, waits until what runs there is healthy, and goes to the
// next node:
//
//	preflight ─▶ images ─▶ kube-apiserver ─▶ kube-controller-manager ─▶ kube-scheduler
//	                         ─▶ kube-proxy ─▶ manifests ─▶ kubelets ─▶ verify
//
// Downwards the order is the reverse, as no component may be newer than the API server it
// talks to (https://kubernetes.io/releases/version-skew-policy/). Nothing changes before
// each image is on each node that needs it.
//
// A component that fails on one node gets its former image back on all nodes, and the
// operation ends. Components that were finished before keep their new version, which the
// skew policy allows. So the same command goes on from there.
package upgradek8s

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/operations/rollout"
)

// Name of the operation.
const Name = "upgrade-k8s"

const (
	// fromTimeout bounds the look at all nodes for their version.
	fromTimeout = 2 * time.Minute
	// moment is how long the plan waits for what has just started: a node of a new cluster is Ready before each static
	// pod is.
	moment = 20 * time.Second
	// pullTimeout bounds the images of one node, and imagesTimeout those of all: a node
	// tries for 15 minutes to get one image.
	pullTimeout   = time.Hour
	imagesTimeout = 6 * time.Hour
	// programTimeout bounds one component on one node. A small machine needs a minute or two
	// for an API server.
	programTimeout = 10 * time.Minute
	// componentTimeout bounds one component on all nodes.
	componentTimeout = 3 * time.Hour
	// rolloutTimeout bounds the pods of a DaemonSet or Deployment.
	rolloutTimeout = 15 * time.Minute
	// kubeletTimeout bounds one node, with its drain, and kubeletsTimeout all nodes.
	kubeletTimeout  = 20 * time.Minute
	kubeletsTimeout = 24 * time.Hour
	// statusAge is how old a node's status of its static pods may be, while they are ready.
	statusAge = 12 * time.Second
	// verifyTimeout bounds the last look at all nodes.
	verifyTimeout = 2 * time.Minute
)

// Options are what the operation stands on.
type Options struct {
	Store      resource.Reader
	Peers      rollout.Peers
	Kubernetes rollout.Kubernetes
	// Metrics are those of the API server of one node, in the text format of Prometheus.
	Metrics func(ctx context.Context, node netip.Addr) (string, error)
}

// Definition of the operation.
func Definition(o Options) operation.Definition {
	d := operation.Definition{Name: Name, Exclusive: true, Shared: true}
	return operation.Planned(d, o.job, job.plan, job.steps)
}

// job is an upgrade that was asked for.
type job struct {
	Options
	a  *apiv1.UpgradeKubernetesRequest
	id string
}

func (o Options) job(r operation.Request) (job, error) {
	a, err := operation.Decode[apiv1.UpgradeKubernetesRequest](r, nil)
	return job{o, a, r.ID}, err
}

func (j job) plan(ctx context.Context) ([]string, error) {
	if err := skew(j.a.From, j.a.To); err != nil {
		return nil, err
	}
	seen, err := j.look(ctx, j.a)
	for end := time.Now().Add(moment); errors.As(err, new(passing)) && time.Now().Before(end) && sleep.For(ctx, time.Second); {
		seen, err = j.look(ctx, j.a)
	}
	return seen.warnings, err
}

func (j job) steps() []operation.Step {
	to := strings.TrimPrefix(j.a.To, "v")
	first := []operation.Step{
		{ID: "preflight", What: "check that the cluster can be upgraded",
			Deadline: programTimeout, Run: j.preflight}, // a restart may have come between
		{ID: "images", What: "pull all images to the nodes that need them",
			Deadline: imagesTimeout, Run: inventory.Then(j.pullAll)},
	}
	var middle []operation.Step
	for _, c := range programs {
		middle = append(middle, j.component(operation.Step{
			ID: c.name, What: fmt.Sprintf("updating %q to version %q", c.name, to), Deadline: componentTimeout,
		}, j.program(c), j.watch(c)))
	}
	middle = append(middle,
		operation.Step{ID: proxy.name, What: fmt.Sprintf("updating daemonset %q to version %q", proxy.name, to),
			Deadline: rolloutTimeout, Run: inventory.Then(j.upgradeProxy), Undo: j.undo(proxy.name, j.downgradeProxy), Stays: j.stays(proxy.name)},
		operation.Step{ID: "manifests", What: "compare the cluster's objects with the bootstrap manifests",
			Deadline: rolloutTimeout, Run: j.manifests},
		j.component(operation.Step{
			ID: "kubelets", What: fmt.Sprintf("updating the kubelets to version %q, one node after another", to),
			Deadline: kubeletsTimeout, Omit: j.a.NoKubelet}, j.kubelets, nil))
	if down(j.a.From, j.a.To) {
		slices.Reverse(middle)
	}
	return append(append(first, middle...), operation.Step{
		ID: "verify", What: "check that all nodes run the new version and are healthy", Deadline: verifyTimeout, Run: j.verify})
}

// component completes a step that runs parts for nodes, and whose parts are undone together.
func (j job) component(s operation.Step, parts func([]rollout.Node) []operation.Part, then func(context.Context, []rollout.Node) error) operation.Step {
	s.Run = inventory.Then(func(ctx context.Context, p *operation.Progress, nodes []rollout.Node) error {
		err := p.Each(ctx, 1, parts(nodes)...)
		if err == nil && then != nil {
			err = then(ctx, nodes)
		}
		return err
	})
	s.Undo = j.undo(s.ID, func(ctx context.Context, p *operation.Progress, nodes []rollout.Node) error {
		return p.UndoEach(ctx, parts(nodes)...)
	})
	s.Stays = j.stays(s.ID)
	return s
}

// finished has the components that run in the new version on all nodes, in records of earlier releases. Their steps
// are being undone there for a moment before it is said that they stay.
var finished = operation.Data[[]string]{Key: "finished"}

// undo undoes a component that isn't finished.
func (j job) undo(component string, do func(context.Context, *operation.Progress, []rollout.Node) error) func(context.Context, *operation.Progress) error {
	return inventory.Then(func(ctx context.Context, p *operation.Progress, nodes []rollout.Node) error {
		if all, _ := finished.Get(p); slices.Contains(all, component) {
			p.Report("%s", j.stays(component))
			return nil
		}
		return do(ctx, p, nodes)
	})
}

// stays is said of a component that runs in the new version on all nodes: it keeps that if the operation fails later.
func (j job) stays(component string) string {
	return fmt.Sprintf("%s stays at version %s: the same command goes on from here", component, j.a.To)
}
