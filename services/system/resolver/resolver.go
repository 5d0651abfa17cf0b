// Package resolver answers names for the node's pods, on the node.
//
//	pods ─► CoreDNS ─► an address on lo ─► names of the node, cache ─► all name servers
//
// It passes questions on to the name servers that networkd knows, or to those of the configuration over TLS, and keeps
// the answers for as long as they are valid. All servers are asked at once: dead ones cost nothing.
//
// What a packet can cost is bounded: its size, the questions and connections at a time, the answers that are kept.
// Whoever is outside of the node gets no answer.
package resolver

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"golang.org/x/net/netutil"
	"golang.org/x/sync/semaphore"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/garboard-os/garboard/services/system/outbound"
)

const (
	// ID of the service.
	ID = "resolver"

	// maxPacket goes through networks in one piece (DNS flag day 2020).
	maxPacket = 1232
	// maxQuestions at a time, for each server too, and connections: further ones get no answer, and are asked again.
	maxQuestions, maxClients = 256, 64
	// A server has one second, and another one, because packets get lost: programs ask again after five.
	exchangeTime, exchanges = time.Second, 2
	// idle ends a connection.
	idle = 10 * time.Second
	// ownTTL of what the node knows itself, in seconds.
	ownTTL = 30
)

// Service is the resolver in the graph.
func Service(store *resource.Store) dag.Service {
	return dag.Service{ID: ID, Restart: dag.RestartAlways, Run: func(ctx context.Context, h *dag.Handle) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		changed := store.Watch(ctx, configuration.Configs.Type(), network.Resolvers.Type(), network.Hostnames.Type(), network.Addresses.Type())
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
	known     facts
	servers   []*server
	cache     cache
	questions *semaphore.Weighted
}

// facts are what a resolver works with.
type facts struct {
	on      bool                // else it answers nobody
	at      netip.Addr          // where it answers
	names   map[string][]dns.RR // addresses of the node's own, and those of extraHostEntries
	servers []config.TLSNameserver
	trusted *x509.CertPool // who may vouch for servers over TLS
}

// ask are the servers to ask.
func (f facts) ask() []*server {
	return lists.Of(f.servers, func(s config.TLSNameserver) *server { return newServer(s, f.trusted) })
}

func (f facts) equal(g facts) bool {
	same := f.trusted.Equal(g.trusted)
	f.trusted, g.trusted = nil, nil
	return same && reflect.DeepEqual(f, g)
}

// serve answers until other facts are known.
func serve(ctx context.Context, h *dag.Handle, store *resource.Store, changed <-chan struct{}) error {
	cfg, err := configuration.Config(store)
	if err != nil {
		return err
	}
	known, err := learn(store, cfg)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // what is asked now isn't waited for
	r := &resolver{ctx: ctx, log: h.Log, outside: func(a net.Addr) bool { return outside(store, a) }, known: known, questions: semaphore.NewWeighted(maxQuestions)}
	var failed chan error // nil: nothing can fail
	if known.on {
		r.servers = known.ask()
		stop, ended, err := r.listen(known.at)
		if err != nil {
			return fmt.Errorf("answer pods: %w; a pod with hostNetwork may have the port", err)
		}
		defer stop()
		failed = ended
	}
	h.Started("answers pods, unless machine.network.resolver is off")
	for now := known; err == nil && now.equal(known); {
		select {
		case err = <-failed:
		case <-changed:
			if cfg, err = configuration.Config(store); err == nil {
				now, err = learn(store, cfg)
			}
		case <-ctx.Done():
			return nil
		}
	}
	return err
}

// learn reads the facts.
func learn(store *resource.Store, cfg *config.Config) (f facts, err error) {
	host, _ := network.Hostnames.Get(store, network.HostnameID)
	own, _ := network.Addresses.Get(store, network.AddressID)
	found, _ := network.Resolvers.Get(store, network.ResolversID)
	short, _, _ := strings.Cut(host.Spec, ".")
	f.on, f.at, f.names = cfg.Machine.Network.Resolver.On(), cfg.ResolverAddress(), map[string][]dns.RR{}
	for _, e := range append([]config.HostEntry{{IP: own.Spec.Primary, Aliases: slices.Compact([]string{host.Spec, short})}}, cfg.Machine.Network.ExtraHostEntries...) {
		for _, alias := range e.Aliases {
			name := canonical(alias)
			if head := (dns.RR_Header{Name: name, Class: dns.ClassINET, Ttl: ownTTL}); e.IP.Is4() && alias != "" {
				head.Rrtype = dns.TypeA
				f.names[name] = append(f.names[name], &dns.A{Hdr: head, A: e.IP.AsSlice()})
			} else if e.IP.Is6() && alias != "" {
				head.Rrtype = dns.TypeAAAA
				f.names[name] = append(f.names[name], &dns.AAAA{Hdr: head, AAAA: e.IP.AsSlice()})
			}
		}
	}
	f.servers = slices.Clone(cfg.Machine.Network.Resolver.DNSOverTLS)
	for _, a := range found.Spec {
		if len(cfg.Machine.Network.Resolver.DNSOverTLS) == 0 && a != f.at {
			f.servers = append(f.servers, config.TLSNameserver{Address: a})
		}
	}
	f.servers = f.servers[:min(len(f.servers), config.MaxNameservers)]
	if len(cfg.Machine.Network.Resolver.DNSOverTLS) > 0 {
		f.trusted, err = outbound.Authorities(boot.CABundle, nil)
	}
	return f, err
}

// listen answers at the address, which it adds to lo, until stop is called. failed has an error if it can't go on.
func (r *resolver) listen(at netip.Addr) (stop func(), failed chan error, err error) {
	address := &netlink.Addr{Scope: int(netlink.SCOPE_HOST), IPNet: &net.IPNet{IP: at.AsSlice(), Mask: net.CIDRMask(at.BitLen(), at.BitLen())}}
	lo := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: 1}} // always
	if err = netlink.AddrReplace(lo, address); err != nil {
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
	failed = make(chan error, 2)
	go func() { failed <- dag.Guard(r.log, func() error { return r.serveUDP(udp) }) }()
	go func() {
		failed <- dag.Guard(r.log, func() error { return r.serveTCP(netutil.LimitListener(tcp, maxClients)) })
	}()
	// what has ended already is no problem
	return func() { _ = errors.Join(udp.Close(), tcp.Close(), netlink.AddrDel(lo, address)) }, failed, nil
}

// outside is whether answers to an address would leave the node: by a link that networkd manages, and not to a pod.
func outside(store *resource.Store, a net.Addr) bool {
	from, _ := netip.ParseAddrPort(a.String())
	routes, err := netlink.RouteGet(from.Addr().Unmap().AsSlice())
	return err != nil || len(routes) == 0 || slices.ContainsFunc(network.Links.List(store), func(l resource.Object[network.LinkStatus]) bool {
		return l.ID != "lo" && l.Spec.Index == routes[0].LinkIndex
	})
}

func (r *resolver) serveUDP(conn net.PacketConn) error {
	packet := make([]byte, maxPacket)
	for {
		n, from, err := conn.ReadFrom(packet)
		if err != nil {
			return err
		}
		if asked := bytes.Clone(packet[:n]); !r.outside(from) && r.questions.TryAcquire(1) {
			go r.answer(func() (err error) {
				if m := r.reply(asked, dns.MinMsgSize); m != nil {
					_, err = conn.WriteTo(m, from)
				}
				return err
			})
		}
	}
}

func (r *resolver) serveTCP(l net.Listener) error {
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		go dag.Guard(r.log, func() error {
			defer context.AfterFunc(r.ctx, func() { conn.Close() })()
			defer conn.Close()
			for stream := (&dns.Conn{Conn: conn}); !r.outside(conn.RemoteAddr()); {
				_ = conn.SetDeadline(time.Now().Add(idle))
				asked, err := stream.ReadMsgHeader(nil)
				if err != nil || !r.questions.TryAcquire(1) {
					return nil // the client has gone, or asks again
				}
				r.answer(func() error { _, err := stream.Write(r.reply(asked, dns.MaxMsgSize)); return err })
			}
			return nil
		})
	}
}

// answer answers one of the questions. Who gets no answer, because there are too many, asks again.
func (r *resolver) answer(question func() error) {
	defer r.questions.Release(1)
	_ = dag.Guard(r.log, question)
}

// reply answers a packet with one of at most so many bytes, over UDP those that it allows; nil: there is no answer.
func (r *resolver) reply(packet []byte, most int) []byte {
	asked := new(dns.Msg)
	err := asked.Unpack(packet)
	if asked.Response || err != nil && asked.MsgHdr == (dns.MsgHdr{}) {
		return nil
	}
	m := new(dns.Msg).SetReply(asked)
	m.RecursionAvailable, m.Compress = true, true
	opt := asked.IsEdns0()
	secure := opt != nil && opt.Do()
	switch {
	case err != nil || len(asked.Question) != 1:
		m.Rcode = dns.RcodeFormatError
	case asked.Opcode != dns.OpcodeQuery:
		m.Rcode = dns.RcodeNotImplemented
	case asked.Question[0].Qclass != dns.ClassINET || asked.Question[0].Qtype == dns.TypeAXFR || asked.Question[0].Qtype == dns.TypeIXFR:
		m.Rcode = dns.RcodeRefused
	default:
		m.Rcode = dns.RcodeServerFailure
		if found := r.find(question{canonical(asked.Question[0].Name), asked.Question[0].Qtype, secure}); found != nil {
			m.Rcode, m.Answer, m.Ns, m.Extra = found.Rcode, found.Answer, found.Ns, slices.Clip(found.Extra)
		}
	}
	if opt != nil {
		m.SetEdns0(maxPacket, secure)
		most = max(most, min(int(opt.UDPSize()), maxPacket))
	}
	m.Truncate(most)
	out, _ := m.Pack() // nil: a name that can't be written
	return out
}

// canonical is a name in its one form.
func canonical(name string) string { return strings.ToLower(strings.TrimSuffix(name, ".")) + "." }

// find is what the node knows itself, else what a server says; nil for nothing.
func (r *resolver) find(q question) *dns.Msg {
	if own, is := r.known.names[q.name]; is && (q.kind == dns.TypeA || q.kind == dns.TypeAAAA) {
		return &dns.Msg{Answer: slices.DeleteFunc(slices.Clone(own), func(rr dns.RR) bool { return rr.Header().Rrtype != q.kind })}
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
		if !s.asked.TryAcquire(1) {
			answers <- nil
			continue
		}
		go func() {
			var m *dns.Msg
			_ = dag.Guard(r.log, func() (err error) { m, err = s.exchange(r.ctx, q); return err })
			s.asked.Release(1)
			answers <- m
		}()
	}
	for range r.servers {
		if m := <-answers; m != nil {
			if last = m; m.Rcode == dns.RcodeSuccess || m.Rcode == dns.RcodeNameError {
				break
			}
		}
	}
	return last
}

// server is a name server.
type server struct {
	network string // as dns.Client has it
	address string
	tls     *tls.Config // nil: without
	asked   *semaphore.Weighted
}

func newServer(c config.TLSNameserver, pool *x509.CertPool) *server {
	s := &server{network: "udp", address: net.JoinHostPort(c.Address.String(), "53"), asked: semaphore.NewWeighted(maxQuestions)}
	if c.Name != "" {
		s.network, s.address = "tcp-tls", net.JoinHostPort(c.Address.String(), "853")
		s.tls = &tls.Config{ServerName: c.Name, RootCAs: pool, ClientSessionCache: tls.NewLRUClientSessionCache(0)}
	}
	return s
}

// exchange asks one server, from a new port and with a random number. The kernel takes packets of this server only.
func (s *server) exchange(ctx context.Context, q question) (answer *dns.Msg, err error) {
	for range exchanges {
		if answer, err = s.once(ctx, q, s.network); err == nil || ctx.Err() != nil {
			break
		}
	}
	if err == nil && answer.Truncated && s.tls == nil {
		answer, err = s.once(ctx, q, "tcp")
	}
	if err != nil {
		return nil, fmt.Errorf("ask %s: %w", s.address, err)
	}
	return answer, nil
}

func (s *server) once(ctx context.Context, q question, network string) (*dns.Msg, error) {
	ctx, cancel := context.WithTimeout(ctx, exchangeTime)
	defer cancel()
	c := dns.Client{Net: network, UDPSize: maxPacket, TLSConfig: s.tls}
	conn, err := c.DialContext(ctx, s.address)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	ends, _ := ctx.Deadline()
	_ = conn.SetDeadline(ends)
	m := new(dns.Msg).SetQuestion(q.name, q.kind).SetEdns0(maxPacket, q.secure)
	for err = conn.WriteMsg(m); err == nil; {
		packet, failed := conn.ReadMsgHeader(nil)
		answer := new(dns.Msg)
		// Another one is of somebody who guesses, or late.
		if failed == nil && answer.Unpack(packet) == nil && answer.Response && answer.Id == m.Id && len(answer.Question) == 1 &&
			canonical(answer.Question[0].Name) == q.name && answer.Question[0].Qtype == q.kind {
			answer.Rcode &= 0xf // without EDNS, which is of this exchange
			answer.Extra = slices.DeleteFunc(answer.Extra, func(rr dns.RR) bool { return rr.Header().Rrtype == dns.TypeOPT })
			return answer, nil
		}
		err = failed
	}
	return nil, err
}

// Answer is what became of a question to a name server.
type Answer struct {
	Server string // address and port
	Err    error  // nil: it has answered, whatever it knows
}

// Probe asks each of the node's name servers for the root: over UDP as programs do, and over TCP where that has no
// answer, to tell what is wrong. It takes three seconds at most.
func Probe(ctx context.Context, store *resource.Store, cfg *config.Config) []Answer {
	known, _ := learn(store, cfg) // without authorities, a server over TLS isn't believed
	servers := known.ask()
	all := make([]Answer, len(servers))
	var wg sync.WaitGroup
	for i, s := range servers {
		wg.Go(func() {
			root := question{name: ".", kind: dns.TypeNS}
			_, err := s.exchange(ctx, root)
			if err != nil && s.tls == nil {
				_, stream := s.once(ctx, root, "tcp")
				err = fmt.Errorf("%w; it answers over TCP: %t", err, stream == nil)
			}
			all[i] = Answer{s.address, err}
		})
	}
	wg.Wait()
	return all
}
