package kubeclient

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/services/core/sleep"
)

const (
	// cordonedBy is the annotation that tells which operation has cordoned a node: it is
	// uncordoned by nobody else, but for one that comes after it.
	cordonedBy = "garboard.dev/cordoned-by"
	// conflicts is how often a change is made anew of an object that somebody else has
	// changed meanwhile: the kubelet writes its node every few seconds.
	conflicts = 5

	// drainPoll is how often a node's pods are looked at: fast enough that a node with
	// quick pods is empty within seconds, and nothing to an API server.
	drainPoll = time.Second
	// evictFirst and evictMost are the pauses before a pod that its disruption budget
	// keeps is tried again: others must become ready elsewhere first.
	evictFirst = time.Second
	evictMost  = 10 * time.Second
)

// NodeRef names a node.
func NodeRef(name string) Ref { return Ref{APIVersion: "v1", Kind: "Node", Name: name} }

// Cordon keeps new pods from a node. It returns whether by is to uncordon it: one that
// people have cordoned before stays so. What an operation has left is taken over: a node
// runs one at a time, so that one has ended, and couldn't.
func (c *Client) Cordon(ctx context.Context, node, by string) (did bool, err error) {
	err = c.changeNode(ctx, node, func(n Object) Object {
		owner := n.Text("metadata", "annotations", cordonedBy)
		if n.At("spec", "unschedulable") == true && (owner == "" || owner == by) {
			did = owner == by
			return nil
		}
		did = true
		return Object{
			"metadata": map[string]any{"annotations": map[string]any{cordonedBy: by}},
			"spec":     map[string]any{"unschedulable": true},
		}
	})
	return did && err == nil, err
}

// Uncordon undoes what Cordon has done for by, and nothing else.
func (c *Client) Uncordon(ctx context.Context, node, by string) (did bool, err error) {
	err = c.changeNode(ctx, node, func(n Object) Object {
		if did = n.Text("metadata", "annotations", cordonedBy) == by; !did {
			return nil
		}
		return Object{
			"metadata": map[string]any{"annotations": map[string]any{cordonedBy: nil}},
			"spec":     map[string]any{"unschedulable": nil},
		}
	})
	return did && err == nil, err
}

// Leaving is the annotation with which a node asks to be deleted: it mustn't do that
// itself, as it could come back without the taints that others have given it.
const Leaving = "garboard.dev/leaving"

// Proofs of a machine (pki.Proof), and what they are for: JoinProof is an annotation of a
// request for a certificate, about the request; leavingProof is beside Leaving, about the UID
// of the Node.
const (
	JoinProof    = "garboard.dev/proof"
	JoinPurpose  = "client certificate of a kubelet"
	LeavingProof = "garboard.dev/leaving-proof"
	LeavePurpose = "end of a node"
)

// leavingPoll is how often a node looks whether it was deleted.
const leavingPoll = 500 * time.Millisecond

// AskToLeave asks for the end of a node, as that node, and returns once it is gone. prove
// makes the proof that the machine asks.
func (c *Client) AskToLeave(ctx context.Context, node, by string, prove func(message []byte) ([]byte, error)) error {
	var unproven error
	err := c.changeNode(ctx, node, func(n Object) Object {
		if n.Text("metadata", "annotations", Leaving) == by {
			return nil
		}
		var proof []byte
		if proof, unproven = prove([]byte(n.Text("metadata", "uid"))); unproven != nil {
			return nil
		}
		return Object{"metadata": map[string]any{"annotations": map[string]any{Leaving: by, LeavingProof: string(proof)}}}
	})
	err = errors.Join(err, unproven)
	for err == nil {
		if !sleep.For(ctx, leavingPoll) {
			return fmt.Errorf("wait for a control plane to delete node %s: %w; `kubectl delete node %s` does it by hand", node, ctx.Err(), node)
		}
		_, err = c.Get(ctx, NodeRef(node))
	}
	return IgnoreNotFound(err)
}

// Stay takes back what AskToLeave has asked for by.
func (c *Client) Stay(ctx context.Context, node, by string) error {
	err := c.changeNode(ctx, node, func(n Object) Object {
		if n.Text("metadata", "annotations", Leaving) != by {
			return nil
		}
		return Object{"metadata": map[string]any{"annotations": map[string]any{Leaving: nil, LeavingProof: nil}}}
	})
	return IgnoreNotFound(err)
}

// changeNode patches a node as it is read; a nil patch changes nothing.
func (c *Client) changeNode(ctx context.Context, node string, patch func(Object) Object) error {
	for try := 1; ; try++ {
		n, err := c.Get(ctx, NodeRef(node))
		if err != nil {
			return err
		}
		p := patch(n)
		if p == nil {
			return nil
		}
		p["metadata"].(map[string]any)["resourceVersion"] = n.ResourceVersion()
		if _, err = c.Merge(ctx, NodeRef(node), p); !IsConflict(err) || try == conflicts {
			return err
		}
	}
}

// Drain is how a node is emptied of its pods.
type Drain struct {
	Client *Client
	Node   string
	// Keep leaves pods that nobody would make anew elsewhere: they start again with
	// the node.
	Keep bool
	// Report reports each change: the pods that the drain waits for, and the reason.
	Report func(format string, args ...any)
}

// Left is what a drain ends with whose time is up.
type Left struct {
	Node string
	Pods []string // each with its reason
	Err  error    // why the pods couldn't be asked for; nil if they could
}

func (e *Left) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("drain node %s: %v", e.Node, e.Err)
	}
	return fmt.Sprintf("drain node %s: left are %s", e.Node, strings.Join(e.Pods, "; "))
}

func (e *Left) Unwrap() error { return e.Err }

// Run evicts the node's pods, within their disruption budgets, and returns when they
// have ended, each within its own grace period; of those that have finished, Kubernetes
// asks neither. Those of DaemonSets and of the node's files stay: they would come again.
// Until ctx ends it tries again whatever goes wrong; then it is a *Left.
func (d Drain) Run(ctx context.Context) error {
	tries := map[string]*eviction{} // by UID
	reported, last := "", &Left{Node: d.Node}
	for range sleep.Every(ctx, drainPoll) {
		left, err := d.round(ctx, tries)
		switch {
		case err == nil && len(left) == 0:
			return nil
		case err == nil:
			last.Pods, last.Err = left, nil
		case ctx.Err() == nil:
			last.Err = err
		case last.Err == nil && len(last.Pods) == 0: // the first question wasn't answered in time
			last.Err = err
		}
		if text := last.now(); text != reported && ctx.Err() == nil {
			reported = text
			d.Report("%s", text)
		}
	}
	return last
}

// now is what a drain that goes on waits for.
func (e *Left) now() string {
	if e.Err != nil {
		return fmt.Sprintf("trying again: %v", e.Err)
	}
	return "waiting for the end of " + strings.Join(e.Pods, "; ")
}

// eviction is the story of one pod.
type eviction struct {
	next  time.Time // not before
	pause time.Duration
	why   string // of the last refusal
}

// round looks at the pods once and evicts those whose time has come. It returns those
// that are still there.
func (d Drain) round(ctx context.Context, tries map[string]*eviction) (left []string, err error) {
	list, err := d.Client.List(ctx, Ref{APIVersion: "v1", Kind: "Pod"}, Selection{Fields: "spec.nodeName=" + d.Node})
	for _, pod := range list.Items() {
		if stays(pod) || d.Keep && !controlled(pod) {
			continue
		}
		why := ""
		if uid := pod.Text("metadata", "uid"); pod.Text("metadata", "deletionTimestamp") == "" {
			if tries[uid] == nil {
				tries[uid] = &eviction{pause: evictFirst}
			}
			why = d.evict(ctx, pod, tries[uid])
		}
		left = append(left, fmt.Sprintf("%s/%s (%s)", pod.Namespace(), pod.Name(), cmp.Or(why, "is ending")))
	}
	slices.Sort(left)
	return left, err
}

// evict asks for the end of a pod, unless it was refused a moment ago, and returns
// what keeps the pod.
func (d Drain) evict(ctx context.Context, pod Object, e *eviction) (why string) {
	if time.Now().Before(e.next) {
		return e.why
	}
	err := d.Client.Evict(ctx, pod)
	if err == nil {
		e.why, e.pause = "", evictFirst
		return ""
	}
	e.next = time.Now().Add(e.pause)
	e.pause = sleep.Longer(e.pause, evictFirst, evictMost)
	e.why = err.Error()
	if status, ok := errors.AsType[*StatusError](err); ok {
		e.why = strings.Join(slices.Concat([]string{status.Message}, status.Causes), " ")
	}
	return e.why
}

// stays: pods that come again as soon as they are gone. The kubelet runs the mirrored
// ones from files, and a DaemonSet minds no cordon.
func stays(pod Object) bool {
	if pod.Text("metadata", "annotations", "kubernetes.io/config.mirror") != "" {
		return true
	}
	return slices.ContainsFunc(pod.List("metadata", "ownerReferences"), func(o Object) bool {
		return o["controller"] == true && o.Kind() == "DaemonSet"
	})
}

// controlled: somebody makes another pod in its place.
func controlled(pod Object) bool {
	return slices.ContainsFunc(pod.List("metadata", "ownerReferences"), func(o Object) bool { return o["controller"] == true })
}
