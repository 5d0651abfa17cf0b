package controlplane

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
)

const (
	// madeKey is the prefix of the keys of what was made of the manifests in the configuration: namespace, object, and
	// digest of the object in its manifest. They stay.
	madeKey = "/garboard.dev/made/"
	// establishWait is how long a new kind may take until there can be objects of it; without, these are tried again.
	establishWait = 10 * time.Second

	resultType = "ManifestResults.kubernetes.garboard.dev"
)

// ManifestResult is what came of a bootstrap manifest.
type ManifestResult struct {
	Problems []string `yaml:"problems,omitempty" column:"PROBLEMS"` // objects that aren't there, and why
	// Deleted are objects that were made once, and aren't there any more. Who deletes one doesn't get it again.
	Deleted []string `yaml:"deleted,omitempty" column:"DELETED"`
}

// String is the result as a column of a table.
func (r ManifestResult) String() string {
	return cmp.Or(strings.Join(slices.Concat(r.Problems, r.Deleted), "; "), "made")
}

// ManifestResults have the namespaces and IDs of the manifests that they belong to.
var ManifestResults = resource.Define[ManifestResult](resource.Definition{Type: resultType, Kind: "ManifestResult", Namespace: namespace})

// application is one attempt to make what is missing.
type application struct {
	client *kubeclient.Client
	log    *slog.Logger
	made   map[string]bool // keys in etcd
	parts  []*part         // in the order in which they are made
}

// part is an object of a manifest.
type part struct {
	kubeclient.Object
	manifest resource.Meta
	key      string // in etcd once it was made; "": none, it is the node's own
	missing  bool
	why      error // why it can't be made; nil: it can, as far as is known
}

// look finds out what there is. An object that can't be looked for is a part with a problem. The error is that of an
// API server that doesn't serve: the first object is the node's own, and is of a kind that each of them has.
func (a *application) look(ctx context.Context, manifests []resource.Object[Manifest]) error {
	for _, m := range manifests {
		for _, o := range m.Spec.Objects {
			p := &part{Object: o, manifest: m.Meta}
			if !Own(m.Meta) {
				shown, err := yaml.Marshal(o) // without the content of a Secret, which has no business there
				if err != nil {
					return fmt.Errorf("%s: %w", o, err)
				}
				name := strings.TrimPrefix(o.String(), "/")
				p.key = fmt.Sprintf("%s%s/%s/%x", madeKey, cmp.Or(o.Namespace(), "default"), name, sha256.Sum256(shown))
			}
			p.missing, p.why = a.client.Missing(ctx, o)
			var refused *kubeclient.StatusError
			if p.why != nil && (len(a.parts) == 0 || !errors.As(p.why, &refused)) {
				return p.why
			}
			a.parts = append(a.parts, p)
		}
	}
	slices.SortStableFunc(a.parts, compare)
	return nil
}

// ranks are the order of making, by kind: what may refuse other objects comes after them. What has a rank above
// others' asks a Service, and waits for its pods.
var ranks = map[string]int{
	"Namespace": -2, "CustomResourceDefinition": -1, "APIService": 2,
	"ValidatingWebhookConfiguration": 1, "MutatingWebhookConfiguration": 1,
	"ValidatingAdmissionPolicyBinding": 1, "MutatingAdmissionPolicyBinding": 1,
}

// compare is the order of making. The node's own objects are first: they don't wait for others.
func compare(a, b *part) int {
	return cmp.Or(cmp.Compare(min(len(a.key), 1), min(len(b.key), 1)), cmp.Compare(ranks[a.Kind()], ranks[b.Kind()]))
}

// open reports whether there is something to do for a part: it is to be made, or to be recorded.
func (a *application) open(p *part) bool {
	return p.missing && p.key == "" || p.key != "" && p.why == nil && !a.made[p.key]
}

// make makes what is missing. It continues after an object that can't be made (part.why), so that one bad manifest
// doesn't keep the rest of the cluster from starting. note records what was made of the configuration's.
func (a *application) make(ctx context.Context, note func(key string) error) error {
	for _, p := range a.parts {
		if !a.open(p) || ctx.Err() != nil {
			continue
		}
		if p.missing {
			if p.why = a.create(ctx, p); p.why != nil {
				continue
			}
		}
		if p.key != "" {
			if err := note(p.key); err != nil {
				return fmt.Errorf("record %s in etcd: %w", p, err)
			}
			a.made[p.key] = true
		}
	}
	return ctx.Err()
}

// create makes one object, unless others must run before.
func (a *application) create(ctx context.Context, p *part) error {
	if ranks[p.Kind()] > 0 {
		if service, err := Unserved(ctx, a.client, p.Object); err != nil || service.Name != "" {
			return cmp.Or(err, fmt.Errorf("%s waits for a ready pod of Service %s/%s: kubectl -n %[2]s get pods", p, service.Namespace, service.Name))
		}
	}
	created, err := a.client.CreateIfMissing(ctx, p.Object)
	if created {
		a.log.Info("created " + p.String())
	}
	p.missing = err != nil
	if created && p.Kind() == "CustomResourceDefinition" {
		wait, cancel := context.WithTimeout(ctx, establishWait)
		defer cancel()
		for range sleep.Every(wait, readyPoll) {
			if o, err := a.client.Get(wait, p.Ref()); err == nil && o.Condition("Established") {
				break
			}
		}
	}
	return err
}

// result is what came of a manifest.
func (a *application) result(m resource.Meta) (r ManifestResult) {
	for _, p := range a.parts {
		switch {
		case p.manifest.ID != m.ID || p.manifest.Namespace != m.Namespace:
		case p.why != nil:
			r.Problems = append(r.Problems, p.why.Error())
		case p.missing && a.made[p.key]:
			r.Deleted = append(r.Deleted, p.String()+": deleted by an administrator, and not made again")
		case p.missing:
			r.Problems = append(r.Problems, p.String()+" isn't made yet")
		}
	}
	return r
}

// Unserved is a Service without a ready endpoint that the API server asks because of an object: the configuration of
// webhooks, or an APIService.
func Unserved(ctx context.Context, client *kubeclient.Client, o kubeclient.Object) (none kubeclient.Ref, err error) {
	of := func(webhook kubeclient.Object) any { return webhook.At("clientConfig", "service") }
	asked := append(lists.Of(o.List("webhooks"), of), o.At("spec", "service"))
	ready := func(slice kubeclient.Object) bool {
		return slices.ContainsFunc(slice.List("endpoints"), func(e kubeclient.Object) bool { return e.At("conditions", "ready") != false })
	}
	for _, s := range asked {
		m, _ := s.(map[string]any)
		service := kubeclient.Object(m)
		if service.Text("name") == "" {
			continue // it asks a URL, or nobody
		}
		ref := kubeclient.Ref{APIVersion: "v1", Kind: "Service", Namespace: service.Text("namespace"), Name: service.Text("name")}
		if s, err := client.Get(ctx, ref); err == nil && s.Text("spec", "type") == "ExternalName" {
			continue // it is elsewhere, and has no endpoints
		}
		ref = kubeclient.Ref{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice", Namespace: ref.Namespace}
		found, err := client.List(ctx, ref, kubeclient.Selection{Labels: "kubernetes.io/service-name=" + service.Text("name")})
		if err != nil || !slices.ContainsFunc(found.Items(), ready) {
			ref.Name = service.Text("name")
			return ref, err
		}
	}
	return none, nil
}

// readMade reads the keys of what was made.
func readMade(ctx context.Context, kv clientv3.KV) (map[string]bool, error) {
	found, err := kv.Get(ctx, madeKey, clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		return nil, fmt.Errorf("read %s in etcd: %w", madeKey, err)
	}
	made := map[string]bool{}
	for _, kv := range found.Kvs {
		made[string(kv.Key)] = true
	}
	return made, nil
}
