package rollout

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"connectrpc.com/connect"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/kubelet"
)

// excused has the faults of before the operation, by node: the objects that they are of.
var excused = operation.Data[map[string][]string]{Key: "excused"}

// Excuse records what keeps Kubernetes from serving on the nodes before the first change: that isn't the operation's
// fault.
func Excuse(ctx context.Context, p *operation.Progress, peers Peers, nodes []Node) error {
	before := map[string][]string{}
	for _, n := range nodes {
		var health kubelet.NodeHealth
		if err := Poll(ctx, p, func(ctx context.Context) (err error) { health, err = healthOf(ctx, peers, n); return err }); err != nil {
			return err
		}
		for _, f := range health.Faults {
			before[n.Name] = append(before[n.Name], f.Object)
			p.Report("node %s: before the operation, and excused: %s", n.Name, f.Text)
		}
	}
	return excused.Put(p, before)
}

// Serves says why Kubernetes doesn't serve on a node as it did before the operation.
func Serves(ctx context.Context, p *operation.Progress, peers Peers, n Node) error {
	before, _ := excused.Get(p) // without it, nothing is excused
	health, err := healthOf(ctx, peers, n)
	health.Faults = slices.DeleteFunc(health.Faults, func(f kubelet.Fault) bool { return slices.Contains(before[n.Name], f.Object) })
	if err == nil && len(health.Faults) > 0 {
		err = fmt.Errorf("node %s: %s", n.Name, health.Faults)
	}
	return err
}

// serveTimeout is how long a node whose turn it is, or was, may take until Kubernetes serves on it: an emulated machine
// needs minutes after a restart, and what a kubelet reports is of this boot by then.
const serveTimeout = 5 * time.Minute

// AwaitServes waits until Kubernetes serves on the nodes as it did before the operation.
func AwaitServes(ctx context.Context, p *operation.Progress, peers Peers, nodes ...Node) error {
	for _, n := range nodes {
		err := awaitServes(ctx, p, n, func(ctx context.Context) error { return cmp.Or(Serves(ctx, p, peers, n), Runs(ctx, peers, n)) })
		if err != nil {
			return err
		}
	}
	return nil
}

// AwaitReady waits until Kubernetes has a node as Ready, if it had before the operation. What the node itself knows of
// that may be from before a change of its kubelet.
func (k Kubernetes) AwaitReady(ctx context.Context, p *operation.Progress, n Node) error {
	if before, _ := excused.Get(p); slices.Contains(before[n.Name], kubelet.NodeObject) {
		return nil
	}
	return k.With(func(client *kubeclient.Client) error {
		return awaitServes(ctx, p, n, func(ctx context.Context) error {
			node, err := client.Get(ctx, kubeclient.NodeRef(n.Name))
			if err == nil {
				err = Ready(node)
			}
			return err
		})
	})
}

func awaitServes(ctx context.Context, p *operation.Progress, n Node, look func(context.Context) error) error {
	within, cancel := context.WithTimeoutCause(ctx, serveTimeout, fmt.Errorf(
		"kubernetes hasn't served on node %s for %s; gbctl -n %s doctor tells the cause, and once it is mended, the same command goes on", n.Name, serveTimeout, n.Address))
	defer cancel()
	return Poll(within, p, look)
}

// Serving changes a node only where Kubernetes serves as it did before the operation, and then waits until it does so
// again.
func Serving(peers Peers, change OnNode) OnNode {
	return func(ctx context.Context, p *operation.Progress, n Node) error {
		err := AwaitServes(ctx, p, peers, n)
		if err == nil {
			err = change(ctx, p, n)
		}
		if err == nil {
			err = AwaitServes(ctx, p, peers, n)
		}
		return err
	}
}

// Runs says which service that Kubernetes runs on isn't up on a node: Kubernetes itself notices it after up to a
// minute. A control plane has more services that must be up.
func Runs(ctx context.Context, peers Peers, n Node, more ...string) error {
	services, err := peers.Services(ctx, n.Address)
	problems := lists.Some(services, func(s *apiv1.Service) (error, bool) {
		everywhere := slices.Contains([]string{containerd.ID, kubelet.ID}, s.GetId())
		needed := everywhere || n.ControlPlane && (s.GetId() == etcd.ID || slices.Contains(more, s.GetId()))
		return fmt.Errorf("service %s isn't up: %s", s.GetId(), cmp.Or(s.GetWaitingFor(), s.GetMessage(), s.GetState())), needed && !s.GetUp()
	})
	return errors.Join(append(problems, err)...)
}

// Ready says why Kubernetes has a node as not Ready, and what tells more.
func Ready(o kubeclient.Object) error {
	if c := o.ConditionOf("Ready"); c.Text("status") != "True" {
		return fmt.Errorf("node %s is NotReady: %s: gbctl -n %s doctor", o.Name(), cmp.Or(c.Text("message"), c.Text("reason"), "its kubelet hasn't reported"), NodeOf(o).Address)
	}
	return nil
}

// healthOf is what a node itself knows of how Kubernetes sees it. One of an earlier release knows nothing.
func healthOf(ctx context.Context, peers Peers, n Node) (health kubelet.NodeHealth, err error) {
	found, err := Specs[kubelet.NodeHealth](peers.Resources(ctx, n.Address, kubelet.NodeHealths.Type(), ""))
	health, asked := found[kubelet.HealthID]
	if connect.CodeOf(err) == connect.CodeNotFound {
		return health, nil
	} else if err == nil && !asked {
		err = fmt.Errorf("node %s hasn't asked Kubernetes yet how it is", n.Name)
	}
	return health, err
}
