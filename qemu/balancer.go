package qemu

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/api/balance"
	"github.com/garboard-os/garboard/qemu/network"
)

// A dialer connects to a TCP port of a node.
type dialer interface {
	Dial(ctx context.Context, n network.Node, port int) (net.Conn, error)
}

// ports forward connections to the APIs of the nodes: from this machine to all of them,
// and, where the cluster's endpoint is a load balancer, from the nodes to that.
type ports struct {
	plan       Plan
	lan        *network.LAN
	apis       []*balance.Balancer // of the machine API, one for each node
	kubernetes *balance.Balancer

	mu       sync.Mutex   // guards the following
	endpoint net.Listener // nil: there is none, or it is off
}

func openPorts(p Plan, d clusterDir, lan *network.LAN, log *slog.Logger) (_ *ports, err error) {
	var servers []network.Node
	for _, n := range p.controlPlanes() {
		servers = append(servers, n.onLAN())
	}
	if p.Shared.IsValid() {
		// the control planes decide which of them has it
		servers = []network.Node{{Name: "shared address", Address: p.Shared}}
	}
	var trust func() *tls.Config
	if len(servers) > 1 {
		cluster := &Cluster{Plan: p, dir: d}
		first, err := cluster.KubeAPI()
		if err != nil {
			return nil, err
		}
		trust = func() *tls.Config { // the user may replace the cluster's authorities, and the file
			own, err := cluster.KubeAPI()
			if err != nil {
				own = first
			}
			trust := own.trust.Clone()
			trust.ServerName = balance.ServerName
			return trust
		}
	}
	o := &ports{plan: p, lan: lan, kubernetes: newBalancer(lan, servers, kubernetesPort, trust, log)}
	defer func() {
		if err != nil {
			o.close()
		}
	}()
	listen := func(b *balance.Balancer, local int) error {
		port, err := net.Listen("tcp4", fmt.Sprintf("%s:%d", p.localAddress(), local))
		if err != nil {
			return fmt.Errorf("a port of the cluster is in use: %w; end the program that has it, or remove the cluster and make it again for another port", err)
		}
		b.Serve(port)
		return nil
	}
	if err := listen(o.kubernetes, p.KubernetesPort); err != nil {
		return nil, err
	}
	for _, n := range p.Nodes {
		b := newBalancer(lan, []network.Node{n.onLAN()}, api.Port, nil, log)
		o.apis = append(o.apis, b)
		if err := listen(b, n.APIPort); err != nil {
			return nil, err
		}
	}
	if p.balanced() {
		return o, o.setEndpoint(true)
	}
	return o, nil
}

func (p *ports) close() {
	p.kubernetes.Close()
	for _, b := range p.apis {
		b.Close()
	}
}

// setEndpoint turns on or off the load balancer that is the cluster's endpoint for nodes.
func (p *ports) setEndpoint(on bool) error {
	if !p.plan.balanced() {
		return errors.New("the endpoint of this cluster is its only control plane, not a load balancer")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case on == (p.endpoint != nil):
	case on:
		l, err := p.lan.Listen(p.plan.endpoint())
		if err != nil {
			return fmt.Errorf("load balancer: %w", err)
		}
		p.endpoint = l
		p.kubernetes.Serve(l)
	default:
		p.kubernetes.End(p.endpoint)
		p.endpoint = nil
	}
	return nil
}

// newBalancer forwards each connection to the port of one of several nodes. With trust, it
// asks the API servers there whether they are ready. While none is, the first that accepts
// a connection gets it. So a cluster that is starting can be reached as soon as one node
// listens.
func newBalancer(to dialer, nodes []network.Node, port int, trust func() *tls.Config, log *slog.Logger) *balance.Balancer {
	byName := map[string]network.Node{}
	var upstreams []balance.Upstream
	for _, n := range nodes {
		byName[n.Name] = n
		upstreams = append(upstreams, balance.Upstream{Name: n.Name})
	}
	b := balance.New(balance.Options{
		Dial: func(ctx context.Context, name string) (net.Conn, error) { return to.Dial(ctx, byName[name], port) },
		TLS:  trust, Log: log,
	})
	b.Set(upstreams)
	return b
}
