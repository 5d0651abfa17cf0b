// Package resolver answers names for the node's pods, on the node.
//
//	pods ─► CoreDNS ─► an address on lo ─► names of the node, cache ─► all name servers
//
// It passes questions on to the name servers that networkd knows, or to those of the configuration over TLS, and keeps
// the answers for as long as they are valid. All servers are asked at once: dead ones cost nothing.
//
// What a packet can cost is bounded: its size, the questions and connections at a time, the answers that are kept. Whoever is
// outside of the node gets no answer.
package resolver

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/rand/v2"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/net/netutil"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/resource"
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
	// idle ends a connection.
	idle = 10 * time.Second
	// dnsPacket is what a client takes over UDP that doesn't say more (RFC 1035 4.2.1).
	dnsPacket = 512
	// ownTTL of what the node knows itself, in seconds.
	ownTTL = 30

	typeIXFR = dnsmessage.Type(251) // RFC 1995
)

// Service is the resolver in the graph.
func Service(store *resource.Store) dag.Service {
	return dag.Service{ID: ID, Restart: dag.RestartAlways, Run: func(ctx context.Context, h *dag.Handle) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		changed := store.Watch(ctx, machine.Configs.Type(), network.Resolvers.Type(), network.Hostnames.Type(), network.Addresses.Type())
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
	questions chan struct{} // has a place for each at a time
}

// facts are what a resolver works with.
type facts struct {
	on      bool                                 // else it answers nobody
	at      netip.Addr                           // where it answers
	names   map[string][]dnsmessage.ResourceBody // addresses of the node's own, and those of extraHostEntries
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
	cfg, err := machine.Config(store)
	if err != nil {
		return err
	}
	known, err := learn(store, cfg)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // what is asked now isn't waited for
	r := &resolver{ctx: ctx, log: h.Log, outside: func(a net.Addr) bool { return outside(store, a) }, known: known, questions: make(chan struct{}, maxQuestions)}
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
			if cfg, err = machine.Config(store); err == nil {
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
	f.on, f.at, f.names = cfg.Machine.Network.Resolver.On(), cfg.ResolverAddress(), map[string][]dnsmessage.ResourceBody{}
	for _, e := range append([]config.HostEntry{{IP: own.Spec.Primary, Aliases: slices.Compact([]string{host.Spec, short})}}, cfg.Machine.Network.ExtraHostEntries...) {
		for _, alias := range e.Aliases {
			if name := canonical(alias); e.IP.Is4() && alias != "" {
				f.names[name] = append(f.names[name], &dnsmessage.AResource{A: e.IP.As4()})
			} else if e.IP.Is6() && alias != "" {
				f.names[name] = append(f.names[name], &dnsmessage.AAAAResource{AAAA: e.IP.As16()})
			}
		}
	}
	f.servers = slices.Clone(cfg.Machine.Network.Resolver.DNSOverTLS)
	for _, a := range found.Spec {
		if len(cfg.Machine.Network.Resolver.DNSOverTLS) == 0 && a != f.at {
			f.servers = append(f.servers, config.TLSNameserver{Address: a})
		}
	}
	f.servers = f.servers[:min(len(f.servers), maxServers)]
	if len(cfg.Machine.Network.Resolver.DNSOverTLS) > 0 {
		f.trusted, err = network.Authorities(boot.CABundle, nil)
	}
	return f, err
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
	failed = make(chan error, 2)
	go func() { failed <- dag.Guard(r.log, func() error { return r.serveUDP(udp) }) }()
	go func() {
		failed <- dag.Guard(r.log, func() error { return r.serveTCP(netutil.LimitListener(tcp, maxClients)) })
	}()
	return func() { _ = errors.Join(udp.Close(), tcp.Close(), netlink.AddrDel(lo, address)) }, failed, nil // what has ended already is no problem
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
		if asked := bytes.Clone(packet[:n]); !r.outside(from) {
			r.answering(func() (err error) {
				if m := r.reply(asked, dnsPacket); m != nil {
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
			for !r.outside(conn.RemoteAddr()) {
				_ = conn.SetDeadline(time.Now().Add(idle))
				asked, err := readMessage(conn)
				if err != nil {
					return nil // the client has gone
				}
				done := make(chan struct{})
				if !r.answering(func() error { defer close(done); return writeMessage(conn, r.reply(asked, math.MaxUint16)) }) {
					return nil
				}
				<-done
			}
			return nil
		})
	}
}

// answering answers a question, if there is room. Who gets no answer asks again.
func (r *resolver) answering(answer func() error) bool {
	select {
	case r.questions <- struct{}{}:
		go func() {
			defer func() { <-r.questions }()
			_ = dag.Guard(r.log, answer)
		}()
		return true
	default:
		return false
	}
}

// Messages on a connection have their length before them (RFC 1035 4.2.2).
func readMessage(conn io.Reader) ([]byte, error) {
	var size [2]byte
	if _, err := io.ReadFull(conn, size[:]); err != nil {
		return nil, err
	}
	m := make([]byte, binary.BigEndian.Uint16(size[:]))
	_, err := io.ReadFull(conn, m)
	return m, err
}

func writeMessage(conn io.Writer, m []byte) error {
	_, err := conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(m))), m...))
	return err
}

// reply answers a packet with at most so many bytes, over UDP those that it allows; nil: there is no answer.
func (r *resolver) reply(packet []byte, most int) []byte {
	var p dnsmessage.Parser
	header, err := p.Start(packet)
	if err != nil || header.Response {
		return nil
	}
	m := dnsmessage.Message{Header: dnsmessage.Header{ID: header.ID, OpCode: header.OpCode, Response: true, RecursionDesired: header.RecursionDesired, RecursionAvailable: true}}
	questions, err := p.AllQuestions()
	opt, edns, other := options(&p)
	switch {
	case err != nil || other != nil || len(questions) != 1:
		m.RCode = dnsmessage.RCodeFormatError
	case header.OpCode != 0:
		m.RCode = dnsmessage.RCodeNotImplemented
	case questions[0].Class != dnsmessage.ClassINET || questions[0].Type == dnsmessage.TypeAXFR || questions[0].Type == typeIXFR:
		m.RCode = dnsmessage.RCodeRefused
	default:
		m.Questions, m.RCode = questions, dnsmessage.RCodeServerFailure
		if found := r.find(question{canonical(questions[0].Name.String()), questions[0].Type, opt.DNSSECAllowed()}); found != nil {
			m.RCode, m.Answers, m.Authorities, m.Additionals = found.RCode, found.Answers, found.Authorities, found.Additionals
		}
	}
	if edns {
		m.Additionals = append(slices.Clip(m.Additionals), ednsOption(opt.DNSSECAllowed()))
		most = max(most, min(int(opt.Class), maxPacket))
	}
	out, err := m.Pack()
	if err == nil && len(out) > most {
		m.Truncated, m.Answers, m.Authorities, m.Additionals = true, nil, nil, nil
		out, err = m.Pack()
	}
	if err != nil {
		return nil // a name that can't be written
	}
	return out
}

// options finds EDNS (RFC 6891) behind the questions.
func options(p *dnsmessage.Parser) (opt dnsmessage.ResourceHeader, is bool, err error) {
	if err := errors.Join(p.SkipAllAnswers(), p.SkipAllAuthorities()); err != nil {
		return opt, false, err
	}
	for {
		h, err := p.AdditionalHeader()
		if errors.Is(err, dnsmessage.ErrSectionDone) {
			return opt, is, nil
		}
		if err == nil {
			err = p.SkipAdditional()
		}
		if err != nil {
			return opt, is, err
		}
		if h.Type == dnsmessage.TypeOPT {
			opt, is = h, true
		}
	}
}

func ednsOption(secure bool) dnsmessage.Resource {
	var h dnsmessage.ResourceHeader
	_ = h.SetEDNS0(maxPacket, dnsmessage.RCodeSuccess, secure) // no error is possible
	return dnsmessage.Resource{Header: h, Body: &dnsmessage.OPTResource{}}
}

// canonical is a name in its one form.
func canonical(name string) string { return strings.ToLower(strings.TrimSuffix(name, ".")) + "." }

// find is what the node knows itself, else what a server says; nil for nothing.
func (r *resolver) find(q question) *dnsmessage.Message {
	name, err := dnsmessage.NewName(q.name)
	if err != nil {
		return nil
	}
	if own, is := r.known.names[q.name]; is && (q.kind == dnsmessage.TypeA || q.kind == dnsmessage.TypeAAAA) {
		m := &dnsmessage.Message{}
		for _, body := range own {
			if _, four := body.(*dnsmessage.AResource); four == (q.kind == dnsmessage.TypeA) {
				m.Answers = append(m.Answers, dnsmessage.Resource{Header: dnsmessage.ResourceHeader{Name: name, Class: dnsmessage.ClassINET, TTL: ownTTL}, Body: body})
			}
		}
		return m
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
func (r *resolver) ask(q question) (last *dnsmessage.Message) {
	answers := make(chan *dnsmessage.Message, len(r.servers))
	for _, s := range r.servers {
		select {
		case s.asked <- struct{}{}:
			go func() {
				var m *dnsmessage.Message
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
		if m != nil && (m.RCode == dnsmessage.RCodeSuccess || m.RCode == dnsmessage.RCodeNameError) {
			break
		}
	}
	return last
}

// server is a name server.
type server struct {
	address string
	tls     *tls.Config   // nil: without
	asked   chan struct{} // has a place for each question
}

func newServer(c config.TLSNameserver, pool *x509.CertPool) *server {
	s := &server{address: net.JoinHostPort(c.Address.String(), "53"), asked: make(chan struct{}, maxQuestions)}
	if c.Name != "" {
		s.address = net.JoinHostPort(c.Address.String(), "853")
		s.tls = &tls.Config{ServerName: c.Name, RootCAs: pool, ClientSessionCache: tls.NewLRUClientSessionCache(0)}
	}
	return s
}

// exchange asks one server, from a new port and with a random number. The kernel takes packets of this server only.
func (s *server) exchange(ctx context.Context, q question) (answer *dnsmessage.Message, err error) {
	for range exchanges {
		if answer, err = s.once(ctx, q, s.tls != nil); err == nil || ctx.Err() != nil {
			break
		}
	}
	if err == nil && answer.Truncated && s.tls == nil {
		answer, err = s.once(ctx, q, true)
	}
	if err != nil {
		return nil, fmt.Errorf("ask %s: %w", s.address, err)
	}
	return answer, nil
}

func (s *server) once(ctx context.Context, q question, stream bool) (*dnsmessage.Message, error) {
	name, err := dnsmessage.NewName(q.name)
	m := dnsmessage.Message{
		Header:      dnsmessage.Header{ID: uint16(rand.Uint32()), RecursionDesired: true},
		Questions:   []dnsmessage.Question{{Name: name, Type: q.kind, Class: dnsmessage.ClassINET}},
		Additionals: []dnsmessage.Resource{ednsOption(q.secure)},
	}
	packet, packing := m.Pack()
	if err := errors.Join(err, packing); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, exchangeTime)
	defer cancel()
	conn, err := s.dial(ctx, stream)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	ends, _ := ctx.Deadline()
	_ = conn.SetDeadline(ends)
	if stream {
		err = writeMessage(conn, packet)
	} else {
		_, err = conn.Write(packet)
	}
	for err == nil {
		if packet, err = receive(conn, stream); err != nil {
			break
		}
		answer := new(dnsmessage.Message)
		// Another one is of somebody who guesses, or late.
		if answer.Unpack(packet) == nil && answer.Response && answer.ID == m.ID && len(answer.Questions) == 1 &&
			canonical(answer.Questions[0].Name.String()) == q.name && answer.Questions[0].Type == q.kind {
			answer.Additionals = slices.DeleteFunc(answer.Additionals, func(r dnsmessage.Resource) bool { return r.Header.Type == dnsmessage.TypeOPT })
			return answer, nil
		}
	}
	return nil, err
}

func (s *server) dial(ctx context.Context, stream bool) (net.Conn, error) {
	switch {
	case s.tls != nil:
		return (&tls.Dialer{Config: s.tls}).DialContext(ctx, "tcp", s.address)
	case stream:
		return new(net.Dialer).DialContext(ctx, "tcp", s.address)
	}
	return new(net.Dialer).DialContext(ctx, "udp", s.address)
}

func receive(conn net.Conn, stream bool) ([]byte, error) {
	if stream {
		return readMessage(conn)
	}
	packet := make([]byte, maxPacket)
	n, err := conn.Read(packet)
	return packet[:n], err
}
