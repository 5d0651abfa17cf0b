// Package resolver answers names for the node's pods, on the node.
//
//	pods ─► CoreDNS ─► an address on lo ─► names of the node, cache ─► all name servers
//
// It passes questions on to the name servers that networkd knows, or to those of the configuration over TLS, and keeps the answers
// for as long as they are valid. All servers are asked at once and the first answer counts, so that dead ones cost nothing.
//
// What a packet can cost is bounded: its size, the questions and connections at a time, the answers that are kept. Whoever is
// outside of the node gets no answer.
package resolver

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"golang.org/x/net/netutil"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/system/machine"
	"github.com/garboard-os/garboard/services/system/network"
)

const (
	// ID of the service.
	ID = "resolver"

	// maxPacket goes through networks in one piece (DNS flag day 2020).
	maxPacket = 1232
	// maxQuestions at a time, for each server too, and connections: further ones get no answer, and are asked again.
	maxQuestions, maxClients = 256, 64
	// maxServers is what programs ask (MAXNS in resolv.conf(5)).
	maxServers = 3
	// A server has one second, and another one, because packets get lost: programs ask again after five.
	exchangeTime, exchanges = time.Second, 2
)

// Service is the resolver in the graph.
func Service(store *resource.Store) dag.Service {
	return dag.Service{ID: ID, Restart: dag.RestartAlways, Run: func(ctx context.Context, h *dag.Handle) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		changed := make(chan struct{}, 1)
		for _, kind := range []string{machine.Configs.Type(), network.Resolvers.Type(), network.Hostnames.Type(), network.Addresses.Type()} {
			go func() {
				for range store.Watch(ctx, kind) {
					sleep.Wake(changed)
				}
			}()
		}
		for ctx.Err() == nil {
			if err := serve(ctx, h, store, changed); err != nil {
				return err
			}
		}
		return nil
	}}
}

// resolver answers with what is known at its start.
type resolver struct {
	ctx       context.Context
	log       *slog.Logger
	outside   func(net.Addr) bool
	names     map[string][]dns.RR // the node's own, and those of extraHostEntries
	servers   []*server
	cache     cache
	questions chan struct{} // has a place for each at a time
}

// serve answers until something has changed.
func serve(ctx context.Context, h *dag.Handle, store *resource.Store, changed <-chan struct{}) error {
	cfg, err := machine.Config(store)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r := &resolver{ctx: ctx, log: h.Log, outside: func(a net.Addr) bool { return outside(store, a) }, questions: make(chan struct{}, maxQuestions)}
	var failed chan error // nil: nothing can fail
	if cfg.Machine.Network.Resolver.Enabled {
		if err := r.learn(store, cfg); err != nil {
			return err
		}
		stop, ended, err := r.listen(cfg.ResolverAddress())
		if err != nil {
			return fmt.Errorf("answer pods: %w; a pod with hostNetwork may have the port", err)
		}
		defer stop()
		failed = ended
	}
	h.Started("answers pods, if machine.network.resolver is on")
	select {
	case err = <-failed:
	case <-changed:
	case <-ctx.Done():
	}
	cancel() // what is asked now isn't waited for
	return err
}

// learn notes the names and the servers.
func (r *resolver) learn(store *resource.Store, cfg *config.Config) error {
	host, _ := network.Hostnames.Get(store, network.HostnameID)
	own, _ := network.Addresses.Get(store, network.AddressID)
	found, _ := network.Resolvers.Get(store, network.ResolversID)
	short, _, _ := strings.Cut(host.Spec, ".")
	r.names = map[string][]dns.RR{}
	for _, e := range append([]config.HostEntry{{IP: own.Spec.Primary, Aliases: slices.Compact([]string{host.Spec, short})}}, cfg.Machine.Network.ExtraHostEntries...) {
		kind := map[bool]string{true: "AAAA", false: "A"}[e.IP.Is6()]
		for _, alias := range e.Aliases {
			name := dns.CanonicalName(alias)
			if rr, err := dns.NewRR(fmt.Sprintf("%s 30 IN %s %s", name, kind, e.IP)); err == nil { // or there is no name or address yet
				r.names[name] = append(r.names[name], rr)
			}
		}
	}
	wanted := slices.Clone(cfg.Machine.Network.Resolver.DNSOverTLS)
	for _, a := range found.Spec {
		if len(cfg.Machine.Network.Resolver.DNSOverTLS) == 0 && a != cfg.ResolverAddress() {
			wanted = append(wanted, config.TLSNameserver{Address: a})
		}
	}
	pool, err := network.Authorities(boot.CABundle, nil)
	for _, w := range wanted[:min(len(wanted), maxServers)] {
		r.servers = append(r.servers, newServer(w, pool))
	}
	return err
}

// listen answers at the address, which it adds to lo, until stop is called. failed has an error if it can't go on.
func (r *resolver) listen(at netip.Addr) (stop func(), failed chan error, err error) {
	address := &netlink.Addr{Scope: int(netlink.SCOPE_HOST), IPNet: &net.IPNet{IP: at.AsSlice(), Mask: net.CIDRMask(at.BitLen(), at.BitLen())}}
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.AddrReplace(lo, address)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("add %s to lo: %w", at, err)
	}
	place := netip.AddrPortFrom(at, 53).String()
	udp, err := net.ListenPacket("udp", place)
	if err != nil {
		return nil, nil, err
	}
	tcp, err := net.Listen("tcp", place)
	if err != nil {
		return nil, nil, errors.Join(err, udp.Close())
	}
	var started sync.WaitGroup
	servers := []*dns.Server{{PacketConn: udp}, {Listener: netutil.LimitListener(tcp, maxClients)}}
	failed = make(chan error, len(servers))
	for _, s := range servers {
		s.Handler, s.UDPSize, s.NotifyStartedFunc = r, maxPacket, started.Done
		s.DecorateReader = func(from dns.Reader) dns.Reader { return checked{from, r} }
		started.Add(1)
		go func() { failed <- s.ActivateAndServe() }()
	}
	return func() {
		started.Wait()
		_ = errors.Join(servers[0].Shutdown(), servers[1].Shutdown(), netlink.AddrDel(lo, address)) // what has ended already is no problem
	}, failed, nil
}

// checked reads messages of DNS from the node itself and its pods: the library's own goroutines, where a panic would end PID 1, get no others.
type checked struct {
	dns.Reader
	*resolver
}

// ReadUDP implements dns.Reader.
func (c checked) ReadUDP(conn *net.UDPConn, wait time.Duration) ([]byte, *dns.SessionUDP, error) {
	m, from, err := c.Reader.ReadUDP(conn, wait)
	if err == nil && c.bad(m, from.RemoteAddr()) {
		m = m[:0]
	}
	return m, from, err
}

// ReadTCP implements dns.Reader.
func (c checked) ReadTCP(conn net.Conn, wait time.Duration) ([]byte, error) {
	m, err := c.Reader.ReadTCP(conn, wait)
	if err == nil && c.bad(m, conn.RemoteAddr()) {
		err = net.ErrClosed
	}
	return m, err
}

func (c checked) bad(m []byte, from net.Addr) bool {
	return c.outside(from) || dag.Guard(c.log, func() error { return new(dns.Msg).Unpack(m) }) != nil
}

// outside is whether answers to an address would leave the node: by a link that networkd manages, and not to a pod.
func outside(store *resource.Store, a net.Addr) bool {
	from, _ := netip.ParseAddrPort(a.String())
	routes, err := netlink.RouteGet(from.Addr().Unmap().AsSlice())
	return err != nil || len(routes) == 0 || slices.ContainsFunc(network.Links.List(store), func(l resource.Object[network.LinkStatus]) bool {
		return l.ID != "lo" && l.Spec.Index == routes[0].LinkIndex
	})
}

// ServeDNS implements dns.Handler.
func (r *resolver) ServeDNS(w dns.ResponseWriter, q *dns.Msg) {
	select {
	case r.questions <- struct{}{}:
		defer func() { <-r.questions }()
		_, udp := w.RemoteAddr().(*net.UDPAddr)
		_ = dag.Guard(r.log, func() error { return w.WriteMsg(r.answer(q, udp)) }) // who gets no answer asks again
	default:
	}
}

func (r *resolver) answer(q *dns.Msg, udp bool) *dns.Msg {
	reply, asked, opt, size := new(dns.Msg).SetReply(q), q.Question[0], q.IsEdns0(), dns.MinMsgSize
	asked.Name = dns.CanonicalName(asked.Name)
	if asked.Qclass != dns.ClassINET || asked.Qtype == dns.TypeAXFR || asked.Qtype == dns.TypeIXFR {
		reply.Rcode = dns.RcodeRefused
	} else if found := r.find(question{asked, opt != nil && opt.Do()}); found != nil {
		reply.Rcode, reply.Answer, reply.Ns, reply.Extra = found.Rcode, found.Answer, found.Ns, found.Extra
	} else {
		reply.Rcode = dns.RcodeServerFailure
	}
	reply.RecursionAvailable, reply.Compress = true, true
	if opt != nil {
		reply.SetEdns0(maxPacket, opt.Do())
		size = max(size, min(int(opt.UDPSize()), maxPacket))
	}
	if !udp {
		size = dns.MaxMsgSize
	}
	reply.Truncate(size)
	return reply
}

// find is what the node knows itself, else what a server says; nil for nothing.
func (r *resolver) find(q question) *dns.Msg {
	if own, is := r.names[q.Name]; is && (q.Qtype == dns.TypeA || q.Qtype == dns.TypeAAAA) {
		return &dns.Msg{Answer: slices.DeleteFunc(slices.Clone(own), func(rr dns.RR) bool { return rr.Header().Rrtype != q.Qtype })}
	}
	m := r.cache.get(q, time.Now())
	if m == nil {
		if m = r.ask(q); m != nil {
			r.cache.put(q, m, time.Now())
		}
	}
	return m
}

// ask asks all servers. The first that knows whether the name exists counts; nil: none has answered.
func (r *resolver) ask(q question) (last *dns.Msg) {
	answers := make(chan *dns.Msg, len(r.servers))
	for _, s := range r.servers {
		select {
		case s.asked <- struct{}{}:
			go func() {
				var m *dns.Msg
				_ = dag.Guard(r.log, func() (err error) { m, err = s.exchange(r.ctx, q); return err })
				<-s.asked
				answers <- m
			}()
		default:
			answers <- nil
		}
	}
	for range r.servers {
		m := <-answers
		if m != nil {
			last = m
		}
		if m != nil && (m.Rcode == dns.RcodeSuccess || m.Rcode == dns.RcodeNameError) {
			break
		}
	}
	return last
}

// server is a name server.
type server struct {
	client  dns.Client
	address string
	asked   chan struct{} // has a place for each question
}

func newServer(c config.TLSNameserver, pool *x509.CertPool) *server {
	s := &server{address: net.JoinHostPort(c.Address.String(), "53"), client: dns.Client{Timeout: exchangeTime}, asked: make(chan struct{}, maxQuestions)}
	if c.Name != "" {
		s.address, s.client.Net = net.JoinHostPort(c.Address.String(), "853"), "tcp-tls"
		s.client.TLSConfig = &tls.Config{ServerName: c.Name, RootCAs: pool, ClientSessionCache: tls.NewLRUClientSessionCache(0)}
	}
	return s
}

// exchange asks one server, from a new port and with a random number. The kernel takes packets of this server only.
func (s *server) exchange(ctx context.Context, q question) (answer *dns.Msg, err error) {
	m := new(dns.Msg).SetQuestion(q.Name, q.Qtype).SetEdns0(maxPacket, q.secure)
	for range exchanges {
		if answer, _, err = s.client.ExchangeContext(ctx, m, s.address); err == nil || ctx.Err() != nil {
			break
		}
	}
	if err == nil && answer.Truncated && s.client.Net == "" {
		answer, _, err = (&dns.Client{Net: "tcp", Timeout: exchangeTime}).ExchangeContext(ctx, m, s.address)
	}
	if err == nil && (!answer.Response || len(answer.Question) != 1 || dns.CanonicalName(answer.Question[0].Name) != q.Name || answer.Question[0].Qtype != q.Qtype) {
		err = errors.New("it answered another question")
	}
	if err != nil {
		return nil, fmt.Errorf("ask %s: %w", s.address, err)
	}
	answer.Extra = slices.DeleteFunc(answer.Extra, func(rr dns.RR) bool { return rr.Header().Rrtype == dns.TypeOPT })
	return answer, nil
}
