package convertk8s

import (
	"cmp"
	"context"
	"encoding/base64"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/operations/rollout"
	"github.com/garboard-os/garboard/services/system/configuration"
)

var (
	// serviceAccountSecret is where a self-hosted control plane has the key that signs the
	// tokens of service accounts, below serviceAccountKey.
	serviceAccountSecret = kubeclient.Ref{APIVersion: "v1", Kind: "Secret", Namespace: "kube-system", Name: "kube-controller-manager"}
	// newSecret has the new authority until the end of the conversion.
	newSecret = kubeclient.Ref{APIVersion: "v1", Kind: "Secret", Namespace: "kube-system", Name: "garboard-conversion"}
)

const serviceAccountKey = "service-account.key"

// ask completes the survey by what a control plane itself says.
func (o Options) ask(ctx context.Context, n rollout.Node, s *survey) error {
	if err := rollout.SameRelease(ctx, o.Peers, n); err != nil {
		return err
	}
	selfHosted, err := o.selfHosted(ctx, n)
	if err != nil {
		return err
	}
	s.SelfHosted = s.SelfHosted || selfHosted
	config, _, err := rollout.Config(ctx, o.Peers, n)
	if err != nil {
		return err
	}
	s.Before[n.Name] = read(config)
	return nil
}

// selfHosted is the status of a control plane.
func (o Options) selfHosted(ctx context.Context, n rollout.Node) (bool, error) {
	found, err := rollout.Specs[controlplane.BootstrapStatus](o.Peers.Resources(ctx, n.Address, controlplane.BootstrapStatuses.Type(), "control-plane"))
	if err == nil && len(found) != 1 {
		err = fmt.Errorf("it doesn't know yet whether the control plane is self-hosted: gbctl -n %s services", n.Address)
	}
	return found["control-plane"].SelfHosted, err
}

// read reads the configuration of a node.
func read(o kubeclient.Object) before {
	lacks := slices.DeleteFunc([]string{"aggregatorCA", "serviceAccount"}, func(field string) bool { return o.Text("cluster", field, "key") != "" })
	b := before{Images: map[string]string{}, Lacks: lacks}
	for _, c := range programs {
		b.Images[c.field] = o.Text("cluster", c.field, "image")
	}
	return b
}

// differences are what the definition of a self-hosted program has otherwise than the static
// pod that takes its place: arguments, and paths of the node.
func differences(c program, self, static kubeclient.Object, own config.Args) (all []string) {
	was, will := arguments(self), arguments(static)
	for flag := range own { // also those that the static pod has in a file
		will[flag] = own.Get(flag)
	}
	for _, flag := range slices.Sorted(maps.Keys(was)) {
		value, there := will[flag]
		switch {
		case !there:
			all = append(all, fmt.Sprintf("%s: the DaemonSet has --%s=%s, and the static pod doesn't: see cluster.%s.extraArgs", c.name, flag, was[flag], c.field))
		case value != was[flag] && !samePurpose(was[flag], value):
			all = append(all, fmt.Sprintf("%s: the DaemonSet has --%s=%s, and the static pod --%s=%s", c.name, flag, was[flag], flag, value))
		}
	}
	all = append(all, lists.Some(slices.Sorted(maps.Keys(will)), func(flag string) (string, bool) {
		_, there := was[flag]
		return fmt.Sprintf("%s: the static pod has --%s=%s, and the DaemonSet doesn't", c.name, flag, will[flag]), !there
	})...)
	has := hostPaths(static)
	return append(all, lists.Some(hostPaths(self), func(path string) (string, bool) {
		return fmt.Sprintf("%s: the DaemonSet mounts %s of the node, and the static pod doesn't: see cluster.%s.extraVolumes", c.name, path, c.field), !slices.Contains(has, path)
	})...)
}

// samePurpose: files are in another place, and $(NAME) is of each pod's own.
func samePurpose(was, will string) bool {
	return strings.HasPrefix(was, "/") && strings.HasPrefix(will, "/") || strings.Contains(was, "$(")
}

// arguments of the first container of a pod, by their names.
func arguments(pod kubeclient.Object) map[string]string {
	all := map[string]string{}
	containers := pod.List("spec", "containers")
	if len(containers) == 0 {
		return all
	}
	for _, list := range []string{"command", "args"} {
		values, _ := containers[0].At(list).([]any)
		for _, v := range values {
			text, _ := v.(string)
			if flag, found := strings.CutPrefix(text, "--"); found {
				name, value, _ := strings.Cut(flag, "=")
				all[name] = cmp.Or(value, "true")
			}
		}
	}
	return all
}

// hostPaths of a pod.
func hostPaths(pod kubeclient.Object) []string {
	return lists.Some(pod.List("spec", "volumes"), func(v kubeclient.Object) (string, bool) {
		path := v.Text("hostPath", "path")
		return path, path != ""
	})
}

func (j job) gather(ctx context.Context, p *operation.Progress, s survey) error {
	for _, line := range s.Differences {
		p.Report("%s", line)
	}
	if len(s.Differences) > 0 {
		text := fmt.Sprintf("the static pods differ from the DaemonSets in %d points: accept this", len(s.Differences))
		if err := j.confirm(ctx, p, "differences", text); err != nil {
			return err
		}
	}
	own, err := configuration.Config(j.Store)
	if err != nil {
		return err
	}
	if len(own.Cluster.AggregatorCA.Key) > 0 {
		return nil // of the manual way, or of an earlier conversion
	}
	p.Report("aggregator CA key can't be recovered from bootkube-boostrapped control plane, generating new CA")
	return j.Kubernetes.Poll(ctx, p, createAuthority)
}

func (j job) ungather(ctx context.Context, p *operation.Progress) error {
	return j.Kubernetes.Poll(ctx, p, func(ctx context.Context, client *kubeclient.Client) error { return client.Delete(ctx, newSecret) })
}

func createAuthority(ctx context.Context, client *kubeclient.Client) error {
	ca, err := pki.NewAggregatorCA(time.Now())
	if err != nil {
		return err
	}
	_, err = client.CreateIfMissing(ctx, kubeclient.Object{
		"apiVersion": newSecret.APIVersion, "kind": newSecret.Kind,
		"metadata": map[string]any{"name": newSecret.Name, "namespace": newSecret.Namespace},
		"data":     map[string]any{"crt": base64.StdEncoding.EncodeToString(ca.Cert), "key": base64.StdEncoding.EncodeToString(ca.Key)},
	})
	return err
}

// confirm asks a question, unless all are answered.
func (j job) confirm(ctx context.Context, p *operation.Progress, id, text string) error {
	if j.Yes {
		p.Report("%s: yes", text)
		return nil
	}
	return rollout.Confirm(ctx, p, id, text, questionTimeout)
}

// secrets are what the configuration of a self-hosted control plane lacks. The values have
// the form that they have in it: base64 of PEM.
func (o Options) secrets(ctx context.Context, client *kubeclient.Client) (map[string]any, error) {
	own, err := configuration.Config(o.Store)
	if err != nil {
		return nil, err
	}
	text := base64.StdEncoding.EncodeToString
	authority := map[string]any{"crt": text(own.Cluster.AggregatorCA.Crt), "key": text(own.Cluster.AggregatorCA.Key)}
	if len(own.Cluster.AggregatorCA.Key) == 0 {
		secret, err := client.Get(ctx, newSecret)
		if err != nil {
			return nil, err
		}
		authority = map[string]any{"crt": secret.Text("data", "crt"), "key": secret.Text("data", "key")}
	}
	key := text(own.Cluster.ServiceAccount.Key)
	if key == "" {
		secret, err := client.Get(ctx, serviceAccountSecret)
		if err != nil {
			return nil, err
		}
		if key = secret.Text("data", serviceAccountKey); key == "" {
			return nil, rollout.Lasting{Err: fmt.Errorf("%s has no %s: set cluster.serviceAccount.key on all control planes by `gbctl patch mc`", serviceAccountSecret, serviceAccountKey)}
		}
	}
	return map[string]any{"aggregatorCA": authority, "serviceAccount": map[string]any{"key": key}}, nil
}

func (o Options) patches(s survey) []operation.Part {
	return rollout.Parts(rollout.ControlPlanes(s.Nodes), "patching control plane node %q configuration", nodeTimeout,
		func(ctx context.Context, p *operation.Progress, n rollout.Node) error {
			return o.Kubernetes.Poll(ctx, p, func(ctx context.Context, client *kubeclient.Client) error { return o.patch(ctx, client, n, s) })
		},
		func(ctx context.Context, p *operation.Progress, n rollout.Node) error {
			return rollout.Poll(ctx, p, func(ctx context.Context) error { return o.unpatch(ctx, n, s.Before[n.Name]) })
		})
}

func (o Options) patch(ctx context.Context, client *kubeclient.Client, n rollout.Node, s survey) error {
	cluster := map[string]any{}
	for _, c := range programs {
		if image := s.Images[c.name]; image != "" {
			cluster[c.field] = map[string]any{"image": image}
		}
	}
	if lacks := s.Before[n.Name].Lacks; len(lacks) > 0 {
		secrets, err := o.secrets(ctx, client)
		if err != nil {
			return err
		}
		maps.DeleteFunc(secrets, func(field string, _ any) bool { return !slices.Contains(lacks, field) })
		maps.Copy(cluster, secrets)
	}
	return o.change(ctx, n, cluster)
}

// unpatch gives a node the configuration of before.
func (o Options) unpatch(ctx context.Context, n rollout.Node, b before) error {
	cluster := map[string]any{}
	for _, c := range programs {
		var image any // null removes it
		if b.Images[c.field] != "" {
			image = b.Images[c.field]
		}
		cluster[c.field] = map[string]any{"image": image}
	}
	for _, field := range b.Lacks {
		cluster[field] = map[string]any{"crt": nil, "key": nil} // acceptedKeys stay
	}
	return o.change(ctx, n, cluster)
}

func (o Options) change(ctx context.Context, n rollout.Node, cluster map[string]any) error {
	return rollout.Change(ctx, o.Peers, n, map[string]any{"cluster": cluster}, connect.CodeFailedPrecondition)
}
