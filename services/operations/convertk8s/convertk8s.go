// Package convertk8s is the operation convert-k8s: it replaces a self-hosted control plane,
// whose programs run as pods of DaemonSets, by static pods.
//
//	discover ─▶ gather ─▶ patch ─▶ render ─▶ checkpointer ─▶ confirm ═▶ key
//	                        ═▶ kube-apiserver ═▶ kube-controller-manager ═▶ kube-scheduler ═▶ verify
//
// Up to confirm the control plane runs as before, and everything can be undone. After it
// (double arrows), the only way is forward: the nodes write their static pods as soon as the
// key of a self-hosted control plane is gone from etcd. A static pod is written when the
// port of its program is free, so each node needs only the start of one program.
//
// The record has no secrets. The new authority of the aggregation layer is in a Secret of
// the cluster until the end, so that another node can take over.
package convertk8s

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"time"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/operations/rollout"
	"github.com/garboard-os/garboard/services/system/configuration"
)

// Name of the operation.
const Name = "convert-k8s"

const (
	// nodeTimeout bounds what is done on one node, and allTimeout on all.
	nodeTimeout = 10 * time.Minute
	allTimeout  = 3 * time.Hour
	// questionTimeout is how long a question waits. The control plane runs as before meanwhile.
	questionTimeout = time.Hour
	// downTimeout: if no API server answers for so long, and pod-checkpointer is gone, nothing
	// starts the self-hosted control plane any more.
	downTimeout = 3 * time.Minute
	// watched is how long a program must run on all nodes before the next one is replaced.
	watched = 5 * time.Second
	// maxDifferences bounds what is shown.
	maxDifferences = 24
)

// checkpointer is the DaemonSet of pod-checkpointer.
const checkpointer = "pod-checkpointer"

// program of the control plane: a DaemonSet and, later, a static pod.
type program struct{ name, field string } // the field below cluster

var programs = []program{{"kube-apiserver", "apiServer"}, {"kube-controller-manager", "controllerManager"}, {"kube-scheduler", "scheduler"}}

// former are the names of arguments in records of earlier releases.
var former = map[string]string{"onlyKey": "removeInitializedKey"}

// Options are what the operation stands on.
type Options struct {
	Store      resource.Reader
	Peers      rollout.Peers
	Kubernetes rollout.Kubernetes
	// RemoveInitialized removes the key of a self-hosted control plane from etcd. A key that
	// isn't there is no error.
	RemoveInitialized func(ctx context.Context) error
}

// Definition of the operation.
func Definition(o Options) operation.Definition {
	d := operation.Definition{Name: Name, Exclusive: true, Shared: true}
	return operation.Planned(d, o.job, job.plan, job.steps)
}

func (j job) plan(ctx context.Context) ([]string, error) {
	seen, err := j.look(ctx)
	if err != nil || !j.RemoveInitializedKey {
		return slices.Concat(seen.Differences, seen.Servers), err
	}
	for _, n := range rollout.ControlPlanes(seen.Nodes) {
		if len(seen.Before[n.Name].Lacks) > 0 {
			return nil, fmt.Errorf("node %s: its configuration has no cluster.aggregatorCA or no cluster.serviceAccount: without them no static pod starts", n.Name)
		}
	}
	return nil, nil
}

// job is a conversion that was asked for.
type job struct {
	Options
	*apiv1.ConvertKubernetesRequest
}

func (o Options) job(r operation.Request) (job, error) {
	a, err := operation.Decode[apiv1.ConvertKubernetesRequest](r, former)
	return job{o, a}, err
}

func (j job) steps() []operation.Step {
	steps := []operation.Step{
		{ID: "discover", What: "look for the control planes", Omit: j.RemoveInitializedKey,
			Deadline: nodeTimeout, Run: j.discover}, // a restart may have come between
		{ID: "gather", What: "gathering control plane configuration", Omit: j.RemoveInitializedKey,
			Deadline: nodeTimeout, Run: seen.Then(j.gather), Undo: j.ungather},
		seen.InParts(operation.Step{ID: "patch", What: "complete the configurations of the control planes", Omit: j.RemoveInitializedKey,
			Deadline: allTimeout}, j.patches),
		{ID: "render", What: "waiting for static pod definitions to be generated", Omit: j.RemoveInitializedKey,
			Deadline: nodeTimeout, Run: seen.Then(j.render)},
		{ID: "checkpointer", What: "disabling pod-checkpointer", Omit: j.RemoveInitializedKey,
			Deadline: allTimeout, Run: j.disable, Undo: j.enable},
		{ID: "confirm", What: "ask before the point of no return, after which nothing is undone", Omit: j.RemoveInitializedKey,
			Deadline: time.Minute, Run: j.confirmAll},
		{ID: "key", What: "removing self-hosted initialized key", PointOfNoReturn: true,
			Deadline: nodeTimeout, Run: j.removeKey},
	}
	for _, c := range programs {
		steps = append(steps, operation.Step{
			ID: c.name, What: fmt.Sprintf("replace daemonset %q by static pods", c.name), PointOfNoReturn: true, Omit: j.RemoveInitializedKey,
			Deadline: allTimeout, Run: seen.Then(j.program(c))})
	}
	return append(steps, operation.Step{
		ID: "verify", What: "check that all control planes run static pods", PointOfNoReturn: true, Omit: j.RemoveInitializedKey,
		Deadline: nodeTimeout, Run: seen.Then(j.verify)})
}

// before is the configuration of a node at the beginning, as far as the operation changes it.
type before struct {
	Lacks  []string          `json:"lacks,omitempty"`  // the secrets that static pods need, and it hasn't, by field
	Images map[string]string `json:"images,omitempty"` // by field; "" where it has none
}

// survey is a look at the cluster.
type survey struct {
	Nodes       []rollout.Node    `json:"nodes"`
	SelfHosted  bool              `json:"selfHosted"` // on any control plane
	Before      map[string]before `json:"before"`     // by node
	Images      map[string]string `json:"images"`     // of the DaemonSets, by program
	Differences []string          `json:"differences,omitempty"`
	// what the operator may have to do about those of aggregated APIs
	Servers []string `json:"servers,omitempty"`
}

// seen is the survey at the beginning.
var seen = operation.Data[survey]{Key: "cluster"}

// look asks Kubernetes and all control planes. The error names everything that keeps the
// conversion from beginning.
func (o Options) look(ctx context.Context) (s survey, err error) {
	if err := o.Peers.Check(); err != nil {
		return s, err
	}
	s.Before, s.Images = map[string]before{}, map[string]string{}
	err = o.Kubernetes.With(func(client *kubeclient.Client) error {
		nodes, err := rollout.Nodes(ctx, client)
		if err != nil {
			return err
		}
		s.Nodes = lists.Of(nodes, rollout.NodeOf)
		secret, err := client.Get(ctx, serviceAccountSecret)
		if err != nil && !kubeclient.IsNotFound(err) {
			return err
		}
		own, err := configuration.Config(o.Store) // other nodes don't show their secrets
		if err != nil {
			return err
		}
		key, has := secret.Text("data", serviceAccountKey), base64.StdEncoding.EncodeToString(own.Cluster.ServiceAccount.Key)
		if has != "" && key != "" && has != key {
			s.Differences = append(s.Differences, fmt.Sprintf("this node: cluster.serviceAccount.key isn't the key in %s: no token of today will be valid", serviceAccountSecret))
		}
		s.Differences = append(s.Differences, own.AboutArgs()...)
		return errors.Join(o.daemonSets(ctx, client, own, &s), s.servers(ctx, client))
	})
	if err != nil {
		return s, err
	}
	var problems []error
	for _, n := range rollout.ControlPlanes(s.Nodes) {
		if err := o.ask(ctx, n, &s); err != nil {
			problems = append(problems, fmt.Errorf("node %s: %w", n.Name, err))
		}
	}
	switch {
	case len(problems) > 0:
		return s, errors.Join(problems...)
	case len(rollout.ControlPlanes(s.Nodes)) == 0:
		return s, fmt.Errorf("no node has the label %s", rollout.ControlPlaneLabel)
	case !s.SelfHosted && len(s.Images) == 0:
		return s, errors.New("the control plane isn't self-hosted: its programs are static pods already")
	}
	return s, nil
}

// daemonSets reads the images of the self-hosted programs, and compares their definitions
// with the static pods that this node would write.
func (o Options) daemonSets(ctx context.Context, client *kubeclient.Client, own *config.Config, s *survey) error {
	k := own.Cluster
	args := map[string]config.Args{"apiServer": k.APIServer.ExtraArgs, "controllerManager": k.ControllerManager.ExtraArgs, "scheduler": k.Scheduler.ExtraArgs}
	for _, c := range programs {
		set, err := client.Get(ctx, daemonSet(c.name))
		if kubeclient.IsNotFound(err) {
			continue // an earlier conversion has deleted it
		} else if err != nil {
			return err
		}
		containers := set.List("spec", "template", "spec", "containers")
		if len(containers) == 0 {
			return fmt.Errorf("daemonset %s has no container", c.name)
		}
		s.Images[c.name] = containers[0].Text("image")
		template, _ := set.At("spec", "template").(map[string]any)
		wanted, err := controlplane.Rendered(o.Store, c.name, s.Images[c.name])
		if err != nil {
			return err
		}
		s.Differences = append(s.Differences, differences(c, template, wanted, args[c.field])...)
	}
	s.Differences = s.Differences[:min(len(s.Differences), maxDifferences)]
	return nil
}

// servers looks for the API servers of aggregated APIs. They trust the authority that will be
// replaced, and some of them read it only at their start.
func (s *survey) servers(ctx context.Context, client *kubeclient.Client) error {
	list, err := client.List(ctx, kubeclient.Ref{APIVersion: "apiregistration.k8s.io/v1", Kind: "APIService"}, kubeclient.Selection{})
	s.Servers = lists.Some(list.Items(), func(a kubeclient.Object) (string, bool) {
		name := a.Text("spec", "service", "name")
		return fmt.Sprintf("APIService %s: restart the pods of Service %s/%s if it isn't available after the conversion: the authority of aggregated APIs is new",
			a.Name(), a.Text("spec", "service", "namespace"), name), name != ""
	})
	return err
}

func daemonSet(name string) kubeclient.Ref {
	return kubeclient.Ref{APIVersion: "apps/v1", Kind: "DaemonSet", Namespace: "kube-system", Name: name}
}

func (o Options) discover(ctx context.Context, p *operation.Progress) error {
	return rollout.First(ctx, p, o.Peers, seen, o.look, func(s survey) []rollout.Node {
		slices.SortFunc(s.Nodes, func(a, b rollout.Node) int { return a.Address.Compare(b.Address) })
		p.Report("%s", rollout.Discovered(s.Nodes))
		p.Report("current self-hosted status: %v", s.SelfHosted)
		return rollout.ControlPlanes(s.Nodes)
	})
}
