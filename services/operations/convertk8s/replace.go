package convertk8s

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/operations/rollout"
)

const (
	// mirror is the annotation of the object that the kubelet makes of a static pod
	// (https://kubernetes.io/docs/reference/labels-annotations-taints/).
	mirror = "kubernetes.io/config.mirror"
	// programLabel is on the pods of a program, self-hosted or static.
	programLabel = "k8s-app"
)

func (o Options) render(ctx context.Context, p *operation.Progress, s survey) error {
	generated := func(typ string, least int) error {
		return rollout.Poll(ctx, p, func(ctx context.Context) error {
			for _, n := range rollout.ControlPlanes(s.Nodes) {
				found, err := o.Peers.Resources(ctx, n.Address, typ, "")
				if err != nil {
					return err
				}
				if len(found) < least {
					return fmt.Errorf("node %s has %d of %s, and not yet %d: gbctl -n %s logs controller-runtime", n.Name, len(found), typ, least, n.Address)
				}
			}
			return nil
		})
	}
	if err := generated(controlplane.StaticPods.Type(), len(programs)); err != nil {
		return err
	}
	p.Report("waiting for manifests to be generated")
	return generated(controlplane.BootstrapManifests.Type(), 1)
}

// saved is the DaemonSet of pod-checkpointer, for the way back.
var saved = operation.Data[kubeclient.Object]{Key: "checkpointer"}

func (j job) disable(ctx context.Context, p *operation.Progress) error {
	p.Report("static pod definitions and bootstrap manifests are generated; check them:")
	p.Report("    gbctl -n ADDRESS get %s", controlplane.StaticPods.Type())
	p.Report("    gbctl -n ADDRESS get %s", controlplane.BootstrapManifests.Type())
	p.Report("pod-checkpointer must be disabled before the self-hosted control plane is removed")
	p.Report("once pod-checkpointer is disabled, the cluster shouldn't be rebooted until the entire conversion process is complete")
	if err := j.confirm(ctx, p, "checkpointer", "confirm disabling pod-checkpointer to proceed with control plane update"); err != nil {
		return err
	}
	return j.Kubernetes.With(func(client *kubeclient.Client) error { return j.awaitDisabled(ctx, p, client) })
}

func (j job) enable(ctx context.Context, p *operation.Progress) error {
	set, err := saved.Get(p)
	if errors.Is(err, operation.ErrNoData) {
		return nil
	} else if err != nil {
		return err
	}
	return j.Kubernetes.Poll(ctx, p, func(ctx context.Context, client *kubeclient.Client) error {
		_, err := client.CreateIfMissing(ctx, set)
		return err
	})
}

// awaitDisabled deletes pod-checkpointer, and waits until its checkpoints are gone. After a reboot
// in between, nothing may start an API server any more: then it doesn't wait for one.
func (j job) awaitDisabled(ctx context.Context, p *operation.Progress, client *kubeclient.Client) error {
	p.Report("deleting daemonset %q", checkpointer)
	checking := sync.OnceFunc(func() { p.Report("checking for active pod checkpoints") })
	var down time.Time
	return rollout.Poll(ctx, p, func(ctx context.Context) error {
		answered, err := j.deleted(ctx, p, client, checking)
		_, begun := saved.Get(p)
		switch {
		case answered || begun != nil:
			down = time.Time{}
		case down.IsZero():
			down = time.Now()
		case time.Since(down) > downTimeout:
			p.Report("no API server has answered for %s, and no checkpoint starts one: only static pods can", downTimeout)
			return nil
		}
		return err
	})
}

// deleted deletes pod-checkpointer, and returns nil if nothing is left of it. answered: the
// API server did.
func (j job) deleted(ctx context.Context, p *operation.Progress, client *kubeclient.Client, checking func()) (answered bool, err error) {
	set, err := client.Get(ctx, daemonSet(checkpointer))
	if err == nil {
		meta := map[string]any{"name": set.Name(), "namespace": set.Namespace(), "labels": set.At("metadata", "labels"), "annotations": set.At("metadata", "annotations")}
		again := kubeclient.Object{"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": meta, "spec": set.At("spec")}
		if err := saved.Put(p, again); err != nil {
			return true, rollout.Lasting{Err: err}
		}
		err = client.Delete(ctx, daemonSet(checkpointer))
	}
	if err != nil && !kubeclient.IsNotFound(err) {
		return errors.As(err, new(*kubeclient.StatusError)), err
	}
	if j.RemoveCheckpoints {
		p.Report("the nodes will remove the active pod checkpoints themselves")
		return true, nil
	}
	checking()
	names, err := checkpoints(ctx, client)
	if err != nil {
		return errors.As(err, new(*kubeclient.StatusError)), err
	}
	if len(names) > 0 {
		return true, fmt.Errorf("found %d active pod checkpoints: %v", len(names), names)
	}
	return true, nil
}

// checkpoints are the names of the pods that pod-checkpointer has made.
func checkpoints(ctx context.Context, client *kubeclient.Client) (names []string, err error) {
	list, err := client.List(ctx, kubeclient.Ref{APIVersion: "v1", Kind: "Pod", Namespace: "kube-system"}, kubeclient.Selection{})
	return lists.Some(list.Items(), func(pod kubeclient.Object) (string, bool) {
		return pod.Name(), pod.At("metadata", "annotations", controlplane.CheckpointOf) != nil
	}), err
}

func (j job) confirmAll(ctx context.Context, p *operation.Progress) error {
	return j.confirm(ctx, p, "apply", "confirm applying static pod definitions and manifests")
}

// removeKey lets the nodes write their static pods.
func (o Options) removeKey(ctx context.Context, p *operation.Progress) error {
	// where only the key is removed, no step has looked
	s, err := seen.Once(p, func() (survey, error) { return o.look(ctx) })
	if err != nil {
		return err
	}
	return rollout.Poll(ctx, p, func(ctx context.Context) error {
		if err := o.RemoveInitialized(ctx); err != nil {
			return err
		}
		for _, n := range rollout.ControlPlanes(s.Nodes) {
			if yes, err := o.selfHosted(ctx, n); err != nil {
				return err
			} else if yes {
				return fmt.Errorf("node %s hasn't noticed yet that the key is gone", n.Name)
			}
		}
		return nil
	})
}

// program replaces the pods of a DaemonSet by static pods, on one node after another.
func (o Options) program(c program) func(context.Context, *operation.Progress, survey) error {
	return func(ctx context.Context, p *operation.Progress, s survey) error {
		nodes := rollout.ControlPlanes(s.Nodes)
		p.Report("deleting daemonset %q", c.name)
		if err := o.Kubernetes.Poll(ctx, p, func(ctx context.Context, client *kubeclient.Client) error {
			// It is still there if no API server answered when it was to be deleted.
			if err := client.Delete(ctx, daemonSet(checkpointer)); err != nil {
				return err
			}
			return orphan(ctx, client, c.name)
		}); err != nil {
			return err
		}
		replace := func(ctx context.Context, p *operation.Progress, n rollout.Node) error { return o.replace(ctx, p, n, c) }
		if err := p.Each(ctx, 1, rollout.Parts(nodes, fmt.Sprintf("replacing %q on node %%q", c.name), nodeTimeout, replace, nil)...); err != nil {
			return err
		}
		p.Report("waiting for static pods for %q to be present in the API server state", c.name)
		if err := o.Kubernetes.Poll(ctx, p, func(ctx context.Context, client *kubeclient.Client) error {
			return present(ctx, client, c, nodes)
		}); err != nil {
			return err
		}
		return rollout.Watch(ctx, o.Peers, nodes, c.name, watched)
	}
}

// orphan deletes a DaemonSet and leaves its pods.
func orphan(ctx context.Context, client *kubeclient.Client, name string) error {
	if err := client.Orphan(ctx, daemonSet(name)); err != nil {
		return err
	}
	_, err := client.Get(ctx, daemonSet(name))
	if err == nil {
		err = fmt.Errorf("daemonset %s isn't gone yet", name)
	}
	return kubeclient.IgnoreNotFound(err)
}

// replace ends the self-hosted pod of a program on a node, and waits for the static one.
func (o Options) replace(ctx context.Context, p *operation.Progress, n rollout.Node, c program) error {
	began := time.Now()
	if err := o.Kubernetes.Poll(ctx, p, func(ctx context.Context, client *kubeclient.Client) error {
		pods, err := podsOf(ctx, client, c, n)
		if err != nil {
			return err
		}
		for _, pod := range pods {
			if pod.At("metadata", "annotations", mirror) != nil {
				continue
			}
			if err := client.Delete(ctx, kubeclient.Ref{APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace(), Name: pod.Name()}); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		return err
	}
	// Restarts don't count: the program may have failed while the other one had its port.
	if err := rollout.Poll(ctx, p, func(ctx context.Context) error { return rollout.Healthy(ctx, o.Peers, n, c.name) }); err != nil {
		return err
	}
	p.Report("healthy as a static pod after %.1f s", time.Since(began).Seconds())
	return nil
}

// podsOf are the pods of a program on a node.
func podsOf(ctx context.Context, client *kubeclient.Client, c program, n rollout.Node) ([]kubeclient.Object, error) {
	list, err := client.List(ctx, kubeclient.Ref{APIVersion: "v1", Kind: "Pod", Namespace: "kube-system"},
		kubeclient.Selection{Labels: programLabel + "=" + c.name, Fields: "spec.nodeName=" + n.Name})
	return list.Items(), err
}

// present returns nil if Kubernetes has the static pod of each node, and nothing else of the
// program.
func present(ctx context.Context, client *kubeclient.Client, c program, nodes []rollout.Node) error {
	for _, n := range nodes {
		pods, err := podsOf(ctx, client, c, n)
		if err != nil {
			return err
		}
		for _, pod := range pods {
			if pod.At("metadata", "annotations", mirror) == nil {
				return fmt.Errorf("pod %s is still there", pod.Name())
			}
		}
		if len(pods) != 1 {
			return fmt.Errorf("node %s has %d static pods of %s", n.Name, len(pods), c.name)
		}
	}
	return nil
}

func (o Options) verify(ctx context.Context, p *operation.Progress, s survey) error {
	return o.Kubernetes.Poll(ctx, p, func(ctx context.Context, client *kubeclient.Client) error {
		for _, n := range rollout.ControlPlanes(s.Nodes) {
			for _, c := range programs {
				if err := rollout.Healthy(ctx, o.Peers, n, c.name); err != nil {
					return fmt.Errorf("node %s: %w", n.Name, err)
				}
			}
			if err := rollout.Serves(ctx, p, o.Peers, n); err != nil {
				return err
			}
		}
		if err := client.Delete(ctx, newSecret); err != nil {
			return err
		}
		p.Report("conversion process completed successfully")
		for _, line := range s.Servers {
			p.Report("%s", line)
		}
		return nil
	})
}
