package rotateca

import (
	"bytes"
	"cmp"
	"context"
	"crypto/x509"
	"fmt"
	"slices"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/operations/rollout"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
)

// phase of a rotation on a node.
type phase string

const (
	former   phase = "issue and accept the old authorities only" // as before
	accepted phase = "accept the new authorities"
	issuing  phase = "issue with the new authorities"
	dropped  phase = "accept the new authorities only"
)

// rotation is what is replaced by what. It has certificates and public keys only.
type rotation struct {
	Nodes []rollout.Node `json:"nodes"`
	// Token is the ID of cluster.token before.
	Token string `json:"token,omitempty"`
	// Fresh: nothing of an earlier rotation is left, so new authorities are made. Otherwise
	// all nodes get those with which the coordinator issues, and nothing is made.
	Fresh bool `json:"fresh"`
	// Issued: all nodes issue with the new authorities already.
	Issued bool                    `json:"issued,omitempty"`
	New    map[string]config.PEM   `json:"new"`    // by name
	Former map[string][]config.PEM `json:"former"` // by name
}

// needless reports whether a phase changes nothing, in a rotation that isn't fresh. The shared keys of
// other nodes aren't known, and are replaced in any case.
func (r rotation) needless(name string, to phase) bool {
	if r.Fresh {
		return false
	}
	if _, found := authority(name); !found {
		return to == accepted
	}
	return r.Issued && (to == accepted || to == issuing)
}

// rotating is the rotation in the record.
var rotating = operation.Data[rotation]{Key: "rotation"}

// node of the cluster.
type node struct{ rollout.Node }

// chosen are those of the authorities that a node has.
func (n node) chosen(all []string) []string {
	return lists.Some(all, func(name string) (string, bool) {
		a, found := authority(name)
		return name, n.ControlPlane || found && a.Workers
	})
}

// authority is the one with a name. If found is false, it is a key.
func authority(name string) (a config.Authority, found bool) {
	all := slices.Concat(config.Authorities, keys)
	a = all[slices.IndexFunc(all, func(a config.Authority) bool { return a.Name == name })]
	return a, a.Of != nil
}

// nodes in the order in which they get a phase: the coordinator first, as it has the keys,
// and last where it loses the old ones; in between the control planes before the workers.
func (r rotation) nodes(o Options, to phase) []node {
	own, err := network.Addresses.Get(o.Store, network.AddressID)
	rank := func(n node) int {
		switch {
		case err == nil && n.Address == own.Spec.Primary.Unmap():
			return map[bool]int{false: 0, true: 3}[to == dropped]
		case n.ControlPlane:
			return 1
		}
		return 2
	}
	all := lists.Of(r.Nodes, func(n rollout.Node) node { return node{n} })
	slices.SortStableFunc(all, func(a, b node) int { return cmp.Compare(rank(a), rank(b)) })
	return all
}

// make gives this node the new authorities, with their keys.
func (o Options) make(ctx context.Context, p *operation.Progress, chosen []string) (rotation, error) {
	r, err := rotating.Get(p)
	if err != nil || !r.Fresh || len(r.New) > 0 {
		return r, err
	}
	own, err := configuration.Config(o.Store)
	if err != nil {
		return r, err
	}
	next := *own
	for _, name := range chosen {
		// What this node already accepts is of an attempt that ended before it was recorded.
		all := pairs(&next, name)
		if len(all) == 1 {
			made, err := another(name, all[0])
			if err != nil {
				return r, err
			}
			all = append(all, made)
			setPairs(&next, name, all)
		}
		if r.New == nil {
			r.New = map[string]config.PEM{}
		}
		r.New[name] = all[1].Crt
	}
	me := r.nodes(o, accepted)[0]
	patch := patchOf(&next, me, chosen, true)
	if err := rollout.Poll(ctx, p, func(ctx context.Context) error { return rollout.Change(ctx, o.Peers, me.Node, patch) }); err != nil {
		return r, err
	}
	return r, rotating.Put(p, r)
}

// newAuthority makes an authority of the same kind.
func newAuthority(old config.CertKey) (config.CertKey, error) {
	cert, err := pki.ParseCert(old.Crt)
	if err != nil {
		return config.CertKey{}, err
	}
	algorithm := map[x509.PublicKeyAlgorithm]pki.Algorithm{x509.RSA: pki.RSA, x509.Ed25519: pki.Ed25519, x509.ECDSA: pki.ECDSA}[cert.PublicKeyAlgorithm]
	ca, err := pki.NewCA(algorithm, cert.Subject, time.Now(), pki.CAValidity)
	return config.CertKey{Crt: ca.Cert, Key: ca.Key}, err
}

// target is the configuration of a node in a phase, as far as its authorities go. The keys
// are those that this node has.
func (o Options) target(ctx context.Context, r rotation, n node, chosen []string, to phase) (*config.Config, error) {
	has, err := o.read(ctx, n)
	own, none := configuration.Config(o.Store)
	if err = cmp.Or(err, none); err != nil {
		return nil, err
	}
	c := *own
	for _, name := range chosen {
		_, certified := authority(name)
		known := pairs(&c, name)
		pair := func(crt config.PEM) config.CertKey {
			i := slices.IndexFunc(known, func(k config.CertKey) bool { return bytes.Equal(k.Crt, crt) })
			if i < 0 || !n.ControlPlane {
				return config.CertKey{Crt: crt}
			}
			return known[i]
		}
		crt := r.New[name]
		switch {
		case to == accepted && !r.Fresh:
			crt = pairs(has, name)[0].Crt
		case to == accepted || to == former:
			crt = r.Former[name][0]
		}
		all := []config.CertKey{pair(crt)}
		if n.ControlPlane && len(all[0].Key) == 0 && (to != accepted || r.Fresh) {
			return nil, rollout.Lasting{Err: fmt.Errorf("this node doesn't have the key of the %s authority: its coordinator ended before another control plane had it; run gbctl rotate-ca again", name)}
		}
		if to == accepted || to == issuing {
			for _, other := range append([]config.PEM{r.New[name]}, r.Former[name]...) {
				if k := pair(other); !bytes.Equal(other, crt) && (certified || len(k.Key) > 0) {
					all = append(all, k)
				}
			}
		}
		setPairs(&c, name, all)
	}
	return &c, nil
}

// patchOf is the strategic merge patch that gives a node the authorities of c that are
// accepted and, if issues is set, those that issue.
func patchOf(c *config.Config, n node, chosen []string, issues bool) map[string]any {
	tree := map[string]any{}
	put := func(path []string, value any) {
		at := tree
		for _, key := range path[:len(path)-1] {
			if at[key] == nil {
				at[key] = map[string]any{}
			}
			at = at[key].(map[string]any)
		}
		at[path[len(path)-1]] = value
	}
	value := func(name string, k config.CertKey) any {
		switch m := map[string]any{"crt": encode(k.Crt)}; {
		case name == config.ServiceAccountKey:
			return encode(k.Key)
		case name == config.AtRestKey:
			return string(k.Key)
		case len(k.Key) == 0 || !n.ControlPlane:
			return m
		default:
			m["key"] = encode(k.Key)
			return m
		}
	}
	for _, name := range chosen {
		a, found := authority(name)
		all := pairs(c, name)
		var list any // null removes it
		if len(all) > 1 {
			var entries []any
			if found {
				entries = []any{map[string]any{"$patch": "replace"}}
			}
			list = append(entries, lists.Of(all[1:], func(k config.CertKey) any { return value(name, k) })...)
		}
		put(a.Accepted, list)
		if issues {
			put(a.Issuing, value(name, all[0]))
		}
	}
	return tree
}
