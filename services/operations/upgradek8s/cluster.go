package upgradek8s

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"time"

	"golang.org/x/mod/semver"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/operations/rollout"
)

const (
	// questionTimeout is how long the question about bootstrap manifests waits; meanwhile no
	// other operation can restart a control plane.
	questionTimeout = 15 * time.Minute
	// shownDifferences bounds the question.
	shownDifferences = 40
)

var proxyRef = kubeclient.Ref{APIVersion: "apps/v1", Kind: "DaemonSet", Namespace: "kube-system", Name: "kube-proxy"}

// moveProxy changes the image in the configuration of each control plane, as the bootstrap
// manifests are made of it, and in the DaemonSet. Its other fields belong to the cluster's
// owner.
func (j job) moveProxy(ctx context.Context, p *operation.Progress, nodes []rollout.Node, version string) error {
	for _, n := range rollout.ControlPlanes(nodes) {
		if _, _, err := j.setImage(ctx, p, n, proxy, version); err != nil {
			return fmt.Errorf("node %s: %w", n.Name, err)
		}
	}
	return j.Kubernetes.Poll(ctx, p, func(ctx context.Context, client *kubeclient.Client) error { return setProxy(ctx, client, version) })
}

func (j job) upgradeProxy(ctx context.Context, p *operation.Progress, nodes []rollout.Node) error {
	if err := rollout.AwaitServes(ctx, p, j.Peers, nodes...); err != nil {
		return err // its pods don't change on such a node
	}
	if err := j.moveProxy(ctx, p, nodes, j.a.To); err != nil {
		return err
	}
	err := j.awaitRollout(ctx, p, proxyRef)
	if kubeclient.IsNotFound(err) {
		return operation.Skip("the cluster has no DaemonSet %s", proxy.name)
	}
	return err
}

func (j job) downgradeProxy(ctx context.Context, p *operation.Progress, nodes []rollout.Node) error {
	return j.moveProxy(ctx, p, nodes, j.a.From)
}

// setProxy replaces the image of the DaemonSet's container. One that isn't there is left to
// its owner.
func setProxy(ctx context.Context, client *kubeclient.Client, version string) error {
	set, err := client.Get(ctx, proxyRef)
	if err != nil {
		return kubeclient.IgnoreNotFound(err)
	}
	containers := set.List("spec", "template", "spec", "containers")
	changed := false
	for _, c := range containers {
		if c["name"] != proxy.name {
			continue
		}
		image, err := config.WithVersion(c.Text("image"), version)
		if err != nil {
			return rollout.Lasting{Err: err}
		}
		changed = changed || c["image"] != image
		c["image"] = image
	}
	if !changed {
		return nil
	}
	_, err = client.Merge(ctx, proxyRef, kubeclient.Object{
		"metadata": map[string]any{"resourceVersion": set.ResourceVersion()},
		"spec":     map[string]any{"template": map[string]any{"spec": map[string]any{"containers": containers}}},
	})
	return err
}

// awaitRollout waits until all pods of a workload are of its present template, and ready.
func (o Options) awaitRollout(ctx context.Context, p *operation.Progress, ref kubeclient.Ref) error {
	return o.Kubernetes.With(func(client *kubeclient.Client) error { return rollout.AwaitWorkload(ctx, p, client, ref) })
}

// manifests offers what a bootstrap manifest of this release would change in the
// cluster's objects. They belong to the cluster's owner, so it asks.
func (j job) manifests(ctx context.Context, p *operation.Progress) error {
	return j.Kubernetes.With(func(client *kubeclient.Client) error { return j.offer(ctx, p, client) })
}

func (j job) offer(ctx context.Context, p *operation.Progress, client *kubeclient.Client) error {
	var differ []kubeclient.Object
	if err := rollout.Poll(ctx, p, func(ctx context.Context) (err error) {
		differ = nil
		for _, wanted := range controlplane.WantedObjects(j.Store) {
			fields, err := controlplane.Differences(ctx, client, wanted)
			if err != nil {
				return err
			}
			if len(fields) > 0 {
				differ = append(differ, wanted)
				for _, f := range fields[:min(len(fields), shownDifferences)] {
					p.Report("%s: %s", wanted, f)
				}
			}
		}
		return nil
	}); err != nil {
		return err
	}
	if len(differ) == 0 {
		return operation.Skip("the cluster's objects are as the bootstrap manifests have them")
	}
	answer := "yes"
	if !j.a.Yes {
		var err error
		if answer, err = p.Ask(ctx, operation.Question{
			ID: "apply", Text: fmt.Sprintf("apply the bootstrap manifests to these %d objects?", len(differ)),
			Options: []string{"yes", "no"}, Timeout: questionTimeout, Default: "no",
		}); err != nil {
			return err
		}
	}
	if answer != "yes" {
		return operation.Skip("the objects stay as they are: `gbctl get manifestdrifts` shows the differences")
	}
	for _, wanted := range differ {
		if err := rollout.Poll(ctx, p, func(ctx context.Context) error { _, err := client.Apply(ctx, wanted); return err }); err != nil {
			return err
		}
		p.Report("applied %s", wanted)
		if kind := wanted.Kind(); kind == "DaemonSet" || kind == "Deployment" {
			if err := j.awaitRollout(ctx, p, wanted.Ref()); err != nil {
				return err
			}
		}
	}
	return nil
}

// deprecatedMetric counts requests of API versions that are going to be removed
// (https://kubernetes.io/docs/reference/instrumentation/metrics/).
var deprecatedMetric = regexp.MustCompile(`(?m)^apiserver_requested_deprecated_apis\{(.*)\} [1-9]`)

var metricLabel = regexp.MustCompile(`([a-z_]+)="([^"]*)"`)

// deprecated warns about API versions that clients use and that the new version doesn't
// have. Each API server counts the requests since its own start.
func (o Options) deprecated(ctx context.Context, s survey, to string) (warnings []string) {
	seen := map[string]bool{}
	for _, n := range rollout.ControlPlanes(s.nodes()) {
		text, err := o.Metrics(ctx, n.Address)
		if err != nil {
			warnings = append(warnings, fmt.Sprintf("node %s: deprecated API versions that clients use aren't known: %v", n.Name, err))
			continue
		}
		for _, m := range deprecatedMetric.FindAllStringSubmatch(text, -1) {
			labels := map[string]string{}
			for _, l := range metricLabel.FindAllStringSubmatch(m[1], -1) {
				labels[l[1]] = l[2]
			}
			removed := "v" + labels["removed_release"] // v1.36
			name := strings.TrimPrefix(labels["group"]+"/"+labels["version"], "/") + " " + labels["resource"]
			if semver.IsValid(removed) && semver.Compare(removed, semver.MajorMinor(to)) <= 0 && !seen[name] {
				seen[name] = true
				warnings = append(warnings, fmt.Sprintf("clients have requested %s, which Kubernetes removes in %s: change them first; the audit log of the API server names them", name, removed))
			}
		}
	}
	return warnings
}
