package controlplane

import (
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/manifest"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/render"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/network"
)

// Manifest is the objects of one of the node's own documents, or of one in the configuration.
type Manifest struct {
	Objects  []kubeclient.Object
	Problems []string `column:"PROBLEMS"` // why there are no objects of some documents, or of none
}

// MarshalYAML is a list of objects.
func (m Manifest) MarshalYAML() (any, error) { return m.Objects, nil }

// BootstrapManifests are the objects that a new cluster gets. They are made when missing, and never changed
// afterwards.
var BootstrapManifests = resource.Define[Manifest](resource.Definition{
	Type: "Manifests.kubernetes.garboard.dev", Kind: "Manifest", Namespace: namespace,
	Columns: []resource.Column{
		{Name: "RESULT", From: resultType, Value: func(spec any) string { return spec.(ManifestResult).String() }},
		{Name: "DRIFT", From: driftType, Value: func(spec any) string { return spec.(ManifestDrift).String() }},
	},
})

// inlinePrefix is that of the IDs of manifests in the configuration.
const inlinePrefix = "20-"

// Own reports whether a manifest, or what belongs to it, is the node's own: without its objects there is no cluster.
func Own(m resource.Meta) bool {
	return m.Namespace == namespace && !strings.HasPrefix(m.ID, inlinePrefix)
}

//go:embed bootstrap_manifests
var bootstrapManifestFiles embed.FS

// builtinManifests are the built-in manifests. One that the configuration disables is empty.
var builtinManifests = render.Parse(bootstrapManifestFiles, "bootstrap_manifests/*.yaml")

// builtin are the bootstrap manifests from files in this package, and inline ones.
var builtin = BootstrapManifests.In(namespace)

// ManifestController renders the built-in bootstrap manifests and those in the machine
// configuration, and downloads the extra ones.
type ManifestController struct{}

func (*ManifestController) Reconcile(ctx context.Context, v resource.View) (time.Duration, error) {
	c, err := controlPlaneConfig(v)
	if err != nil || c == nil {
		return 0, err
	}
	resolvers, err := network.Resolvers.Get(v, network.ResolversID)
	if err != nil && resource.IgnoreNotFound(err) != nil {
		return 0, err
	}
	manifests, err := renderBootstrapManifests(&c.Cluster, c.Machine.Network.Resolver.On() || len(resolvers.Spec) > 0)
	if err != nil {
		return 0, err
	}
	if err := builtin.Replace(v, manifests); err != nil {
		return 0, err
	}
	return 0, fetchExtras(ctx, v, c)
}

// prune deletes the bootstrap manifests of a namespace, or what belongs to them, that
// are no longer wanted. The objects in the cluster stay.
func prune[S any](v resource.View, kind *resource.Kind[S], wanted map[string]bool) error {
	for _, o := range kind.List(v) {
		if wanted[o.ID] {
			continue
		}
		if err := kind.Delete(v, o.ID); err != nil {
			return err
		}
	}
	return nil
}

// renderBootstrapManifests makes the manifests of a cluster, by ID. hasResolvers
// reports whether there is a name server for names outside of the cluster.
func renderBootstrapManifests(c *config.Cluster, hasResolvers bool) (map[string]Manifest, error) {
	input, err := bootstrapManifestInput(c, hasResolvers)
	if err != nil {
		return nil, err
	}
	manifests := map[string]Manifest{}
	for name := range builtinManifests {
		text, err := builtinManifests.Text(name, input)
		if err != nil {
			return nil, fmt.Errorf("render manifest %w", err)
		}
		if m := readManifest(text); len(m.Objects)+len(m.Problems) > 0 {
			manifests[strings.TrimSuffix(name, ".yaml")] = m
		}
	}
	for _, inline := range c.InlineManifests {
		manifests[inlinePrefix+inline.Name] = readManifest([]byte(inline.Contents))
	}
	return manifests, nil
}

// readManifest reads one or more documents.
func readManifest(text []byte) Manifest {
	objects, problems := manifest.Read(text)
	asOurs := func(o map[string]any) kubeclient.Object { return kubeclient.Object(o) }
	return Manifest{Objects: lists.Of(objects, asOurs), Problems: lists.Of(problems, manifest.Problem.String)}
}

func bootstrapManifestInput(c *config.Cluster, hasResolvers bool) (object, error) {
	id, secret, ok := strings.Cut(string(c.Token), ".")
	if !ok {
		return nil, errors.New("cluster.token isn't of the form id.secret")
	}
	dns := config.ClusterDNS(c.Network.ServiceSubnets)
	if len(c.Network.PodSubnets) == 0 || len(dns) == 0 {
		return nil, errors.New("cluster.network has no podSubnets or no serviceSubnets")
	}
	flannel := object{"EnableNFTables": true, "EnableIPv4": false, "Backend": object{"Type": "vxlan"}}
	for _, p := range c.Network.PodSubnets {
		if p.Addr().Is4() {
			flannel["EnableIPv4"], flannel["Network"] = true, p.Masked().String()
		} else {
			flannel["EnableIPv6"], flannel["IPv6Network"] = true, p.Masked().String()
		}
	}
	var network []byte // nil: another one
	if c.Network.CNI.Name == config.CNIFlannel {
		var err error
		if network, err = json.Marshal(flannel); err != nil {
			return nil, err
		}
	}
	at := netip.MustParseAddrPort(balancer.Address)
	return object{
		"Cluster": c, "TokenName": "bootstrap-token-" + id, "TokenID": id, "TokenSecret": secret, "Flannel": string(network), "HasResolvers": hasResolvers,
		"KubeletClientUser": secrets.KubeletClientUser, "Administrators": config.AdministratorsGroup,
		"Balancer": balancer.URL, "BalancerIP": at.Addr(), "BalancerPort": at.Port(), "ServerName": balancer.ServerName,
		"FirstIPv6":  c.Network.PodSubnets[0].Addr().Is6(),
		"DNSAddress": dns[0], "DNSAddresses": dns, "DualStack": len(dns) > 1,
		// The limits of connection tracking belong to the node, which may share them with others, so kube-proxy doesn't
		// set them.
		"ProxyCommand": c.Proxy.ExtraArgs.CommandLine("kube-proxy", map[string]string{
			"cluster-cidr":                      config.Joined(c.Network.PodSubnets, ","),
			"conntrack-max-per-core":            "0",
			"conntrack-min":                     "0",
			"conntrack-tcp-timeout-close-wait":  "0",
			"conntrack-tcp-timeout-established": "0",
			"hostname-override":                 "$(NODE_NAME)",
			"kubeconfig":                        "/etc/kubernetes/kubeconfig",
			"proxy-mode":                        string(c.Proxy.Mode),
		}),
	}, nil
}

// inOrder are all manifests in the order of their IDs.
func inOrder(manifests []resource.Object[Manifest]) []resource.Object[Manifest] {
	slices.SortFunc(manifests, func(a, b resource.Object[Manifest]) int { return strings.Compare(a.ID, b.ID) })
	return manifests
}
