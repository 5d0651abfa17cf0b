// Package reendpoint is the operation set-endpoint: all nodes get another cluster.controlPlane.endpoint, one after
// another, the control planes first.
//
//	preflight ─▶ accept ─▶ nodes ─▶ verify
//
// The endpoint leads to the cluster's API servers before that, whose certificates don't have its name yet. All API
// servers accept tokens of the new endpoint before the first of them issues one. What the former endpoint has issued
// stays accepted, so pods don't notice.
package reendpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/operations/rollout"
)

// Name of the operation.
const Name = "set-endpoint"

const (
	// nodeTimeout bounds what is done on one node, and allTimeout on all. An API server of a small machine takes a
	// minute or two to start.
	nodeTimeout = 10 * time.Minute
	allTimeout  = 3 * time.Hour
	program     = "kube-apiserver"
	issuerFlag  = "service-account-issuer"
)

// Options are what the operation stands on.
type Options struct {
	Peers      rollout.Peers
	Kubernetes rollout.Kubernetes
	// Record makes the API servers accept tokens of an endpoint.
	Record func(ctx context.Context, endpoint string) error
	// ServesAt says why no API server of this cluster is at a URL, or none whose certificate has a name. "" is the name
	// in the URL.
	ServesAt func(ctx context.Context, url, name string) error
}

// Definition of the operation.
func Definition(o Options) operation.Definition {
	d := operation.Definition{Name: Name, Exclusive: true, Shared: true}
	return operation.Planned(d, o.job, job.plan, job.steps)
}

// job is a change that was asked for.
type job struct {
	Options
	*apiv1.SetEndpointRequest
}

func (o Options) job(r operation.Request) (job, error) {
	a, err := operation.Decode[apiv1.SetEndpointRequest](r, nil)
	u, bad := config.ParseURL(a.Endpoint)
	a.Endpoint = u.String()
	return job{o, a}, cmp.Or(err, bad)
}

// patch of the configuration of a node.
func patch(endpoint string) map[string]any {
	return map[string]any{"cluster": map[string]any{"controlPlane": map[string]any{"endpoint": endpoint}}}
}

func (j job) plan(ctx context.Context) ([]string, error) {
	if err := j.Peers.Check(); err != nil {
		return nil, err
	}
	c, err := j.look(ctx)
	return []string{
		fmt.Sprintf("nodes that get the endpoint %s, one after another: %d; API servers restart, and no other pod does", j.Endpoint, len(c.Nodes)),
		"kubeconfigs with the former endpoint work for as long as it leads to an API server: gbctl kubeconfig makes new ones",
		"files with which machines join need the new endpoint",
	}, err
}

// change is what is recorded before the first node is changed.
type change struct {
	Nodes  []rollout.Node    `json:"nodes"`  // the control planes first
	Former map[string]string `json:"former"` // endpoints, by node
}

var changing = operation.Data[change]{Key: "change"}

// look asks all nodes. The error names everything that keeps the operation from beginning.
func (j job) look(ctx context.Context) (c change, err error) {
	c.Former = map[string]string{}
	nodes, err := rollout.Survey(ctx, j.Kubernetes, j.Peers, func(n rollout.Node) error {
		has, _, err := rollout.Config(ctx, j.Peers, n)
		c.Former[n.Name] = has.Text("cluster", "controlPlane", "endpoint")
		return err
	})
	c.Nodes = append(rollout.ControlPlanes(nodes), slices.DeleteFunc(nodes, func(n rollout.Node) bool { return n.ControlPlane })...)
	return c, errors.Join(j.leads(ctx, balancer.ServerName), err)
}

// leads is ServesAt with the next step.
func (j job) leads(ctx context.Context, name string) error {
	err := j.ServesAt(ctx, j.Endpoint, name)
	if err != nil {
		err = fmt.Errorf("the endpoint %s leads to no API server of this cluster; set the name, or the load balancer, before: %w", j.Endpoint, err)
	}
	return err
}

func (j job) steps() []operation.Step {
	return []operation.Step{
		{ID: "preflight", What: "check that the endpoint leads to the API servers, and that all nodes are healthy", Deadline: nodeTimeout, Run: j.preflight},
		{ID: "accept", What: "accept tokens of the new endpoint on all control planes", Deadline: nodeTimeout, Run: changing.Then(j.accept)},
		changing.InParts(operation.Step{ID: "nodes", What: "change one node after another", Deadline: allTimeout}, j.parts),
		{ID: "verify", What: "check that API servers at the endpoint have its name", Deadline: nodeTimeout, Run: func(ctx context.Context, p *operation.Progress) error {
			return rollout.Poll(ctx, p, func(ctx context.Context) error { return j.leads(ctx, "") })
		}},
	}
}

func (j job) preflight(ctx context.Context, p *operation.Progress) error {
	return rollout.First(ctx, p, j.Peers, changing, j.look, func(c change) []rollout.Node { return c.Nodes })
}

// accept is for all control planes to accept what one of them issues with the new endpoint. Nothing undoes it: that
// does no harm.
func (j job) accept(ctx context.Context, p *operation.Progress, c change) error {
	return rollout.Poll(ctx, p, func(ctx context.Context) error {
		err := j.Record(ctx, j.Endpoint)
		for _, n := range rollout.ControlPlanes(c.Nodes) {
			err = cmp.Or(err, j.serves(ctx, n, func(issuers []string) bool { return slices.Contains(issuers, j.Endpoint) }))
		}
		return err
	})
}

func (j job) parts(c change) []operation.Part {
	do := func(ctx context.Context, p *operation.Progress, n rollout.Node) error {
		return j.move(ctx, p, n, j.Endpoint)
	}
	undo := func(ctx context.Context, p *operation.Progress, n rollout.Node) error {
		return j.move(ctx, p, n, c.Former[n.Name])
	}
	return rollout.Parts(c.Nodes, "change node %q", nodeTimeout, do, undo)
}

// move gives a node an endpoint, and waits until it serves with it.
func (j job) move(ctx context.Context, p *operation.Progress, n rollout.Node, to string) error {
	return rollout.Poll(ctx, p, func(ctx context.Context) error {
		has, digest, err := rollout.Config(ctx, j.Peers, n)
		if err == nil && has.Text("cluster", "controlPlane", "endpoint") != to {
			err = rollout.Patch(ctx, j.Peers, n, digest, patch(to))
		}
		if err == nil && n.ControlPlane {
			err = j.serves(ctx, n, func(issuers []string) bool { return issuers[0] == to })
		}
		return cmp.Or(err, rollout.Serves(ctx, p, j.Peers, n))
	})
}

// serves says why the API server of a node doesn't serve with the issuers of tokens that are right. Those of the
// configuration are the user's.
func (j job) serves(ctx context.Context, n rollout.Node, right func(issuers []string) bool) error {
	pods, err := j.Peers.Resources(ctx, n.Address, controlplane.StaticPods.Type(), program)
	if err != nil {
		return err
	}
	var issuers []string
	for _, pod := range pods {
		issuers = append(issuers, lists.Some(strings.Fields(pod.GetSpec()), func(word string) (string, bool) {
			return strings.CutPrefix(word, "--"+issuerFlag+"=")
		})...)
	}
	has, _, err := rollout.Config(ctx, j.Peers, n)
	if err == nil && (len(issuers) == 0 || has.At("cluster", "apiServer", "extraArgs", issuerFlag) == nil && !right(issuers)) {
		err = fmt.Errorf("%s of node %s has the issuers of tokens %q still", program, n.Name, issuers)
	}
	return cmp.Or(err, rollout.Healthy(ctx, j.Peers, n, program))
}
