package upgradek8s

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/mod/semver"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/operations/rollout"
)

const (
	// drainTimeout is how long the pods of a node may take to end. Those that are left then
	// stay: a kubelet of another minor version restarts some of them
	// (https://kubernetes.io/releases/version-skew-policy/#kubelet).
	drainTimeout = 5 * time.Minute
	// undrainTimeout bounds the end of the cordon.
	undrainTimeout = time.Minute
)

// kubelets are the parts that change one kubelet after another.
func (j job) kubelets(nodes []rollout.Node) []operation.Part {
	to := func(version string) rollout.OnNode {
		return func(ctx context.Context, p *operation.Progress, n rollout.Node) error {
			return j.setKubelet(ctx, p, n, version, j.id)
		}
	}
	forward := func(ctx context.Context, p *operation.Progress, n rollout.Node) error {
		err := to(j.a.To)(ctx, p, n)
		if err == nil {
			err = j.Kubernetes.AwaitReady(ctx, p, n)
		}
		return err
	}
	return rollout.Parts(nodes, "updating node %q", kubeletTimeout, rollout.Serving(j.Peers, forward), to(j.a.From))
}

// setKubelet gives the kubelet of a node its version. Where the minor version changes and
// another node can take its pods, the node is drained.
func (o Options) setKubelet(ctx context.Context, p *operation.Progress, n rollout.Node, version, by string) error {
	return o.Kubernetes.With(func(client *kubeclient.Client) error {
		now, others := "", false
		look := func(ctx context.Context) (err error) { now, others, err = kubeletNow(ctx, client, n.Name); return err }
		if err := rollout.Poll(ctx, p, look); err != nil {
			return err
		}
		drained := false
		if now != version && others && semver.MajorMinor(now) != semver.MajorMinor(version) {
			if err := o.drain(ctx, p, client, n, by); err != nil {
				return err
			}
			drained = true
		}
		_, _, err := o.setImage(ctx, p, n, kubelet, version)
		if err == nil {
			err = o.awaitKubelet(ctx, p, client, n, version)
		}
		// After a restart of this node, an earlier attempt may have left the cordon.
		err = errors.Join(err, o.uncordon(ctx, p, client, n, by))
		if err == nil && !drained && now != version {
			p.Report("has version %s; its pods went on", version)
		}
		return err
	})
}

// kubeletNow is the version of a node's kubelet, and whether another node takes pods.
func kubeletNow(ctx context.Context, client *kubeclient.Client, name string) (version string, others bool, err error) {
	nodes, err := rollout.Nodes(ctx, client)
	if err != nil {
		return "", false, err
	}
	for _, n := range nodes {
		if n.Name() == name {
			version = n.Text("status", "nodeInfo", "kubeletVersion")
			continue
		}
		tainted := slices.ContainsFunc(n.List("spec", "taints"), func(t kubeclient.Object) bool { return t["effect"] == "NoSchedule" || t["effect"] == "NoExecute" })
		others = others || n.Condition("Ready") && n.At("spec", "unschedulable") != true && !tainted
	}
	if version == "" {
		return "", false, fmt.Errorf("kubernetes has no version of the kubelet of node %s", name)
	}
	return version, others, nil
}

func (o Options) drain(ctx context.Context, p *operation.Progress, client *kubeclient.Client, n rollout.Node, by string) error {
	if err := rollout.Poll(ctx, p, func(ctx context.Context) error { _, err := client.Cordon(ctx, n.Name, by); return err }); err != nil {
		return err
	}
	within, cancel := context.WithTimeout(ctx, drainTimeout)
	defer cancel()
	err := kubeclient.Drain{Client: client, Node: n.Name, Keep: true, Report: p.Report}.Run(within)
	if err != nil && ctx.Err() == nil {
		p.Report("goes on after %s: %v", drainTimeout, err)
		return nil
	}
	return err
}

// uncordon also runs where the change of the kubelet was aborted.
func (o Options) uncordon(ctx context.Context, p *operation.Progress, client *kubeclient.Client, n rollout.Node, by string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undrainTimeout)
	defer cancel()
	return rollout.Poll(ctx, p, func(ctx context.Context) error { _, err := client.Uncordon(ctx, n.Name, by); return err })
}

func (o Options) awaitKubelet(ctx context.Context, p *operation.Progress, client *kubeclient.Client, n rollout.Node, version string) error {
	return rollout.Poll(ctx, p, func(ctx context.Context) error {
		services, err := o.Peers.Services(ctx, n.Address)
		if err != nil {
			return err
		}
		s := append(slices.DeleteFunc(services, func(s *apiv1.Service) bool { return s.GetId() != kubelet.name }), nil)[0]
		if !s.GetUp() {
			return fmt.Errorf("service kubelet isn't up: %s", s.GetMessage())
		}
		now, err := client.Get(ctx, kubeclient.NodeRef(n.Name))
		switch {
		case err != nil:
			return err
		case now.Text("status", "nodeInfo", "kubeletVersion") != version:
			return errors.New(strings.TrimSpace(fmt.Sprintf("its kubelet has version %s %s", now.Text("status", "nodeInfo", "kubeletVersion"), s.GetWaitingFor())))
		case n.ControlPlane: // the kubelet probes its pods again
			return errors.Join(o.unhealthy(ctx, n)...)
		}
		return nil
	})
}
