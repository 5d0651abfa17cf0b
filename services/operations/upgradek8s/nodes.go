package upgradek8s

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"golang.org/x/mod/semver"
	"golang.org/x/sync/errgroup"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/operations/rollout"
)

// atOnce is how many nodes are asked at the same time.
const atOnce = 8

// inventory has the nodes in the order of their names.
var inventory = operation.Data[[]rollout.Node]{Key: "nodes"}

// state of a node, as far as an upgrade needs it.
type state struct {
	rollout.Node
	kubelet string            // the version that runs
	sick    error             // as Kubernetes sees it
	images  map[string]string // of the configuration, by component
	args    map[string]map[string]string
	broken  []error // why the upgrade can't begin; nil is no reason
}

// survey is a look at all nodes.
type survey struct {
	states   []state
	warnings []string
}

func (s survey) nodes() []rollout.Node {
	return lists.Of(s.states, func(st state) rollout.Node { return st.Node })
}

// passing is an error of programs that aren't ready, and may be in a moment.
type passing struct{ error }

// look asks all nodes. The error names everything that keeps the upgrade from beginning.
func (o Options) look(ctx context.Context, a *apiv1.UpgradeKubernetesRequest) (survey, error) {
	if err := o.Peers.Check(); err != nil {
		return survey{}, err
	}
	if controlplane.SelfHosted(o.Store) {
		return survey{}, errors.New("the control plane is self-hosted: convert it first, by `gbctl convert-k8s`")
	}
	s, err := o.survey(ctx)
	if err != nil {
		return s, err
	}
	var problems []error
	lasts := false
	for _, st := range s.states {
		lasting := slices.Concat(st.mismatches(a), st.removed(a))
		lasts = lasts || len(lasting) > 0
		problems = append(problems, st.sick)
		problems = append(problems, lists.Some(st.broken, func(err error) (error, bool) { return fmt.Errorf("node %s: %w", st.Name, err), err != nil })...)
		problems = append(problems, lists.Of(lasting, func(text string) error { return fmt.Errorf("node %s: %s", st.Name, text) })...)
	}
	if err := errors.Join(problems...); err != nil && !lasts {
		return s, passing{err}
	} else if err != nil {
		return s, err
	}
	if !down(a.From, a.To) {
		s.warnings = append(s.warnings, o.deprecated(ctx, s, a.To)...)
	}
	if a.NoKubelet && a.From != a.To {
		s.warnings = append(s.warnings, "the kubelets stay as they are: upgrade them before the control plane is three minor versions ahead")
	}
	return s, nil
}

// survey lists the nodes in Kubernetes and asks each of them.
func (o Options) survey(ctx context.Context) (s survey, err error) {
	nodes, err := o.Kubernetes.Nodes(ctx)
	if err != nil {
		return s, err
	}
	s.states = lists.Of(nodes, func(n kubeclient.Object) state {
		return state{Node: rollout.NodeOf(n), sick: rollout.Ready(n), kubelet: n.Text("status", "nodeInfo", "kubeletVersion")}
	})
	var asking errgroup.Group
	asking.SetLimit(atOnce)
	for i := range s.states {
		asking.Go(func() error { s.states[i].broken = o.ask(ctx, &s.states[i]); return nil })
	}
	_ = asking.Wait() // each state has its own problems
	if len(rollout.ControlPlanes(s.nodes())) == 0 {
		return s, fmt.Errorf("no node has the label %s", rollout.ControlPlaneLabel)
	}
	return s, nil
}

// ask completes the state of a node from the node itself, and returns what is broken.
func (o Options) ask(ctx context.Context, st *state) []error {
	if !st.Address.IsValid() {
		return []error{errors.New("its InternalIP isn't known to Kubernetes")}
	}
	document, _, err := rollout.Config(ctx, o.Peers, st.Node)
	if err != nil {
		return []error{err}
	}
	st.images, st.args = imagesOf(document), argsOf(document)
	broken := []error{rollout.Runs(ctx, o.Peers, st.Node)}
	if st.ControlPlane {
		broken = append(broken, o.unhealthy(ctx, st.Node)...)
	}
	return broken
}

// unhealthy reports the programs of a control plane that aren't healthy.
func (o Options) unhealthy(ctx context.Context, n rollout.Node) []error {
	return lists.Of(programs, func(c component) error { return rollout.Healthy(ctx, o.Peers, n, c.name) })
}

// mismatches are the images that have neither of both versions.
func (s state) mismatches(a *apiv1.UpgradeKubernetesRequest) (all []string) {
	check := func(component string, wanted bool) {
		if !wanted {
			return
		}
		version, err := config.VersionOf(s.images[component])
		if err == nil && version != a.From && version != a.To {
			err = fmt.Errorf("%s has version %s, and not %s or %s", component, version, a.From, a.To)
		}
		if err != nil {
			all = append(all, err.Error())
		}
	}
	for _, c := range programs {
		check(c.name, s.ControlPlane)
	}
	check(proxy.name, s.ControlPlane)
	check(kubelet.name, !a.NoKubelet)
	if a.NoKubelet && semver.IsValid(s.kubelet) {
		switch ahead := minor(a.To) - minor(s.kubelet); {
		case ahead > maxKubeletSkew:
			all = append(all, fmt.Sprintf("its kubelet has version %s, which an API server %s doesn't support: upgrade the kubelets too", s.kubelet, a.To))
		case ahead < 0:
			all = append(all, fmt.Sprintf("its kubelet has version %s, and must not be newer than the API server: leave out --no-kubelet", s.kubelet))
		}
	}
	return all
}

// maxKubeletSkew is how many minor versions a kubelet may be behind
// (https://kubernetes.io/releases/version-skew-policy/#kubelet).
const maxKubeletSkew = 3

// imagesOf reads the images from the configuration of a node.
func imagesOf(document kubeclient.Object) map[string]string {
	images := map[string]string{}
	for _, c := range components {
		images[c.name] = cmp.Or(document.Text(c.path...), c.fallback)
	}
	return images
}

// From is the version that the cluster's components have, for a change to another one. An
// upgrade that was cut short leaves some components with that one.
func (o Options) From(ctx context.Context, to string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, fromTimeout)
	defer cancel()
	if err := o.Peers.Check(); err != nil {
		return "", err
	}
	s, err := o.survey(ctx)
	if err != nil {
		return "", err
	}
	found := map[string][]string{}
	for _, st := range s.states {
		for _, c := range components {
			if !st.ControlPlane && c.name != kubelet.name {
				continue
			}
			if v, err := config.VersionOf(st.images[c.name]); err == nil && v != to {
				found[v] = append(found[v], st.Name+" "+c.name)
			}
		}
	}
	all := slices.Sorted(maps.Keys(found))
	if len(all) <= 1 {
		return append(all, to)[0], nil
	}
	for i, v := range all {
		all[i] = fmt.Sprintf("%s (%s)", v, strings.Join(found[v], ", "))
	}
	return "", fmt.Errorf("the cluster has several versions of Kubernetes: %s; make them one by `gbctl patch mc`", strings.Join(all, ", "))
}

func (j job) preflight(ctx context.Context, p *operation.Progress) error {
	return rollout.First(ctx, p, j.Peers, inventory, func(ctx context.Context) ([]rollout.Node, error) {
		s, err := j.look(ctx, j.a)
		return s.nodes(), err
	}, func(nodes []rollout.Node) []rollout.Node {
		p.Report("%s", rollout.Discovered(nodes))
		return nodes
	})
}

func (j job) verify(ctx context.Context, p *operation.Progress) error {
	healthy := func(ctx context.Context) error {
		s, err := j.look(ctx, &apiv1.UpgradeKubernetesRequest{From: j.a.To, To: j.a.To, NoKubelet: j.a.NoKubelet})
		for _, n := range s.nodes() {
			err = cmp.Or(err, rollout.Serves(ctx, p, j.Peers, n))
		}
		return err
	}
	if err := rollout.Poll(ctx, p, healthy); err != nil {
		return err
	}
	// The statuses of static pods may be from before the kubelet's restart.
	if !sleep.For(ctx, statusAge) {
		return context.Cause(ctx)
	}
	return rollout.Poll(ctx, p, healthy)
}

// needed are the images of the new version that a node needs, that of the kubelet last.
func (s state) needed(a *apiv1.UpgradeKubernetesRequest) (images []string, err error) {
	for _, c := range components {
		if c.name == kubelet.name && a.NoKubelet || !s.ControlPlane && c.name != kubelet.name && c.name != proxy.name {
			continue
		}
		image, err := config.WithVersion(s.images[c.name], a.To)
		if err != nil {
			return nil, err
		}
		images = append(images, image)
	}
	return images, nil
}

// pullAll pulls all images to the nodes that need them.
func (j job) pullAll(ctx context.Context, p *operation.Progress, nodes []rollout.Node) error {
	first := rollout.ControlPlanes(nodes)[0]
	pull := func(ctx context.Context, p *operation.Progress, n rollout.Node) error {
		return j.pull(ctx, p, n, first, j.a)
	}
	return p.Each(ctx, atOnce, rollout.Parts(nodes, "pulling the images to node %q", pullTimeout, pull, nil)...)
}

// images are those in the configuration of a node.
func (o Options) images(ctx context.Context, p *operation.Progress, n rollout.Node) (images map[string]string, err error) {
	err = rollout.Poll(ctx, p, func(ctx context.Context) error {
		document, _, err := rollout.Config(ctx, o.Peers, n)
		images = imagesOf(document)
		return err
	})
	return images, err
}

// pull pulls the images of a node. That of kube-proxy is in the configuration of control planes, also for workers.
func (o Options) pull(ctx context.Context, p *operation.Progress, n, first rollout.Node, a *apiv1.UpgradeKubernetesRequest) error {
	images, err := o.images(ctx, p, n)
	if err != nil {
		return err
	}
	if !n.ControlPlane {
		its, err := o.images(ctx, p, first)
		if err != nil {
			return err
		}
		images[proxy.name] = its[proxy.name]
	}
	st := state{Node: n, images: images}
	needed, err := st.needed(a)
	if err != nil {
		return err
	}
	for i, image := range needed {
		said := ""
		_, err := o.Peers.Pull(ctx, n.Address, image, a.NoKubelet || i < len(needed)-1, func(done, total uint64) {
			if text := fmt.Sprintf("%s: %d of %d MB", image, done>>20, total>>20); text != said {
				said = text
				p.Report("%s", text)
			}
		})
		if err != nil {
			return err
		}
	}
	return nil
}
