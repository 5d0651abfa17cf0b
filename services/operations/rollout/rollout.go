// Package rollout has what operations on all nodes of a cluster have in common: the list of
// nodes, waiting, and how a program of the control plane runs on a node.
package rollout

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"time"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/system/network"
	"gopkg.in/yaml.v3"
)

// ControlPlaneLabel is on the Node of each control plane.
const ControlPlaneLabel = "node-role.kubernetes.io/control-plane"

// pollPeriod is between two looks at a node.
const pollPeriod = 500 * time.Millisecond

// Node of the cluster. It is kept in the record, so that a resumed operation doesn't depend
// on a cluster that may be down.
type Node struct {
	Name         string     `json:"name"`
	Address      netip.Addr `json:"address"`
	ControlPlane bool       `json:"controlPlane,omitempty"`
}

// NodeOf is a Node of Kubernetes. Without an InternalIP its address isn't valid.
func NodeOf(o kubeclient.Object) Node {
	n := Node{Name: o.Name()}
	labels, _ := o.At("metadata", "labels").(map[string]any)
	_, n.ControlPlane = labels[ControlPlaneLabel]
	for _, address := range o.List("status", "addresses") {
		if a, err := netip.ParseAddr(address.Text("address")); err == nil && address.Text("type") == "InternalIP" && !n.Address.IsValid() {
			n.Address = a
		}
	}
	return n
}

// ControlPlanes are those of the nodes.
func ControlPlanes(nodes []Node) []Node {
	return slices.DeleteFunc(slices.Clone(nodes), func(n Node) bool { return !n.ControlPlane })
}

// OnNode does something on a node.
type OnNode = func(ctx context.Context, p *operation.Progress, n Node) error

// Parts are those of a step that does the same on each of the nodes; undo may be nil. What has a verb for the address,
// such as "updating node %q".
func Parts(nodes []Node, what string, deadline time.Duration, do, undo OnNode) []operation.Part {
	return lists.Of(nodes, func(n Node) operation.Part {
		part := operation.Part{ID: n.Name, What: fmt.Sprintf(what, n.Address), Deadline: deadline}
		part.Run = func(ctx context.Context, p *operation.Progress) error { return do(ctx, p, n) }
		if undo != nil {
			part.Undo = func(ctx context.Context, p *operation.Progress) error { return undo(ctx, p, n) }
		}
		return part
	})
}

// Discovered is the line about the control planes of an operation.
func Discovered(nodes []Node) string {
	addresses := lists.Of(ControlPlanes(nodes), func(n Node) string { return fmt.Sprintf("%q", n.Address) })
	return "discovered control plane nodes [" + strings.Join(addresses, " ") + "]"
}

// Peers calls the nodes of the cluster, this one too: peers.Client.
type Peers interface {
	Check() error
	Config(ctx context.Context, node netip.Addr) (*apiv1.GetConfigResponse, error)
	Patch(ctx context.Context, node netip.Addr, base string, patch []byte) (*apiv1.ApplyConfigResponse, error)
	Resources(ctx context.Context, node netip.Addr, typ, id string) ([]*apiv1.Resource, error)
	Services(ctx context.Context, node netip.Addr) ([]*apiv1.Service, error)
	Version(ctx context.Context, node netip.Addr) (*apiv1.VersionResponse, error)
	Pull(ctx context.Context, node netip.Addr, image string, kubernetes bool, report func(done, total uint64)) (digest string, err error)
}

// Specs are those of resources that a peer has, by their IDs.
func Specs[S any](found []*apiv1.Resource, err error) (map[string]S, error) {
	all := map[string]S{}
	for _, f := range found {
		var spec S
		if err := yaml.Unmarshal([]byte(f.GetSpec()), &spec); err != nil {
			return nil, fmt.Errorf("%s: %w", f.GetId(), err)
		}
		all[f.GetId()] = spec
	}
	return all, err
}

// Kubernetes makes a client of the cluster's API as its administrator.
type Kubernetes func() (*kubeclient.Client, error)

// With calls do with a client.
func (k Kubernetes) With(do func(*kubeclient.Client) error) error {
	client, err := k()
	if err != nil {
		return err
	}
	defer client.Close()
	return do(client)
}

// Node calls do with a client and this node's name in Kubernetes.
func (k Kubernetes) Node(store resource.Reader, do func(c *kubeclient.Client, name string) error) error {
	name, err := network.Hostnames.Get(store, network.HostnameID)
	if err != nil {
		return err
	}
	return k.With(func(c *kubeclient.Client) error { return do(c, name.Spec) })
}

// Poll is Poll with a client.
func (k Kubernetes) Poll(ctx context.Context, p *operation.Progress, do func(context.Context, *kubeclient.Client) error) error {
	return k.With(func(client *kubeclient.Client) error {
		return Poll(ctx, p, func(ctx context.Context) error { return do(ctx, client) })
	})
}

// Lasting is an error that trying again doesn't change.
type Lasting struct{ Err error }

func (l Lasting) Error() string { return l.Err.Error() }

func (l Lasting) Unwrap() error { return l.Err }

// ages are in texts of the same reason, each time other ones.
var ages = regexp.MustCompile(`\b[\dhm.]*[\d.]+m?s\b`)

// Poll tries again until do returns nil or a lasting error, or the time is up. It reports
// each new reason.
func Poll(ctx context.Context, p *operation.Progress, do func(context.Context) error) error {
	said, err := "", error(nil)
	for range sleep.Every(ctx, pollPeriod) {
		err = do(ctx)
		if l, lasts := errors.AsType[Lasting](err); err == nil || lasts {
			return l.Err
		}
		if text := ages.ReplaceAllString(err.Error(), ""); text != said && ctx.Err() == nil {
			said = text
			p.Report("retrying error: %s", err)
		}
	}
	return fmt.Errorf("%w: %w", context.Cause(ctx), err)
}

// Nodes is Nodes with a client.
func (k Kubernetes) Nodes(ctx context.Context) (nodes []kubeclient.Object, err error) {
	err = k.With(func(client *kubeclient.Client) error { nodes, err = Nodes(ctx, client); return err })
	return nodes, err
}

// Nodes lists the Nodes of Kubernetes, in the order of their names.
func Nodes(ctx context.Context, client *kubeclient.Client) ([]kubeclient.Object, error) {
	list, err := client.List(ctx, kubeclient.Ref{APIVersion: "v1", Kind: "Node"}, kubeclient.Selection{})
	nodes := list.Items()
	slices.SortFunc(nodes, func(a, b kubeclient.Object) int { return strings.Compare(a.Name(), b.Name()) })
	return nodes, err
}

// Confirm asks a question. Another answer than yes ends the operation, which is undone.
func Confirm(ctx context.Context, p *operation.Progress, id, text string, timeout time.Duration) error {
	answer, err := p.Ask(ctx, operation.Question{ID: id, Text: text, Options: []string{"yes", "no"}, Timeout: timeout})
	if err == nil && answer != "yes" {
		err = errors.New("it wasn't confirmed")
	}
	return err
}
