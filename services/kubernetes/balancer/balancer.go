// Package balancer is the node's own load balancer of the Kubernetes API.
//
// The kubelet, the control plane's programs, kube-proxy, the pod network and PID 1
// itself connect to 127.0.0.1:7445, and are connected to an API server that is ready: the
// node's own on a control plane, else one of the cluster's in turn, and last the
// cluster's endpoint. So the endpoint is needed to join a cluster, and by people, but
// not by a node that has joined; and a control plane that dies interrupts clients for
// seconds only.
//
//	kubelet, … ─► 127.0.0.1:7445 ─► own API server, the others, the endpoint
//	EndpointSlice default/kubernetes ─► list of API servers ─► STATE
//
// The list of API servers comes from Kubernetes. The last list is stored on STATE: after
// a reboot the endpoint may be gone.
//
// Until an API server has been ready once, clients are held for some seconds rather than turned away: who is turned
// away comes back ever later. While no API server takes connections, the clients of a node that has joined are refused
// at once: it may be the kubelet that has to start the API server.
//
// TLS goes from the client to the API server, which authenticates the client. Any program
// with the node's network may connect; the balancer gives it no rights.
package balancer

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/procfs"

	"github.com/garboard-os/garboard/api/balance"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/option"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
)

const (
	// ID of the service.
	ID = "balancer"

	// Address is where it listens, and URL is for the configuration of clients. IPv4
	// loopback is on every node, also where all other addresses are IPv6.
	Address = "127.0.0.1:7445"
	URL     = "https://" + Address
	// ServerName is what clients expect in the certificate, which may be another
	// installer's, without loopback's address in it.
	ServerName = balance.ServerName

	// period is how often each API server is asked whether it is ready. A thousand nodes
	// that ask each of three cost each of those 500 small answers a second.
	period = 2 * time.Second
	// hold is less than the ten seconds that Kubernetes' clients give a TLS handshake.
	// A kubelet that is to join would else be Ready 13 to 31 s after the API server. An API server that has just been
	// started refuses everybody for two seconds, until it has made its roles: the kubelet, the controller manager and
	// the scheduler would each wait up to three more.
	hold = 8 * time.Second
	// startBudget is how long clients are let in before the node's own API server listens, from when its process was
	// first seen: the kubelet has done its part then. startPeriod is how often that process is looked for.
	startBudget = 10 * time.Second
	startPeriod = 200 * time.Millisecond
	// maxConnections: the node's own clients have a dozen or two. Each takes a few
	// descriptors of PID 1.
	maxConnections = 512
	stopBudget     = 5 * time.Second

	apiServer = "kube-apiserver"
)

// Where an API server is known from, and with it its rank.
const (
	FromNode       = "node"       // it is this node's own
	FromKubernetes = "kubernetes" // EndpointSlice default/kubernetes
	FromConfig     = "config"     // cluster.controlPlane.endpoint
)

var ranks = []string{FromNode, FromKubernetes, FromConfig}

// APIServer is one of those that connections are passed on to.
type APIServer struct {
	Ready bool `yaml:"ready" column:"READY"`
	// Since is when that began; zero: it wasn't asked yet.
	Since time.Time `yaml:"since" column:"SINCE"`
	// From is the source: node, kubernetes or config.
	From   string `yaml:"from" column:"FROM"`
	Reason string `yaml:"reason,omitempty"` // why it isn't ready
}

// APIServers are the API servers that this node knows, by host and port.
var APIServers = resource.Define[APIServer](resource.Definition{
	Type: "APIServers.kubernetes.garboard.dev", Kind: "APIServer", Namespace: "runtime",
})

// Options are what the service stands on.
type Options struct {
	Store *resource.Store

	// What tests have in another way.
	address       string // "": Address
	file          string // "": on STATE
	kubeletClient string // "": boot.KubeletClient
	proc          string // "": /proc
	dial          func(ctx context.Context, address string) (net.Conn, error)
}

// Service is the balancer in the graph. STATE is there once disks is up.
func Service(o Options) dag.Service {
	option.Default(&o.address, Address)
	option.Default(&o.file, filepath.Join(boot.StateDir, listFile))
	option.Default(&o.kubeletClient, boot.KubeletClient)
	option.Default(&o.proc, procfs.DefaultMountPoint)
	option.Default(&o.dial, func(ctx context.Context, address string) (net.Conn, error) {
		return (&net.Dialer{Timeout: balance.DialBudget}).DialContext(ctx, "tcp", address)
	})
	return dag.Service{
		ID:         ID,
		Run:        o.run,
		Restart:    dag.RestartAlways,
		StopBudget: stopBudget,
	}
}

func (o Options) run(ctx context.Context, h *dag.Handle) error {
	changed := make(chan struct{}, 1)
	mark := func() { sleep.Wake(changed) }
	b := balance.New(balance.Options{Dial: o.dial, TLS: o.trust, Period: period, Hold: hold, Max: maxConnections, Changed: mark, Log: h.Log})
	ctx, cancel := context.WithCancel(ctx)
	defer func() { _ = o.publish(nil) }() // the servers aren't checked any more
	var wg sync.WaitGroup
	defer wg.Wait()
	defer b.Close()
	defer cancel()
	servers := &serverList{o: o, log: h.Log, mark: mark}
	servers.load()
	listener := gate{o: o, b: b}
	if err := listener.set(true); err != nil { // also to see that the port is free
		return err
	}
	h.Started("passes connections to " + o.address + " on to the Kubernetes API")
	wg.Go(func() { servers.follow(ctx) })
	settings := o.Store.Watch(ctx, configuration.Configs.Type(), network.Addresses.Type())
	var set []balance.Upstream
	start := start{proc: o.proc}
	for {
		if next, err := o.upstreams(servers.list()); err != nil {
			h.Log.Warn(err.Error())
		} else if !slices.Equal(next, set) {
			set = next
			b.Set(set)
		}
		all := b.Upstreams()
		starts, again := start.goesOn(all)
		// The gate first: a client that reads that a server is ready may connect at once.
		if err := errors.Join(listener.set(!o.joined() || slices.ContainsFunc(all, open) || starts), o.publish(all)); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-settings:
		case <-changed:
		case <-again:
		}
	}
}

// joined is whether the node has a certificate of the kubelet.
func (o Options) joined() bool { return untrusted.Exists(o.kubeletClient) }

// start is the first start of the node's own API server.
type start struct {
	proc string
	seen time.Time // when its process was
	over bool
}

// goesOn is whether the API server may listen soon, and when to look again.
func (s *start) goesOn(all []balance.Status) (soon bool, again <-chan time.Time) {
	switch {
	case len(all) == 0: // there is no configuration yet
	case ranks[all[0].Rank] != FromNode || slices.ContainsFunc(all, ready):
		s.over = true
	case s.seen.IsZero():
		fs, _ := procfs.NewFS(s.proc) // it is mounted
		processes, _ := fs.AllProcs()
		if slices.ContainsFunc(processes, func(p procfs.Proc) bool { comm, _ := p.Comm(); return comm == apiServer }) {
			s.seen = time.Now()
		}
	default:
		s.over = time.Since(s.seen) > startBudget
	}
	if s.over {
		return false, nil
	}
	return !s.seen.IsZero(), time.After(startPeriod)
}

func ready(s balance.Status) bool { return s.Ready }

// open is whether a connection to it would get anywhere. A first check takes milliseconds.
func open(s balance.Status) bool { return s.Reachable }

// gate opens and closes the listener. It is closed while no API server takes connections
// (a load balancer without servers may take them and end them), so that clients are
// refused as by the API server itself: clients repeat a connection that is accepted and
// then ended ten times, a second each, and a kubelet that has to start the API server
// does nothing else meanwhile.
type gate struct {
	o Options
	b *balance.Balancer
	l net.Listener // nil: closed
}

func (g *gate) set(open bool) error {
	switch {
	case open == (g.l != nil):
	case open:
		l, err := net.Listen("tcp4", g.o.address)
		if err != nil {
			return fmt.Errorf("listen for the node's clients of the Kubernetes API: %w; a program or pod with the node's network may have the port", err)
		}
		g.l = l
		g.b.Serve(l)
	default:
		g.b.End(g.l)
		g.l = nil
	}
	return nil
}

// trust is how an API server is verified: by the cluster's authority, which may be
// replaced, and a name that only API servers have.
func (o Options) trust() *tls.Config {
	t := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: ServerName, RootCAs: x509.NewCertPool()}
	if cfg, err := configuration.Config(o.Store); err == nil {
		t.RootCAs.AppendCertsFromPEM(cfg.Cluster.TrustedCAs())
	}
	return t
}

// upstreams are the servers that connections may be passed on to.
func (o Options) upstreams(known []netip.AddrPort) ([]balance.Upstream, error) {
	cfg, err := configuration.Config(o.Store)
	if err != nil {
		return nil, err
	}
	own := map[netip.Addr]bool{}
	if a, err := network.Addresses.Get(o.Store, network.AddressID); err == nil {
		own[a.Spec.Primary.Unmap()] = true
	}
	seen := map[string]bool{}
	var all []balance.Upstream
	add := func(name, from string) {
		if !seen[name] {
			seen[name] = true
			all = append(all, balance.Upstream{Name: name, Rank: slices.Index(ranks, from)})
		}
	}
	if cfg.Machine.Type.ControlPlane() {
		add(net.JoinHostPort("127.0.0.1", strconv.Itoa(cfg.Cluster.ControlPlane.LocalAPIServerPort)), FromNode)
	}
	for _, at := range known {
		if !own[at.Addr()] || !cfg.Machine.Type.ControlPlane() {
			add(at.String(), FromKubernetes)
		}
	}
	add(endpoint(cfg), FromConfig)
	return all, nil
}

// endpoint is the host and the port of the cluster's endpoint.
func endpoint(c *config.Config) string {
	u := c.Cluster.ControlPlane.Endpoint
	return net.JoinHostPort(u.Hostname(), cmp.Or(u.Port(), "443"))
}

// publish writes the status of the API servers as resources.
func (o Options) publish(all []balance.Status) error {
	servers := map[string]APIServer{}
	for _, s := range all {
		spec := APIServer{Ready: s.Ready, Since: s.Since, From: ranks[s.Rank]}
		if s.Err != nil {
			spec.Reason = s.Err.Error()
		}
		servers[s.Name] = spec
	}
	return APIServers.Replace(o.Store.As(ID), servers)
}
