// Package readdress is the operation readdress: a control plane gets another address. It runs on the node itself.
//
//	move: try the configuration ─▶ wait for the address ─▶ tell etcd ─▶ wait for all programs ─▶ ask from outside ─▶ keep
//
// The configuration is tried, so it comes back when the node restarts or nobody reaches the node at its new address.
// Etcd's list of members is only changed here: an address that changes by itself, such as one of DHCP, may be wrong.
// That is done once the member runs at its new address. It has connected to all others then, and they needn't connect
// to it; before, they may need to, as connections to an address that is gone last for two minutes. All else follows the
// address by itself: certificates, etcd, the kubelet, the static pods.
package readdress

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"time"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/merge"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/operations/rollout"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
)

// Name of the operation.
const Name = "readdress"

// ReachQuestion is the question that whoever reaches the node at its new address answers with yes.
const ReachQuestion = "reach"

const (
	agentsTimeout = 2 * time.Minute
	// moveTimeout is for a small machine, on which an API server takes a minute or two to start.
	moveTimeout = 10 * time.Minute
	// reachTimeout is for who looks why the node isn't reached.
	reachTimeout = 5 * time.Minute
)

// Etcd is the part of etcd.Etcd that is used.
type Etcd interface {
	MayStop(ctx context.Context, patience time.Duration) error
	MayMove(ctx context.Context, to netip.Addr) (others int, err error)
	Move(ctx context.Context, to netip.Addr) error
	ForfeitLeadership(ctx context.Context) (leader string, was bool, err error)
}

// Options are what the operation stands on.
type Options struct {
	Store         resource.Reader
	Configuration *configuration.Applier
	Etcd          Etcd
	Peers         rollout.Peers
	Kubernetes    rollout.Kubernetes
}

// Definition of the operation.
func Definition(o Options) operation.Definition {
	return operation.Planned(operation.Definition{Name: Name, Exclusive: true}, o.job, job.plan, job.steps)
}

// job is a change that was asked for.
type job struct {
	Options
	*apiv1.ReaddressRequest
	to netip.Addr
	by string
}

func (o Options) job(r operation.Request) (job, error) {
	a, err := operation.Decode[apiv1.ReaddressRequest](r, nil)
	to, bad := netip.ParseAddr(a.Address)
	err = cmp.Or(err, bad)
	if redacted, rerr := config.Redact([]byte(a.Patch)); err == nil && a.Patch != "" && (rerr != nil || string(redacted) != a.Patch) {
		err = errors.New("the patch can't be read, or has secrets: apply those before")
	}
	return job{o, a, to, r.By}, err
}

func (j job) plan(ctx context.Context) (warnings []string, err error) {
	former, none := j.address()
	if err = cmp.Or(none, j.Peers.Check()); err != nil { // a worker needs no operation
		return nil, err
	}
	text, err := j.target(former)
	if err != nil {
		return nil, err
	}
	would, err := j.Configuration.Apply(ctx, configuration.Request{Text: text, Mode: configuration.Try, TryTimeout: configuration.MaxTryTimeout, DryRun: true, By: j.by})
	if err == nil && would.Rebooting {
		err = errors.New("the patch has a change that takes a reboot: apply it before, or after")
	}
	_, mayNot := j.Etcd.MayMove(ctx, j.to)
	err = cmp.Or(err, mayNot, j.Etcd.MayStop(ctx, 0))
	warnings = append(lists.Of(would.Changes, config.Change.String),
		"the API server of this node restarts at the new address, and doesn't answer for about half a minute; pods go on, and connections to the former address end",
		fmt.Sprintf("the node gets its former address and configuration back if it doesn't serve at %s within %s, if then nobody reaches it there for %s, and if it restarts meanwhile", j.to, moveTimeout, reachTimeout),
		"kubeconfigs, contexts of gbctl, DNS and load balancers with the former address need the new one")
	return warnings, err
}

func (o Options) address() (netip.Addr, error) {
	a, err := network.Addresses.Get(o.Store, network.AddressID)
	return a.Spec.Primary, err
}

// tokens are what looks like an address of IPv4, and of IPv6.
var tokens = map[bool]*regexp.Regexp{true: regexp.MustCompile(`[0-9.]+`), false: regexp.MustCompile(`[0-9A-Fa-f:.]+`)}

// target is the configuration with the new address in place of the former one wherever it is, and with the patch.
func (j job) target(former netip.Addr) ([]byte, error) {
	text, err := j.Configuration.Text(0)
	if err != nil {
		return nil, err
	}
	text = tokens[former.Is4()].ReplaceAllFunc(text, func(token []byte) []byte {
		if string(token) == former.String() {
			return []byte(j.to.String())
		}
		return token
	})
	if j.Patch == "" {
		return text, nil
	}
	return merge.Apply(text, []byte(j.Patch))
}

// formerly is the address that the node had.
var formerly = operation.Data[netip.Addr]{Key: "former"}

func (j job) steps() []operation.Step {
	return []operation.Step{
		{ID: "move", What: "try the new address, until the node is healthy and was reached there", Deadline: moveTimeout,
			Run: j.move, Undo: formerly.Then(j.back)},
		{ID: "agents", What: "restart pods that know the node's address from their start", Deadline: agentsTimeout, Optional: true, PointOfNoReturn: true, Run: j.renew},
	}
}

func (j job) move(ctx context.Context, p *operation.Progress) error {
	former, err := formerly.Once(p, j.address)
	if err != nil {
		return err
	}
	if others, err := j.Etcd.MayMove(ctx, j.to); err == nil && others > 0 {
		_, _, _ = j.Etcd.ForfeitLeadership(ctx) // else the others elect another leader a second later
	}
	if err := rollout.Poll(ctx, p, func(ctx context.Context) error {
		return cmp.Or(j.try(ctx, former), j.healthy(ctx, former))
	}); err != nil || j.Configuration.Situation().Try.IsZero() { // nothing is tried: the address came by itself
		return err
	}
	if _, err := p.Ask(ctx, operation.Question{ID: ReachQuestion, Text: fmt.Sprintf("answer yes at %s, and the node keeps this address", j.to), Options: []string{"yes"}, Timeout: reachTimeout}); err != nil {
		return err
	}
	return j.Configuration.Confirm(ctx, j.by)
}

// try has the node try the configuration, unless it does already.
func (j job) try(ctx context.Context, former netip.Addr) error {
	now, err := j.Configuration.Text(0)
	text, bad := j.target(former)
	if err = cmp.Or(err, bad); err != nil || bytes.Equal(text, now) {
		return err
	}
	_, err = j.Configuration.Apply(ctx, configuration.Request{Text: text, Mode: configuration.Try, TryTimeout: configuration.MaxTryTimeout, By: j.by, Base: configuration.Digest(now)})
	return err
}

func (j job) isAt(addr netip.Addr) error {
	if now, err := j.address(); err != nil || now != addr {
		return cmp.Or(err, fmt.Errorf("the node's address is %s still, not %s: gbctl get addresses", now, addr))
	}
	return nil
}

// healthy says what doesn't serve at the new address yet.
func (j job) healthy(ctx context.Context, former netip.Addr) error {
	if err := j.isAt(j.to); err != nil {
		return err
	}
	if err := j.Etcd.Move(ctx, j.to); err != nil { // it answers at its address
		return err
	}
	return j.Kubernetes.Node(j.Store, func(client *kubeclient.Client, name string) error {
		for _, program := range controlplane.Programs {
			if err := rollout.Healthy(ctx, j.Peers, rollout.Node{Name: name, Address: j.to}, program); err != nil {
				return err
			}
		}
		node, err := client.Get(ctx, kubeclient.NodeRef(name))
		if err != nil {
			return err
		}
		if has := rollout.NodeOf(node); has.Address != j.to || !node.Condition("Ready") {
			return fmt.Errorf("the Node %s has the address %s, or isn't Ready", name, has.Address)
		}
		service, err := client.Raw(ctx, "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes")
		if err != nil {
			return err
		}
		all := fmt.Sprintf("%q", service.At("endpoints"))
		if has := func(a netip.Addr) bool { return strings.Contains(all, strconv.Quote(a.String())) }; !has(j.to) || former != j.to && has(former) {
			return fmt.Errorf("the Service kubernetes leads to %s", all)
		}
		return nil
	})
}

// renew deletes the pods of DaemonSets of the cluster itself that have the node's network, such as flannel's, which
// tells other nodes the address that it had at its start. They are made again at once.
func (j job) renew(ctx context.Context, p *operation.Progress) error {
	return rollout.Poll(ctx, p, func(ctx context.Context) error {
		return j.Kubernetes.Node(j.Store, func(client *kubeclient.Client, name string) error {
			pods, err := client.List(ctx, kubeclient.Ref{APIVersion: "v1", Kind: "Pod", Namespace: "kube-system"}, kubeclient.Selection{Fields: "spec.hostNetwork=true,spec.nodeName=" + name})
			for _, pod := range pods.Items() {
				if pod.At("metadata", "ownerReferences") != nil && pod.List("metadata", "ownerReferences")[0].Text("kind") == "DaemonSet" {
					err = cmp.Or(err, kubeclient.IgnoreNotFound(client.Delete(ctx, kubeclient.Ref{APIVersion: "v1", Kind: "Pod", Namespace: "kube-system", Name: pod.Name()})))
				}
			}
			return err
		})
	})
}

// back undoes the trial, if it is still this one, and tells etcd the address that the node has then.
func (j job) back(ctx context.Context, p *operation.Progress, former netip.Addr) error {
	now, err := j.Configuration.Text(0)
	text, bad := j.target(former)
	tried := !j.Configuration.Situation().Try.IsZero() && bytes.Equal(text, now)
	if err = cmp.Or(err, bad); err == nil && tried {
		_, err = j.Configuration.Rollback(ctx, 0, configuration.Request{By: j.by})
	}
	if err != nil {
		return err
	}
	if err := rollout.Poll(ctx, p, func(ctx context.Context) error {
		at, err := j.address()
		if err == nil && tried {
			at, err = former, j.isAt(former)
		}
		if err == nil {
			err = j.Etcd.Move(ctx, at)
		}
		return err
	}); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, agentsTimeout)
	defer cancel()
	if err := j.renew(ctx, p); err != nil {
		p.Report("pods that know the node's address from their start weren't restarted: %v", err)
	}
	return nil
}
