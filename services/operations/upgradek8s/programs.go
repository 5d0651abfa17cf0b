package upgradek8s

import (
	"context"
	"slices"
	"time"

	"connectrpc.com/connect"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/operations/rollout"
)

const (
	// watchFirst is how long the first node of a component is watched after it is ready: a
	// program may fail only when it has read the cluster's state, or become the leader.
	watchFirst = 30 * time.Second
	// watchAll is how long all nodes of a component are watched before the next component.
	watchAll = 5 * time.Second
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

// components are all that have an image in the configuration of a node.
var components = append(slices.Clone(programs), proxy, kubelet)

// program are the parts that change a program.
func (j job) program(c component) func([]rollout.Node) []operation.Part {
	return func(nodes []rollout.Node) []operation.Part {
		nodes = rollout.ControlPlanes(nodes)
		watches := map[string]time.Duration{nodes[0].Name: watchFirst}
		return rollout.Parts(nodes, "updating node %q", programTimeout,
			rollout.Serving(j.Peers, func(ctx context.Context, p *operation.Progress, n rollout.Node) error {
				return j.setProgram(ctx, p, n, c, j.a.To, watches[n.Name])
			}),
			func(ctx context.Context, p *operation.Progress, n rollout.Node) error {
				return j.setProgram(ctx, p, n, c, j.a.From, 0)
			})
	}
}

func (j job) watch(c component) func(context.Context, []rollout.Node) error {
	return func(ctx context.Context, nodes []rollout.Node) error {
		return rollout.Watch(ctx, j.Peers, rollout.ControlPlanes(nodes), c.name, watchAll)
	}
}

// setProgram gives a program of a node its version, and waits until it is healthy.
func (o Options) setProgram(ctx context.Context, p *operation.Progress, n rollout.Node, c component, version string, watch time.Duration) error {
	began := time.Now()
	image, changed, err := o.setImage(ctx, p, n, c, version)
	if err != nil {
		return err
	}
	if err := rollout.Await(ctx, p, o.Peers, n, c.name, image); err != nil {
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
	return rollout.Watch(ctx, o.Peers, []rollout.Node{n}, c.name, watch)
}

// setImage changes the image of a component in the configuration of a node.
func (o Options) setImage(ctx context.Context, p *operation.Progress, n rollout.Node, c component, version string) (image string, changed bool, err error) {
	err = rollout.Poll(ctx, p, func(ctx context.Context) error {
		document, digest, err := rollout.Config(ctx, o.Peers, n)
		if err != nil {
			return err
		}
		images := imagesOf(document)
		image, err = config.WithVersion(images[c.name], version)
		if err != nil {
			return rollout.Lasting{Err: err}
		}
		if image == images[c.name] {
			return nil
		}
		var patch any = image
		for _, key := range slices.Backward(c.path) {
			patch = map[string]any{key: patch}
		}
		err = rollout.Patch(ctx, o.Peers, n, digest, patch, connect.CodeFailedPrecondition)
		changed = changed || err == nil
		return err
	})
	return image, changed, err
}
