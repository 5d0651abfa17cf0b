package rotateca

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/operations/rollout"
	"github.com/garboard-os/garboard/services/system/configuration"
)

// kubeletPort is where kubelets serve.
const kubeletPort = 10250

func (j job) preflight(ctx context.Context, p *operation.Progress) error {
	return rollout.First(ctx, p, j.Peers, rotating, func(ctx context.Context) (rotation, error) {
		r, warnings, err := j.look(ctx, j.chosen)
		for _, text := range warnings {
			p.Report("%s", text)
		}
		return r, err
	}, func(r rotation) []rollout.Node { return r.Nodes })
}

// same refuses to go on with a node that has joined meanwhile, with a configuration from before: it would be left
// behind with the old authorities.
func (r rotation) same(ctx context.Context, client *kubeclient.Client) error {
	nodes, err := rollout.Nodes(ctx, client)
	for _, n := range nodes {
		if !slices.ContainsFunc(r.Nodes, func(known rollout.Node) bool { return known.Name == n.Name() }) {
			return rollout.Lasting{Err: fmt.Errorf("node %s has joined since the rotation began, and accepts only the old authorities: begin again", n.Name())}
		}
	}
	return err
}

// look asks all nodes. The error names everything that keeps the rotation from beginning.
func (o Options) look(ctx context.Context, chosen []string) (r rotation, warnings []string, err error) {
	if err := o.Peers.Check(); err != nil {
		return r, nil, err
	}
	own, err := configuration.Config(o.Store)
	if err != nil {
		return r, nil, err
	}
	if own.SelfHosted() {
		return r, nil, errors.New("the control plane is self-hosted: convert it first, by `gbctl convert-k8s`")
	}
	if own.Cluster.Secret == "" && slices.Contains(chosen, config.AtRestKey) {
		return r, nil, errors.New("cluster.secret is missing, so Secrets in etcd have no key to replace: name what else is replaced, such as --machine --kubernetes --etcd --aggregator --service-account")
	}
	r = rotation{Fresh: true, Issued: true, Former: map[string][]config.PEM{}}
	r.Token, _, _ = strings.Cut(string(own.Cluster.Token), ".")
	if r.Nodes, err = rollout.Survey(ctx, o.Kubernetes, o.Peers, func(n rollout.Node) error {
		return o.ask(ctx, node{n}, own, chosen, &r)
	}); err != nil {
		return r, nil, err
	}
	r.complete(own, chosen)
	if !r.Fresh {
		warnings = append(warnings, "the nodes have accepted authorities, as after a rotation that failed: all get those with which this node issues, and nothing else stays accepted; no new authority is made")
	}
	return r, warnings, nil
}

// complete adds what is known from the configuration of this node.
func (r *rotation) complete(own *config.Config, chosen []string) {
	if !r.Fresh {
		r.New = map[string]config.PEM{}
	}
	for _, name := range chosen {
		all := pairs(own, name)
		if _, found := authority(name); !found {
			r.Former[name] = append(r.Former[name], lists.Of(all, func(k config.CertKey) config.PEM { return k.Crt })...)
		}
		if !r.Fresh {
			r.New[name] = all[0].Crt
			r.Former[name] = slices.DeleteFunc(r.Former[name], func(crt config.PEM) bool { return slices.Equal(crt, all[0].Crt) })
		}
	}
}

// ask completes the rotation by what a node itself says.
func (o Options) ask(ctx context.Context, n node, own *config.Config, chosen []string, r *rotation) error {
	has, err := o.read(ctx, n)
	if err != nil {
		return err
	}
	for _, name := range n.chosen(chosen) {
		a, found := authority(name)
		if !found {
			continue
		}
		issues, accepts := a.Of(has)
		mine, _ := a.Of(own)
		same := slices.Equal(issues.Crt, mine.Crt)
		r.Issued = r.Issued && same
		r.Fresh = r.Fresh && same && len(*accepts) == 0
		for _, k := range append([]config.CertKey{*issues}, *accepts...) {
			if !slices.ContainsFunc(r.Former[name], func(crt config.PEM) bool { return slices.Equal(crt, k.Crt) }) {
				r.Former[name] = append(r.Former[name], k.Crt)
			}
		}
	}
	statuses, err := o.healthy(ctx, n)
	digests, derr := own.Digests()
	for _, k := range keys {
		digest := statuses[secrets.KubernetesID].Authorities[k.Name]
		if slices.Contains(chosen, k.Name) && (len(pairs(own, k.Name)) > 1 || digest != "" && digest != digests[k.Name]) {
			r.Fresh = false
		}
	}
	return errors.Join(err, derr)
}

// read returns the certificates of the authorities in the configuration of a node.
func (o Options) read(ctx context.Context, n node) (*config.Config, error) {
	has, _, err := rollout.Config(ctx, o.Peers, n.Node)
	if err != nil {
		return nil, err
	}
	c := &config.Config{}
	for _, a := range config.Authorities {
		issues, accepts := a.Of(c)
		if text := has.Text(append(slices.Clone(a.Issuing), "crt")...); text != "" {
			if err := issues.Crt.UnmarshalText([]byte(text)); err != nil {
				return nil, fmt.Errorf("its %s: %w", strings.Join(a.Issuing, "."), err)
			}
		}
		for _, entry := range has.List(a.Accepted...) {
			var k config.CertKey
			if err := k.Crt.UnmarshalText([]byte(entry.Text("crt"))); err != nil {
				return nil, fmt.Errorf("its %s: %w", strings.Join(a.Accepted, "."), err)
			}
			*accepts = append(*accepts, k)
		}
	}
	return c, nil
}

func encode(text []byte) string { return base64.StdEncoding.EncodeToString(text) }

// move gives a node a phase, and waits until it is healthy in it.
func (o Options) move(ctx context.Context, p *operation.Progress, r rotation, n node, chosen []string, to phase) error {
	began := time.Now()
	own, err := configuration.Config(o.Store)
	if err != nil {
		return err
	}
	if err := rollout.Poll(ctx, p, func(ctx context.Context) error {
		c, err := o.target(ctx, r, n, chosen, to)
		if err != nil {
			return err
		}
		return rollout.Change(ctx, o.Peers, n.Node, patchOf(c, n, chosen, to != accepted || r.Fresh))
	}); err != nil {
		return err
	}
	if err := rollout.Poll(ctx, p, func(ctx context.Context) error {
		if err := o.settled(ctx, r, n, chosen, to); err != nil {
			return err
		}
		return cmp.Or(o.probe(ctx, r, n, chosen, to, own), rollout.Serves(ctx, p, o.Peers, n.Node))
	}); err != nil {
		return err
	}
	p.Report("healthy after %.1f s", time.Since(began).Seconds())
	return nil
}

// settled says why a node isn't in a phase yet, or not healthy.
func (o Options) settled(ctx context.Context, r rotation, n node, chosen []string, to phase) error {
	c, err := o.target(ctx, r, n, chosen, to)
	if err != nil {
		return err
	}
	want, err := c.Digests()
	if err != nil {
		return err
	}
	statuses, err := o.healthy(ctx, n)
	if err != nil {
		return err
	}
	for id, s := range statuses {
		for name, digest := range s.Authorities {
			if slices.Contains(chosen, name) && digest != want[name] {
				return fmt.Errorf("the files of %s aren't those of the new %s authority yet: gbctl -n %s logs controller-runtime", id, name, n.Address)
			}
		}
	}
	return nil
}

// healthy says why a node isn't healthy, or its programs don't run with the files that it
// has. It returns the statuses of the files.
func (o Options) healthy(ctx context.Context, n node) (map[string]secrets.StatusSpec, error) {
	if err := rollout.Runs(ctx, o.Peers, n.Node, "trustd"); err != nil {
		return nil, err
	}
	statuses, err := rollout.Specs[secrets.StatusSpec](o.Peers.Resources(ctx, n.Address, secrets.Statuses.Type(), ""))
	if err != nil || !n.ControlPlane {
		return statuses, err
	}
	members, err := rollout.Specs[etcd.StatusSpec](o.Peers.Resources(ctx, n.Address, etcd.Statuses.Type(), etcd.StatusID))
	if err != nil {
		return statuses, err
	}
	switch member := members[etcd.StatusID]; {
	case !member.Ready:
		return statuses, errors.New("etcd doesn't serve")
	case member.Files != statuses[secrets.EtcdID].Version:
		return statuses, errors.New("etcd runs with its former files")
	}
	for _, name := range controlplane.Programs {
		run, err := rollout.Running(ctx, o.Peers, n.Node, name)
		if err == nil {
			err = run.Unhealthy()
		}
		if err != nil {
			return statuses, err
		}
		if run.Secrets() != statuses[secrets.KubernetesID].Programs[name] {
			return statuses, fmt.Errorf("%s runs with its former files", name)
		}
	}
	return statuses, nil
}

// probe tries the servers of a node themselves: whether they accept the new authorities,
// issue with them, and refuse the old ones. own has the keys of before the phase.
func (o Options) probe(ctx context.Context, r rotation, n node, chosen []string, to phase, own *config.Config) error {
	for _, name := range chosen {
		a, found := authority(name)
		if !found {
			continue
		}
		port := map[string]int{config.MachineAuthority: api.Port, config.KubernetesAuthority: kubeletPort}[name]
		if to == issuing && port != 0 {
			if err := o.IssuedBy(ctx, netip.AddrPortFrom(n.Address, uint16(port)), r.New[name]); err != nil {
				return fmt.Errorf("port %d: %w", port, err)
			}
		}
		ask := o.AcceptedBy[name]
		if ask == nil || !n.ControlPlane && name != config.MachineAuthority {
			continue
		}
		issues, accepts := a.Of(own)
		for _, k := range append([]config.CertKey{*issues}, *accepts...) {
			isNew := slices.Equal(k.Crt, r.New[name])
			switch {
			case len(k.Key) == 0 || isNew && to == former:
			case to == accepted && isNew:
				if err := ask(ctx, n.Address, k); err != nil {
					return fmt.Errorf("the new %s authority isn't accepted yet: %w", name, err)
				}
			case to == dropped && !isNew:
				if err := ask(ctx, n.Address, k); err == nil {
					return fmt.Errorf("the old %s authority is still accepted", name)
				}
			}
		}
	}
	return nil
}

// IssuedBy fails unless a server has a certificate of an authority. It ends the handshake
// before it would have to show a certificate.
func IssuedBy(ctx context.Context, server netip.AddrPort, authority config.PEM) error {
	return pki.Probe(ctx, server.String(), tls.VersionTLS12, func(served *x509.Certificate) error {
		if !pki.SignedBy(served, authority) {
			return errors.New("its certificate isn't of the new authority yet")
		}
		return nil
	})
}

// noneIssues fails if a node still issues with a new authority: the others must accept it.
func (o Options) noneIssues(ctx context.Context, r rotation, chosen []string) error {
	for _, n := range r.Nodes {
		has, err := o.read(ctx, node{n})
		if mine := []string{config.AtRestKey}; err == nil && n.ControlPlane && slices.Contains(chosen, mine[0]) && o.settled(ctx, r, node{n}, mine, former) != nil {
			err = o.settled(ctx, r, node{n}, mine, accepted)
		}
		if err != nil {
			return fmt.Errorf("node %s: %w", n.Name, err)
		}
		for _, name := range chosen {
			if a, found := authority(name); found {
				if issues, _ := a.Of(has); slices.Equal(issues.Crt, r.New[name]) {
					return fmt.Errorf("node %s still issues with the new %s authority, so all nodes go on accepting both: run gbctl rotate-ca again", n.Name, name)
				}
			}
		}
	}
	return nil
}
