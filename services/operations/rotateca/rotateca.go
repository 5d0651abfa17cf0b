// Package rotateca is the operation rotate-ca: it replaces the authorities of a running
// cluster, the keys of service accounts and of Secrets in etcd, and the tokens with which nodes join.
//
//	preflight ─▶ accept ─▶ issue ─▶ encrypt ─▶ kubelets ─▶ workloads ─▶ tokens ─▶ confirm ═▶ drop ═▶ join ═▶ verify
//
// accept makes all nodes accept the new authorities beside the old ones. Then, in issue and
// kubelets, all certificates are issued again. Servers also show the new authority as signed
// by the old one, so clients that know only that one go on until drop. Up to confirm,
// everything can be undone.
//
// The record has no secrets. The new authorities are with their keys in the configurations of
// all control planes, first in that of the coordinator, and after issue the old ones are:
// another control plane can take over in both directions.
package rotateca

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/operations/rollout"
	"github.com/garboard-os/garboard/services/system/configuration"
)

// Name of the operation.
const Name = "rotate-ca"

const (
	// nodeTimeout bounds what is done on one node, and allTimeout on all.
	nodeTimeout = 15 * time.Minute
	allTimeout  = 3 * time.Hour
	// questionTimeout is for all who have credentials to get new ones.
	questionTimeout = 24 * time.Hour
	// tokenLife is longer than the tokens that kubelets get for pods are used: an hour and
	// seven seconds (https://kubernetes.io/docs/concepts/storage/projected-volumes/).
	tokenLife = 65 * time.Minute
	// tokenAgain is enough where the kubelets were restarted: they get all tokens again within
	// two minutes, and clients read the file each minute.
	tokenAgain = 4 * time.Minute
)

// names are all that can be replaced, in the order of the patches.
var names = []string{config.EtcdAuthority, config.AggregatorAuthority, config.KubernetesAuthority, config.ServiceAccountKey, config.AtRestKey, config.MachineAuthority, JoinTokens}

// JoinTokens is the name of cluster.token and machine.token, which end without another being accepted beside them.
const JoinTokens = "join-tokens"

// Options are what the operation stands on.
type Options struct {
	Store      resource.Reader
	Peers      rollout.Peers
	Kubernetes rollout.Kubernetes
	// AcceptedBy asks the server of an authority on a node with a client certificate of that
	// authority, by its name. An error means that it isn't accepted.
	AcceptedBy map[string]func(ctx context.Context, node netip.Addr, ca config.CertKey) error
	// IssuedBy is the function of that name.
	IssuedBy func(ctx context.Context, server netip.AddrPort, authority config.PEM) error
}

// Definition of the operation.
func Definition(o Options) operation.Definition {
	d := operation.Definition{Name: Name, Exclusive: true, Shared: true}
	return operation.Planned(d, o.job, job.plan, job.steps)
}

// job is a rotation that was asked for.
type job struct {
	Options
	id     string
	chosen []string      // authorities and keys, in the order of names
	joins  bool          // the tokens are replaced, too
	wait   time.Duration // until all pods have tokens of the new key
}

func (o Options) job(r operation.Request) (j job, err error) {
	a, err := operation.Decode[apiv1.RotateCARequest](r, nil)
	for _, name := range a.Authorities {
		if !slices.Contains(names, name) {
			return j, fmt.Errorf("there is no authority %q; there are %v", name, names)
		}
	}
	j = job{Options: o, id: r.ID, chosen: slices.Clone(names), wait: tokenLife}
	if len(a.Authorities) > 0 {
		j.chosen = slices.DeleteFunc(j.chosen, func(name string) bool { return !slices.Contains(a.Authorities, name) })
	}
	j.joins = slices.Contains(j.chosen, JoinTokens)
	j.chosen = slices.DeleteFunc(j.chosen, func(name string) bool { return name == JoinTokens })
	return j, err
}

func (j job) plan(ctx context.Context) (warnings []string, err error) {
	_, warnings, err = j.look(ctx, j.chosen)
	return warnings, err
}

func (j job) steps() []operation.Step {
	// Kubelets come last: by then each API server signs tokens with the new key.
	isLast := func(name string) bool { return name == config.KubernetesAuthority }
	kubelets, issue, issueLast := slices.ContainsFunc(j.chosen, isLast), j, j
	issue.chosen, issueLast.chosen = slices.DeleteFunc(slices.Clone(j.chosen), isLast), []string{config.KubernetesAuthority}
	if kubelets {
		j.wait = tokenAgain
	}
	encrypts, tokens := slices.Contains(j.chosen, config.AtRestKey), slices.Contains(j.chosen, config.ServiceAccountKey)
	return []operation.Step{
		{ID: "preflight", What: "check that all nodes are healthy and have the same authorities",
			Deadline: nodeTimeout, Run: j.preflight}, // a restart may have come between
		{ID: "accept", What: "accept the new authorities on one node after another", Deadline: allTimeout,
			Run: j.accept, Undo: j.unaccept},
		{ID: "issue", What: "issue certificates again", Deadline: allTimeout, Omit: len(issue.chosen) == 0,
			Run: rotating.Then(issue.issue), Undo: rotating.Then(issue.unissue)},
		// Once all API servers write with the new key. Undoing accept is its undo.
		{ID: "encrypt", What: "encrypt all Secrets in etcd again", Deadline: allTimeout, Omit: !encrypts,
			Run: j.encrypt},
		{ID: "kubelets", What: "issue the certificates of Kubernetes again, with those of the kubelets", Omit: !kubelets,
			Deadline: allTimeout, Run: rotating.Then(issueLast.issue), Undo: rotating.Then(issueLast.unissue)},
		{ID: "workloads", What: "restart kube-proxy, the pod network and the cluster DNS", Omit: !kubelets,
			Deadline: allTimeout, Run: rotating.Then(j.workloads)},
		{ID: "tokens", What: fmt.Sprintf("wait %s until all pods have tokens of the new key", j.wait), Omit: !tokens,
			Deadline: 2 * tokenLife, Run: issued.Then(j.awaitTokens)},
		{ID: "confirm", What: "ask before the point of no return, after which nothing is undone",
			Deadline: time.Minute, Run: rotating.Then(j.confirm)},
		rotating.InParts(operation.Step{ID: "drop", What: "end the old authorities on one node after another", PointOfNoReturn: true,
			Deadline: allTimeout}, func(r rotation) []operation.Part { return j.parts(r, dropped, dropped) }),
		{ID: "join", What: "end the tokens with which nodes join", PointOfNoReturn: true, Omit: !j.joins,
			Deadline: allTimeout, Run: rotating.Then(j.join)},
		{ID: "verify", What: "check that no node accepts the old authorities", PointOfNoReturn: true,
			Deadline: nodeTimeout, Run: rotating.Then(j.verify)},
	}
}

// accept makes the new authorities, and all nodes accept them.
func (j job) accept(ctx context.Context, p *operation.Progress) error {
	r, err := j.make(ctx, p, j.chosen)
	if err != nil {
		return err
	}
	return p.Each(ctx, 1, j.parts(r, accepted, former)...)
}

func (j job) unaccept(ctx context.Context, p *operation.Progress) error {
	r, err := rotating.Get(p)
	if errors.Is(err, operation.ErrNoData) || err == nil && !r.Fresh {
		return nil // what an earlier rotation has left stays
	} else if err != nil {
		return err
	}
	if _, err := issued.Get(p); err == nil { // it has begun
		err := j.noneIssues(ctx, r, j.chosen)
		if err == nil && slices.Contains(j.chosen, config.AtRestKey) {
			err = j.encrypt(ctx, p) // what has the new key
		}
		if err != nil {
			return err
		}
	}
	return p.UndoEach(ctx, j.parts(r, accepted, former)...)
}

func (j job) issue(ctx context.Context, p *operation.Progress, r rotation) error {
	if err := issued.Put(p, time.Now()); err != nil {
		return err
	}
	if err := p.Each(ctx, 1, j.parts(r, issuing, accepted)...); err != nil {
		return err
	}
	return issued.Put(p, time.Now())
}

func (j job) unissue(ctx context.Context, p *operation.Progress, r rotation) error {
	if !r.Fresh {
		return nil
	}
	return p.UndoEach(ctx, j.parts(r, issuing, accepted)...)
}

func (j job) encrypt(ctx context.Context, p *operation.Progress) error {
	return j.Kubernetes.Poll(ctx, p, controlplane.EncryptAgain)
}

// parts give each node the phase to, or undo it with back.
func (j job) parts(r rotation, to, back phase) []operation.Part {
	return lists.Some(r.nodes(j.Options, to), func(n node) (operation.Part, bool) {
		mine := slices.DeleteFunc(n.chosen(j.chosen), func(name string) bool { return r.needless(name, to) })
		return operation.Part{
			ID: n.Name, What: fmt.Sprintf("%s on node %q", to, n.Address), Deadline: nodeTimeout,
			Run:  func(ctx context.Context, p *operation.Progress) error { return j.move(ctx, p, r, n, mine, to) },
			Undo: func(ctx context.Context, p *operation.Progress) error { return j.move(ctx, p, r, n, mine, back) },
		}, len(mine) > 0
	})
}

// issued is when the last certificates were issued, or their issue began.
var issued = operation.Data[time.Time]{Key: "issued"}

// awaitTokens waits until pods have tokens that the new key has signed.
func (j job) awaitTokens(ctx context.Context, _ *operation.Progress, since time.Time) error {
	if !sleep.For(ctx, time.Until(since.Add(j.wait))) {
		return context.Cause(ctx)
	}
	return nil
}

// Question is the ID of the question before the old authorities end.
const Question = "drop"

func (j job) confirm(ctx context.Context, p *operation.Progress, r rotation) error {
	if err := j.Kubernetes.Poll(ctx, p, r.same); err != nil {
		return err
	}
	p.Report("all users need new credentials now: gbctl config renew, gbctl kubeconfig")
	p.Report("pods that use the Kubernetes API and read its authority only at their start need a restart now")
	if err := rollout.Confirm(ctx, p, Question, "old credentials end now: go on", questionTimeout); err != nil {
		return err
	}
	return j.Kubernetes.Poll(ctx, p, r.same) // the answer may have taken a day
}

// join gives control planes other tokens with which nodes join. Those of workers are worth nothing then, and
// they need none. The new ones are those of this node once it has them, so that it can be done again.
func (j job) join(ctx context.Context, p *operation.Progress, r rotation) error {
	own, err := configuration.Config(j.Store)
	if err != nil {
		return err
	}
	bootstrap, trust := own.Cluster.Token, own.Machine.Token
	if strings.HasPrefix(string(bootstrap), r.Token+".") {
		bootstrap, trust = config.NewToken(), config.NewToken()
	}
	patch := map[string]any{"machine": map[string]any{"token": string(trust)}, "cluster": map[string]any{"token": string(bootstrap)}}
	for _, n := range r.nodes(j.Options, accepted) {
		if !n.ControlPlane {
			continue
		}
		if err := rollout.Poll(ctx, p, func(ctx context.Context) error { return rollout.Change(ctx, j.Peers, n.Node, patch) }); err != nil {
			return fmt.Errorf("node %s: %w", n.Name, err)
		}
	}
	ended := kubeclient.Object{"stringData": map[string]any{"expiration": time.Now().UTC().Format(time.RFC3339)}}
	ref := kubeclient.Ref{APIVersion: "v1", Kind: "Secret", Namespace: "kube-system", Name: "bootstrap-token-" + r.Token}
	p.Report("machines that join from now on need the tokens that this node has")
	return j.Kubernetes.Poll(ctx, p, func(ctx context.Context, client *kubeclient.Client) error {
		_, err := client.Merge(ctx, ref, ended)
		return kubeclient.IgnoreNotFound(err)
	})
}

func (j job) verify(ctx context.Context, p *operation.Progress, r rotation) error {
	for _, n := range r.Nodes {
		n, mine := node{n}, node{n}.chosen(j.chosen)
		if err := rollout.Poll(ctx, p, func(ctx context.Context) error { return j.settled(ctx, r, n, mine, dropped) }); err != nil {
			return fmt.Errorf("node %s: %w", n.Name, err)
		}
	}
	return j.Kubernetes.Poll(ctx, p, func(ctx context.Context, client *kubeclient.Client) error { return j.forget(ctx, client, r) })
}
