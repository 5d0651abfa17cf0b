package controlplane

import (
	"bytes"
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"path"
	"slices"
	"strings"
	"text/template"
	"time"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/network"
)

// BootstrapManifests are the objects that a new cluster gets (S-264): the spec is a list
// of objects (S-266). They are made in the order of the IDs, when missing, and never
// changed afterwards (S-218).
var BootstrapManifests = resource.Define[[]kubeclient.Object](resource.Definition{
	Type: "Manifests.kubernetes.garboard.dev", Kind: "Manifest", Namespace: namespace,
	Columns: []resource.Column{{Name: "DRIFT", From: driftType, Value: func(spec any) string { return spec.(ManifestDrift).String() }}},
})

//go:embed bootstrap_manifests
var bootstrapManifestFiles embed.FS

// bootstrapManifestTemplates are the built-in manifests. Every value is
// inserted through json, which is YAML with all texts quoted.
var bootstrapManifestTemplates = template.Must(template.New("").Option("missingkey=error").Funcs(template.FuncMap{
	"json": func(v any) (string, error) { data, err := json.Marshal(v); return string(data), err },
}).ParseFS(bootstrapManifestFiles, "bootstrap_manifests/*.yaml"))

// bootstrapManifestInput is the data for the templates.
type bootstrapManifestInput struct {
	TokenID, TokenSecret string
	KubeletClientUser    string
	Administrators       string
	Balancer, ServerName string
	BalancerAt           netip.AddrPort
	FlannelImage         string
	FlannelConfig        string // net-conf.json
	PoliciesImage        string
	FirstIPv6            bool // pods have addresses of IPv6 first: flannel then wants this one by another argument
	ProxyImage           string
	ProxyCommand         []any
	CoreDNSImage         string
	Corefile             string
	DNSAddresses         []string
}

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
	manifests, err := renderBootstrapManifests(&c.Cluster, len(resolvers.Spec) > 0)
	if err != nil {
		return 0, err
	}
	if err := builtin.Replace(v, manifests); err != nil {
		return 0, err
	}
	return 0, fetchExtras(ctx, v, c)
}

// prune deletes the bootstrap manifests of a namespace, or their drifts, that
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
func renderBootstrapManifests(c *config.Cluster, hasResolvers bool) (map[string][]kubeclient.Object, error) {
	input, err := newBootstrapManifestInput(c, hasResolvers)
	if err != nil {
		return nil, err
	}
	skip := map[string]bool{
		"05-flannel":          c.Network.CNI.Name != config.CNIFlannel,
		"06-network-policies": !c.Network.Policies,
		"10-kube-proxy":       c.Proxy.Disabled,
		"11-core-dns":         c.CoreDNS.Disabled,
		"11-core-dns-svc":     c.CoreDNS.Disabled,
	}
	manifests := map[string][]kubeclient.Object{}
	for _, t := range bootstrapManifestTemplates.Templates() {
		id := strings.TrimSuffix(path.Base(t.Name()), ".yaml")
		if id == "" || skip[id] {
			continue
		}
		var text bytes.Buffer
		if err := t.Execute(&text, input); err != nil {
			return nil, fmt.Errorf("render manifest %s: %w", id, err)
		}
		if manifests[id], err = decodeManifest(&text); err != nil {
			return nil, fmt.Errorf("render manifest %s: %w", id, err)
		}
	}
	for _, inline := range c.InlineManifests {
		id := "20-" + inline.Name
		if manifests[id], err = decodeManifest(strings.NewReader(inline.Contents)); err != nil {
			return nil, fmt.Errorf("cluster.inlineManifests %q: %w", inline.Name, err)
		}
	}
	return manifests, nil
}

func newBootstrapManifestInput(c *config.Cluster, hasResolvers bool) (bootstrapManifestInput, error) {
	id, secret, ok := strings.Cut(string(c.Token), ".")
	if !ok {
		return bootstrapManifestInput{}, errors.New("cluster.token isn't of the form id.secret")
	}
	if len(c.Network.PodSubnets) == 0 || len(c.Network.ServiceSubnets) == 0 {
		return bootstrapManifestInput{}, errors.New("cluster.network has no podSubnets or no serviceSubnets")
	}
	flannel, err := flannelConfig(c.Network.PodSubnets)
	if err != nil {
		return bootstrapManifestInput{}, err
	}
	in := bootstrapManifestInput{
		TokenID: id, TokenSecret: secret,
		KubeletClientUser: secrets.KubeletClientUser,
		Administrators:    config.AdministratorsGroup,
		Balancer:          balancer.URL,
		ServerName:        balancer.ServerName,
		BalancerAt:        netip.MustParseAddrPort(balancer.Address),
		FlannelImage:      c.Network.CNI.Flannel.Image,
		FlannelConfig:     flannel,
		PoliciesImage:     c.Network.PolicyAgent.Image,
		FirstIPv6:         c.Network.PodSubnets[0].Addr().Is6(),
		ProxyImage:        c.Proxy.Image,
		ProxyCommand:      arguments("kube-proxy", proxyFlags(c), c.Proxy.ExtraArgs),
		CoreDNSImage:      c.CoreDNS.Image,
		Corefile:          corefile(c.Network.DNSDomain, hasResolvers),
	}
	for _, addr := range config.ClusterDNS(c.Network.ServiceSubnets) {
		in.DNSAddresses = append(in.DNSAddresses, addr.String())
	}
	return in, nil
}

// proxyFlags: the limits of connection tracking belong to the node, which may
// share them with others, so kube-proxy doesn't set them.
func proxyFlags(c *config.Cluster) map[string]string {
	return map[string]string{
		"cluster-cidr":                      config.Joined(c.Network.PodSubnets, ","),
		"conntrack-max-per-core":            "0",
		"conntrack-min":                     "0",
		"conntrack-tcp-timeout-close-wait":  "0",
		"conntrack-tcp-timeout-established": "0",
		"hostname-override":                 "$(NODE_NAME)",
		"kubeconfig":                        "/etc/kubernetes/kubeconfig",
		"proxy-mode":                        string(c.Proxy.Mode),
	}
}

func flannelConfig(pods []netip.Prefix) (string, error) {
	c := object{"EnableNFTables": true, "EnableIPv4": false, "Backend": object{"Type": "vxlan"}}
	for _, p := range pods {
		if p.Addr().Is4() {
			c["EnableIPv4"], c["Network"] = true, p.Masked().String()
		} else {
			c["EnableIPv6"], c["IPv6Network"] = true, p.Masked().String()
		}
	}
	data, err := json.Marshal(c)
	return string(data), err
}

// corefile is CoreDNS' configuration. CoreDNS doesn't start if it has to
// forward to a resolv.conf without name servers, and without a forwarder the
// loop check has nothing to check.
func corefile(domain string, forward bool) string {
	var b strings.Builder
	fmt.Fprintf(&b, `.:53 {
    errors
    health {
        lameduck 5s
    }
    ready
    kubernetes %s in-addr.arpa ip6.arpa {
        pods insecure
        fallthrough in-addr.arpa ip6.arpa
        ttl 30
    }
    prometheus :9153
`, domain)
	if forward {
		b.WriteString("    forward . /etc/resolv.conf\n    loop\n")
	}
	b.WriteString("    cache 30\n    reload\n    loadbalance\n}\n")
	return b.String()
}

// decodeManifest reads objects from one or more YAML documents. Lists are split.
func decodeManifest(r io.Reader) ([]kubeclient.Object, error) {
	var objects []kubeclient.Object
	stream := yaml.NewDecoder(r)
	for {
		var document map[string]any
		err := stream.Decode(&document)
		if errors.Is(err, io.EOF) {
			return objects, nil
		}
		if err != nil {
			return nil, err
		}
		if document == nil {
			continue // comments only
		}
		o, err := kubeclient.Plain(document)
		if err != nil {
			return nil, err
		}
		for _, item := range unlist(o) {
			if item.APIVersion() == "" || item.Kind() == "" || item.Name() == "" {
				return nil, fmt.Errorf("document %d has an object without apiVersion, kind or metadata.name", len(objects)+1)
			}
			objects = append(objects, item)
		}
	}
}

func unlist(o kubeclient.Object) []kubeclient.Object {
	if strings.HasSuffix(o.Kind(), "List") && o.At("items") != nil {
		return o.Items()
	}
	return []kubeclient.Object{o}
}

// inOrder are all manifests in the order in which they are made.
func inOrder(manifests []resource.Object[[]kubeclient.Object]) []resource.Object[[]kubeclient.Object] {
	slices.SortFunc(manifests, func(a, b resource.Object[[]kubeclient.Object]) int { return strings.Compare(a.ID, b.ID) })
	return manifests
}
