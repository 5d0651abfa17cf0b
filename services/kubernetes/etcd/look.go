package etcd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
)

const (
	// maxCandidates limits how many addresses are asked: a cluster has at most
	// seven control planes, and each may be known by a name and by an address.
	maxCandidates = 16
	// resolveTimeout limits the query for the endpoint's addresses: a dead name
	// server must leave time to ask the known addresses.
	resolveTimeout = 2 * time.Second
)

// seen is evidence of a cluster, found before one is begun here.
type seen struct {
	what      string // as a sentence
	beginning bool   // a node is beginning one now
	lives     bool   // it has a quorum
}

// begun is always true: any evidence means that a cluster has begun elsewhere.
func (seen) begun() bool { return true }

// living reports whether the evidence prevents a recovery: a cluster that lost its quorum doesn't.
func (s seen) living() bool { return s.lives || s.beginning }

// look searches for a cluster: it asks the API server at the endpoint, and etcd and the
// machine API of the addresses that may be control planes. Only answers with a
// certificate of this cluster's authorities count.
//
// It can't find a cluster behind a network that is cut off meanwhile, or on control planes
// that are neither in the configuration, nor in the journal, nor in given, while no API
// server answers at the endpoint.
func (e *Etcd) look(ctx context.Context, r record, given []string) ([]seen, error) {
	cfg, err := configuration.Config(e.o.Store)
	me, none := e.o.self()
	if err = cmp.Or(err, none); err != nil {
		return nil, err
	}
	if err := e.o.Peers.Check(); err != nil {
		return nil, err
	}
	// A connection of an earlier search may lead to a machine that was cut off since,
	// or through a load balancer to another machine than a new connection would.
	e.o.Peers.Close()
	r.Peers = append(slices.Clone(r.Peers), e.remembered(me)...)
	hosts := e.candidates(ctx, cfg, r, given)
	found := make([][]seen, 1+2*len(hosts))
	var wg sync.WaitGroup
	wg.Go(func() { found[0] = e.askAPIServer(ctx, cfg.Cluster.ControlPlane.Endpoint.String(), me) })
	for i, host := range hosts {
		wg.Go(func() { found[1+2*i] = e.askEtcd(ctx, host) })
		wg.Go(func() { found[2+2*i] = e.askMachine(ctx, host) })
	}
	wg.Wait()
	return slices.Concat(found...), nil
}

// candidates are the addresses of other nodes that may be control planes: behind the
// endpoint, in the names of the API server, in the journal, and given.
func (e *Etcd) candidates(ctx context.Context, cfg *config.Config, r record, given []string) []netip.Addr {
	own := []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback(), netip.IPv4Unspecified(), netip.IPv6Unspecified()}
	if a, err := network.Addresses.Get(e.o.Store, network.AddressID); err == nil {
		own = append(append(own, a.Spec.Primary), lists.Of(a.Spec.All, netip.Prefix.Addr)...)
	}
	var all []netip.Addr
	add := func(addrs ...netip.Addr) {
		for _, a := range addrs {
			a = a.Unmap().WithZone("")
			if len(all) < maxCandidates && !slices.Contains(own, a) && !slices.Contains(all, a) {
				all = append(all, a)
			}
		}
	}
	add(hosts(r.Peers)...)
	for _, text := range slices.Concat(given[:min(len(given), maxCandidates)], cfg.Cluster.APIServer.CertSANs, cfg.Machine.CertSANs) {
		add(addresses(text)...)
	}
	host := cfg.Cluster.ControlPlane.Endpoint.Hostname()
	if addrs := addresses(host); len(addrs) > 0 {
		add(addrs...)
	} else {
		ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
		defer cancel()
		if addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host); err == nil {
			add(addrs...)
		}
	}
	return all
}

// addresses is the address in the text, with or without a port.
func addresses(text string) []netip.Addr {
	if a, err := netip.ParseAddrPort(text); err == nil {
		return []netip.Addr{a.Addr()}
	}
	if a, err := netip.ParseAddr(strings.Trim(text, "[]")); err == nil {
		return []netip.Addr{a}
	}
	return nil
}

// askAPIServer counts an API server with any answer: behind it there is a
// cluster, or there was one until its etcd lost the quorum.
func (e *Etcd) askAPIServer(ctx context.Context, endpoint string, me self) []seen {
	c, err := e.api()
	if err != nil {
		return nil
	}
	defer c.Close()
	// The API server answers this request without etcd.
	_, err = c.Raw(ctx, "/version")
	if status, ok := errors.AsType[*kubeclient.StatusError](err); ok {
		return []seen{{what: fmt.Sprintf("an API server of this cluster answers at %s, with %d: the cluster has begun elsewhere; once it is well, this node joins it by itself", endpoint, status.Code)}}
	} else if unknownAuthority(err) {
		return []seen{{lives: true, what: fmt.Sprintf("an API server of another cluster answers at %s: %s", endpoint, remedy)}}
	} else if err != nil {
		return nil
	}
	found, err := c.Raw(ctx, apiServers)
	switch {
	case err != nil:
		return []seen{{what: fmt.Sprintf("an API server of this cluster answers at %s, and can't read from its etcd: the cluster has begun elsewhere; once it is well, this node joins it by itself", endpoint)}}
	case len(others(found, me)) > 0:
		return []seen{{lives: true, what: fmt.Sprintf("the cluster lives already, with etcd at %s: this node joins it by itself", strings.Join(others(found, me), ", "))}}
	}
	return []seen{{lives: true, what: fmt.Sprintf("an API server of this cluster answers at %s: the cluster has begun already", endpoint)}}
}

// askEtcd finds a member of this cluster's etcd: it shows a certificate of its
// authority.
func (e *Etcd) askEtcd(ctx context.Context, host netip.Addr) []seen {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout) // its client retries on a machine that is off
	defer cancel()
	c, err := Dial(ctx, e.o.Store, clientURL(host))
	if err != nil {
		return nil
	}
	defer c.Close()
	status, err := c.Status(ctx, clientURL(host))
	if err != nil {
		return nil
	}
	s := seen{lives: status.Leader != 0 && !slices.Contains(status.Errors, errNoLeader)}
	s.what = fmt.Sprintf("etcd of this cluster answers at %s (member %s of cluster %s)", host, HexID(status.Header.MemberId), HexID(status.Header.ClusterId))
	if !s.lives {
		s.what += ", without a quorum"
	}
	return []seen{s}
}

// askMachine asks another control plane about its own beginning, which it knows
// before its etcd answers. A machine that is off must not delay the others. One
// that accepts the connection may be slow, and may be beginning the cluster now.
func (e *Etcd) askMachine(ctx context.Context, host netip.Addr) []seen {
	m, err := e.o.Peers.Beginning(ctx, host)
	if err != nil || m.GetRun() == e.id {
		return nil
	}
	node := fmt.Sprintf("control plane %q at %s", m.GetName(), host)
	switch {
	case m.GetBeginning():
		return []seen{{beginning: true, what: node + " begins the cluster, or was asked to at this moment: ask only one node"}}
	case m.GetMember():
		return []seen{{lives: m.GetReady(), what: node + " is a member of the cluster already"}}
	}
	return nil
}

// Beginning is the answer for other control planes. It waits for nothing.
func (e *Etcd) Beginning() (*apiv1.BeginningResponse, error) {
	if why := e.o.skip(); why != "" {
		return nil, refuse("%s", why)
	}
	me, err := e.o.self()
	r, data, unread := e.begun()
	restoring, unknown := e.o.Running(RecoverOperation)
	if err = cmp.Or(err, unread, unknown); err != nil {
		return nil, err
	}
	return &apiv1.BeginningResponse{
		Run: e.id, Name: me.name,
		Beginning: e.beginning.Load() > 0 || r.Phase == fresh || restoring != "",
		Member:    data && r.Phase == member,
		Ready:     e.ready.Load(),
	}, nil
}
