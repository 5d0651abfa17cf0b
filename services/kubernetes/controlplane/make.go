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

	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
)

const (
	// madeKey is the prefix of the keys of what was made of the manifests in the configuration: namespace, object, and
	// digest of the object in its manifest. They stay.
	madeKey = "/garboard.dev/made/"
	// establishWait is how long new kinds may take until there can be objects of them; without, these are tried again.
	establishWait = 10 * time.Second

	resultType = "ManifestResults.kubernetes.garboard.dev"
)

// ManifestResult is what came of a bootstrap manifest.
type ManifestResult struct {
	Problems []string `yaml:"problems,omitempty"` // objects that aren't there, and why
	// Deleted are objects that were made once, and aren't there any more. Who deletes one doesn't get it again.
	Deleted []string `yaml:"deleted,omitempty"`
}

// String is the result as a column of a table.
func (r ManifestResult) String() string {
	all := slices.Clone(r.Problems)
	for _, name := range r.Deleted {
		all = append(all, name+": deleted by an administrator, and not made again")
	}
	return cmp.Or(strings.Join(all, "; "), "made")
}

// ManifestResults have the namespaces and IDs of the manifests that they belong to.
var ManifestResults = resource.Define[ManifestResult](resource.Definition{
	Type: resultType, Kind: "ManifestResult", Namespace: namespace,
	Columns: []resource.Column{{Name: "RESULT", Value: func(spec any) string { return spec.(ManifestResult).String() }}},
})

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

// look finds out what there is. An object that can't be looked for is a part with a problem. The error is that of an API
// server that doesn't serve: the first object is the node's own, and is of a kind that each of them has.
func (a *application) look(ctx context.Context, manifests []resource.Object[Manifest]) error {
	for _, m := range manifests {
		for _, o := range m.Spec.Objects {
			p := &part{Object: o, manifest: m.Meta}
			if !Own(m.Meta) {
				shown, err := yaml.Marshal(o) // without the content of a Secret, which has no business there
				if err != nil {
					return fmt.Errorf("%s: %w", o, err)
				}
				p.key = fmt.Sprintf("%s%s/%s/%x", madeKey, cmp.Or(o.Namespace(), "default"), strings.TrimPrefix(o.String(), "/"), sha256.Sum256(shown))
			}
			p.missing, p.why = a.client.Missing(ctx, o)
			var refused *kubeclient.StatusError
			if p.why != nil && (len(a.parts) == 0 || !errors.As(p.why, &refused)) {
				return p.why
			}
			a.parts = append(a.parts, p)
		}
	}
	slices.SortStableFunc(a.parts, func(a, b *part) int { return cmp.Compare(a.rank(), b.rank()) })
	return nil
}

// The ranks of objects. What may refuse other objects comes after them, and what asks a Service after its pods run.
const (
	rankNamespace = iota
	rankKind
	rankOther
	rankAdmission
	rankAPI
	rankCount
)

// rank is the order of making: the node's own objects don't wait for others.
func (p *part) rank() (rank int) {
	if p.key != "" {
		rank = rankCount
	}
	group, _, _ := strings.Cut(p.APIVersion(), "/")
	switch kind := p.Kind(); {
	case group == "v1" && kind == "Namespace":
		return rank + rankNamespace
	case group == "apiextensions.k8s.io":
		return rank + rankKind
	case group == "admissionregistration.k8s.io" && (strings.HasSuffix(kind, "Configuration") || strings.HasSuffix(kind, "Binding")):
		return rank + rankAdmission
	case group == "apiregistration.k8s.io":
		return rank + rankAPI
	}
	return rank + rankOther
}

// open reports whether there is something to do for a part: it is to be made, or to be recorded.
func (a *application) open(p *part) bool {
	return p.missing && p.key == "" || p.key != "" && p.why == nil && !a.made[p.key]
}

// make makes what is missing. It continues after an object that can't be made (part.why), so that one bad manifest doesn't
// keep the rest of the cluster from starting. note records what was made of the configuration's.
func (a *application) make(ctx context.Context, note func(key string) error) error {
	var kinds []*part // new ones
	for _, p := range a.parts {
		if !a.open(p) || ctx.Err() != nil {
			continue
		}
		if len(kinds) > 0 && p.rank() != kinds[0].rank() {
			a.establish(ctx, kinds)
			kinds = nil
		}
		if p.missing {
			if p.why = a.create(ctx, p); p.why != nil {
				continue
			}
			if p.Kind() == "CustomResourceDefinition" {
				kinds = append(kinds, p)
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
	if rank := p.rank() % rankCount; rank == rankAdmission || rank == rankAPI {
		for _, service := range Backends(p.Object) {
			if serves, err := Serves(ctx, a.client, service); err != nil || !serves {
				return cmp.Or(err, fmt.Errorf("%s waits for a ready pod of Service %s/%s: kubectl -n %[2]s get pods", p, service.Namespace, service.Name))
			}
		}
	}
	created, err := a.client.CreateIfMissing(ctx, p.Object)
	if created {
		a.log.Info("created " + p.String()) // S-281
	}
	p.missing = err != nil
	return err
}

// establish waits until there can be objects of new kinds.
func (a *application) establish(ctx context.Context, kinds []*part) {
	ctx, cancel := context.WithTimeout(ctx, establishWait)
	defer cancel()
	for _, p := range kinds {
		for {
			if o, err := a.client.Get(ctx, p.Ref()); err == nil && o.Condition("Established") {
				break
			}
			if !sleep.For(ctx, readyPoll) {
				return
			}
		}
	}
}

// result is what came of a manifest.
func (a *application) result(m resource.Meta) (r ManifestResult) {
	for _, p := range a.parts {
		switch {
		case p.manifest.ID != m.ID || p.manifest.Namespace != m.Namespace:
		case p.why != nil:
			r.Problems = append(r.Problems, p.why.Error())
		case p.missing && a.made[p.key]:
			r.Deleted = append(r.Deleted, p.String())
		case p.missing:
			r.Problems = append(r.Problems, p.String()+" isn't made yet")
		}
	}
	return r
}

// Backends are the Services that the API server asks because of an object.
func Backends(o kubeclient.Object) (services []kubeclient.Ref) {
	asked := []any{o.At("spec", "service")} // of an APIService
	for _, w := range o.List("webhooks") {
		asked = append(asked, w.At("clientConfig", "service"))
	}
	for _, s := range asked {
		if s, ok := s.(map[string]any); ok {
			s := kubeclient.Object(s)
			services = append(services, kubeclient.Ref{APIVersion: "v1", Kind: "Service", Namespace: s.Text("namespace"), Name: s.Text("name")})
		}
	}
	return services
}

// Serves reports whether a Service has a ready endpoint.
func Serves(ctx context.Context, client *kubeclient.Client, service kubeclient.Ref) (bool, error) {
	found, err := client.List(ctx, kubeclient.Ref{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice", Namespace: service.Namespace},
		kubeclient.Selection{Labels: "kubernetes.io/service-name=" + service.Name})
	for _, slice := range found.Items() {
		for _, e := range slice.List("endpoints") {
			if e.At("conditions", "ready") != false {
				return true, nil
			}
		}
	}
	return false, err
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
