package qemu

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"
)

const (
	// checkPeriod, and how many checks in a row a node must fail: one that is off,
	// frozen or cut off gets no more connections after three seconds to nine, well
	// within the ten in which a leader must renew its lease.
	checkPeriod = time.Second
	checkBudget = 2 * time.Second
	checksBad   = 3
)

// A balancer hands each connection to one of several nodes: in turn to those whose
// API server says that it is ready, and while none does, to the first that takes it.
// So a cluster that is just starting is reached as soon as anybody is there.
//
//	listeners ─► backends, healthy ones first ─► a port of their nodes
//	                 ▲ every second: GET /readyz
type balancer struct {
	to       reacher
	port     int
	log      *slog.Logger
	backends []*backend

	ctx    context.Context // ends with close
	cancel context.CancelFunc
	done   sync.WaitGroup // listeners and checks

	mu        sync.Mutex // guards all below
	listeners []net.Listener
	turn      int
}

// backend is one node behind a balancer.
type backend struct {
	node Node

	mu      sync.Mutex // guards all below
	healthy bool
	bad     int                   // checks that it has failed in a row
	open    map[net.Conn]struct{} // connections to it
}

func newBalancer(to reacher, nodes []Node, port int, log *slog.Logger) *balancer {
	b := &balancer{to: to, port: port, log: log}
	b.ctx, b.cancel = context.WithCancel(context.Background())
	for _, n := range nodes {
		b.backends = append(b.backends, &backend{node: n, open: map[net.Conn]struct{}{}})
	}
	return b
}

// serve hands out the connections of l until close.
func (b *balancer) serve(l net.Listener) {
	b.mu.Lock()
	b.listeners = append(b.listeners, l)
	b.mu.Unlock()
	b.done.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				if !errors.Is(err, net.ErrClosed) {
					b.log.Error("forward", "port", b.port, "error", err)
				}
				return
			}
			go b.hand(conn)
		}
	})
}

// close ends listening and checking. Connections go on until one side ends them.
func (b *balancer) close() {
	b.cancel()
	b.mu.Lock()
	for _, l := range b.listeners {
		l.Close()
	}
	b.mu.Unlock()
	b.done.Wait()
}

// order is whom to try for the next connection.
func (b *balancer) order() []*backend {
	b.mu.Lock()
	turn := b.turn
	b.turn++
	b.mu.Unlock()
	var healthy, others []*backend
	for _, n := range b.backends {
		if n.isHealthy() {
			healthy = append(healthy, n)
		} else {
			others = append(others, n)
		}
	}
	if len(healthy) > 0 {
		turn %= len(healthy)
		healthy = slices.Concat(healthy[turn:], healthy[:turn])
	}
	return slices.Concat(healthy, others)
}

func (b *balancer) hand(conn net.Conn) {
	defer conn.Close()
	for _, n := range b.order() {
		ctx, cancel := context.WithTimeout(b.ctx, dialBudget)
		peer, err := b.to.Reach(ctx, n.node, b.port)
		cancel()
		if err == nil {
			n.splice(conn, peer)
			return
		}
	}
}

func (n *backend) isHealthy() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.healthy
}

func (n *backend) splice(conn, peer net.Conn) {
	n.mu.Lock()
	n.open[peer] = struct{}{}
	n.mu.Unlock()
	splice(conn, peer)
	n.mu.Lock()
	delete(n.open, peer)
	n.mu.Unlock()
}

// check begins to ask the nodes' API servers whether they are ready.
func (b *balancer) check(trust *tls.Config) {
	for _, n := range b.backends {
		b.done.Go(func() {
			client := b.client(n.node, trust)
			defer client.CloseIdleConnections()
			for {
				n.judge(ready(b.ctx, client, n.node, b.port), b.log)
				select {
				case <-b.ctx.Done():
					return
				case <-time.After(checkPeriod):
				}
			}
		})
	}
}

// client speaks to one node's API server. It keeps its connection, as a handshake for
// each check would be most of the work.
func (b *balancer) client(n Node, trust *tls.Config) *http.Client {
	return &http.Client{Timeout: checkBudget, Transport: &http.Transport{
		TLSClientConfig: trust.Clone(),
		DialContext:     func(ctx context.Context, _, _ string) (net.Conn, error) { return b.to.Reach(ctx, n, b.port) },
	}}
}

func ready(ctx context.Context, client *http.Client, n Node, port int) error {
	address := netip.AddrPortFrom(n.Address, uint16(port))
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("https://%s/readyz", address), nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, answerLimit)) // for the next request
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("it answers %s", resp.Status)
	}
	return nil
}

// judge takes the outcome of a check. A node that isn't healthy any more loses its
// connections: clients would wait on them, and come back to another node at once.
func (n *backend) judge(err error, log *slog.Logger) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err == nil {
		n.bad = 0
		if !n.healthy {
			log.Info("API server is ready", "node", n.node.Name)
		}
		n.healthy = true
		return
	}
	if n.bad++; n.bad < checksBad || !n.healthy {
		return
	}
	n.healthy = false
	log.Warn("API server isn't ready any more", "node", n.node.Name, "error", err)
	for conn := range n.open {
		conn.Close()
	}
}
