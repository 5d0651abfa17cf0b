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
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/garboard-os/garboard/services/system/outbound"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

const (
	// silence shows that nothing comes: an answer within one kernel takes less than a millisecond.
	silence  = 200 * time.Millisecond
	deadline = 20 * time.Second
	address4 = "169.254.116.108"
)

// rig is a node with the service. Its name servers are at addresses of loopback.
type rig struct {
	*testing.T
	store *resource.Store
	cfg   config.Config
}

func newRig(t *testing.T) *rig {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes addresses in a network namespace")
	}
	lo, err := netlink.LinkByName("lo")
	r := &rig{T: t, store: resource.NewStore()}
	r.must(errors.Join(err, netlink.LinkSetUp(lo)))
	return r
}

func (r *rig) must(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

// start runs the service with these name servers.
func (r *rig) start(servers ...string) {
	r.Helper()
	r.configure()
	r.use(servers...)
	graph, err := dag.New(dag.Options{Log: func(string) *slog.Logger { return slog.New(slog.NewTextHandler(r.Output(), nil)) }, SinceBoot: func() time.Duration { return 0 }}, Service(r.store))
	r.must(err)
	ctx, cancel := context.WithCancel(r.Context())
	done := make(chan error, 1)
	go func() { done <- graph.Run(ctx) }()
	r.Cleanup(func() { cancel(); <-done })
}

func (r *rig) configure() {
	r.Helper()
	c := r.cfg
	r.must(configuration.Configs.Put(r.store.As("test"), configuration.ConfigID, &c))
}

func (r *rig) use(servers ...string) {
	r.Helper()
	var all []netip.Addr
	for _, s := range servers {
		all = append(all, netip.MustParseAddr(s))
	}
	r.must(network.Resolvers.Put(r.store.As("test"), network.ResolversID, all))
}

// dnsmasq is a name server that says who it is, as the address of one.example. It ends with the test, or earlier.
func (r *rig) dnsmasq(at string, more ...string) (end func()) {
	r.Helper()
	program, err := exec.LookPath("dnsmasq")
	if err != nil {
		r.Skip("needs dnsmasq")
	}
	p := exec.Command(program, append([]string{"--keep-in-foreground", "--conf-file=/dev/null", "--no-resolv", "--no-hosts", "--bind-interfaces", "--user=root", "--pid-file=",
		"--listen-address=" + at, "--except-interface=none", "--local-ttl=600", "--host-record=one.example," + at, "--edns-packet-max=1232"}, more...)...)
	p.Stdout, p.Stderr = r.Output(), r.Output()
	r.must(p.Start())
	ended := false
	end = func() {
		if !ended {
			_ = p.Process.Kill()
			_ = p.Wait()
			ended = true
		}
	}
	r.Cleanup(end)
	eventually.That(r, deadline, "dnsmasq answers at "+at, func() error {
		_, err := question4(at, "one.example.", "udp")
		return err
	})
	return end
}

// question4 asks for addresses of IPv4.
func question4(at, name, protocol string) (*dns.Msg, error) {
	return send(at, new(dns.Msg).SetQuestion(name, dns.TypeA), protocol)
}

func send(at string, m *dns.Msg, protocol string) (*dns.Msg, error) {
	answer, _, err := (&dns.Client{Net: protocol, Timeout: deadline}).Exchange(m, net.JoinHostPort(at, "53"))
	return answer, err
}

// gets waits until the node answers so; each question has another name, which no cache has.
func (r *rig) gets(name, want string) {
	r.Helper()
	eventually.That(r, deadline, name+" is "+want, func() error {
		answer, err := question4(address4, name, "udp")
		if err != nil {
			return err
		}
		if got := addresses(answer); got != want {
			return fmt.Errorf("%s %s", dns.RcodeToString[answer.Rcode], got)
		}
		return nil
	})
}

func addresses(m *dns.Msg) string {
	var all []string
	for _, rr := range m.Answer {
		switch rr := rr.(type) {
		case *dns.A:
			all = append(all, rr.A.String())
		case *dns.AAAA:
			all = append(all, rr.AAAA.String())
		}
	}
	return strings.Join(all, " ")
}

func TestAnswers(t *testing.T) {
	r := newRig(t)
	long := []string{"--txt-record=long.example"}
	for range 8 {
		long[0] += "," + strings.Repeat("x", 250)
	}
	r.dnsmasq("127.0.0.2", long...)
	r.cfg.Machine.Network.ExtraHostEntries = []config.HostEntry{{IP: netip.MustParseAddr("192.0.2.9"), Aliases: []string{"Registry.example"}}}
	w := r.store.As("test")
	r.must(network.Hostnames.Put(w, network.HostnameID, "node-1.example"))
	r.must(network.Addresses.Put(w, network.AddressID, network.NodeAddress{Primary: netip.MustParseAddr("10.5.0.2")}))
	r.start("127.0.0.2")
	for name, want := range map[string]string{"ONE.example.": "127.0.0.2", "registry.example.": "192.0.2.9", "node-1.": "10.5.0.2", "node-1.example.": "10.5.0.2"} {
		r.gets(name, want)
	}
	r.gets("one.example.", "127.0.0.2")
	m := new(dns.Msg).SetQuestion("long.example.", dns.TypeTXT)
	asked, err := m.Pack()
	r.must(err)
	open, err := dns.DialTimeout("tcp", address4+":53", deadline)
	r.must(err)
	defer open.Close()
	for i := range 20 { // settings of something else don't end what a client has open
		r.cfg.Machine.Install.Disk = fmt.Sprintf("/dev/vd%c", 'a'+i)
		r.configure()
		_, err := open.Write(asked)
		r.must(err)
		if _, err := open.ReadMsgHeader(nil); err != nil {
			t.Fatalf("another setting has changed: %v", err)
		}
	}
	if answer, err := send(address4, m, "udp"); err != nil || !answer.Truncated {
		t.Errorf("%v, %v: want a part, over UDP", answer, err)
	}
	if answer, err := send(address4, m, "tcp"); err != nil || len(answer.Answer) != 1 {
		t.Errorf("%v, %v: want all of it, over TCP", answer, err)
	}
	if answer, err := send(address4, new(dns.Msg).SetQuestion("registry.example.", dns.TypeAAAA), "udp"); err != nil || answer.Rcode != dns.RcodeSuccess || len(answer.Answer) > 0 {
		t.Errorf("%v, %v: want no address of IPv6", answer, err)
	}
	for _, bad := range []*dns.Msg{new(dns.Msg).SetAxfr("example."), {MsgHdr: dns.MsgHdr{Id: 1, Opcode: dns.OpcodeUpdate}, Question: m.Question}, {MsgHdr: dns.MsgHdr{Id: 1}}} {
		if answer, err := send(address4, bad, "udp"); err != nil || answer.Rcode == dns.RcodeSuccess {
			t.Errorf("%v, %v for %v", answer, err, bad)
		}
	}
	r.cfg.Cluster.Network.PodSubnets = []netip.Prefix{netip.MustParsePrefix("fd00:10:244::/56")}
	r.configure()
	eventually.That(t, deadline, "it answers over IPv6", func() error {
		answer, err := question4("fd67:6172:6264::53", "one.example.", "udp")
		if err == nil && addresses(answer) != "127.0.0.2" {
			err = fmt.Errorf("%v", answer)
		}
		return err
	})
	r.cfg.Machine.Network.Resolver.Enabled = new(false)
	r.configure()
	eventually.That(t, deadline, "the address has gone", func() error {
		if l, err := net.Listen("tcp", "[fd67:6172:6264::53]:0"); err == nil {
			return errors.Join(errors.New("it is there"), l.Close())
		}
		return nil
	})
}

// Name servers that refuse, or take packets and say nothing, cost nothing; one that comes back is used again.
func TestDeadServers(t *testing.T) {
	r := newRig(t)
	drops, err := net.ListenPacket("udp", "127.0.0.3:53")
	r.must(err)
	t.Cleanup(func() { _ = drops.Close() })
	end := r.dnsmasq("127.0.0.4", "--address=/second.example/192.0.2.4")
	r.start("127.0.0.3", "127.0.0.2", "127.0.0.4")
	r.gets("first.second.example.", "192.0.2.4")
	var took []time.Duration
	for i := range 100 {
		began := time.Now()
		r.gets(fmt.Sprintf("a%d.second.example.", i), "192.0.2.4")
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	t.Logf("one of three servers lives: median %s, 99th percentile %s", took[50], took[98])
	if took[50] > exchangeTime/10 {
		t.Errorf("the dead servers cost %s", took[50])
	}
	end()
	r.dnsmasq("127.0.0.2", "--address=/second.example/192.0.2.2")
	r.gets("next.second.example.", "192.0.2.2")
}

// With no server that answers, the client learns so, and the node says it.
func TestNoServer(t *testing.T) {
	r := newRig(t)
	r.start("127.0.0.9")
	eventually.That(t, deadline, "the answer is SERVFAIL", func() error {
		answer, err := question4(address4, "one.example.", "udp")
		if err == nil && answer.Rcode != dns.RcodeServerFailure {
			err = fmt.Errorf("%v", answer)
		}
		return err
	})
}

// The service fails while another program has the port, and goes on when it is free.
func TestPortInUse(t *testing.T) {
	r := newRig(t)
	r.dnsmasq("127.0.0.2")
	r.must(up("lo", address4+"/32"))
	taken, err := net.ListenPacket("udp", address4+":53")
	r.must(err)
	r.start("127.0.0.2")
	r.must(taken.Close())
	r.gets("one.example.", "127.0.0.2")
}

// Whom the node reaches by a link that networkd doesn't manage is a pod and gets answers; machines of the network get
// none.
func TestStrangers(t *testing.T) {
	r := newRig(t)
	r.dnsmasq("127.0.0.2")
	r.start("127.0.0.2")
	r.gets("one.example.", "127.0.0.2")
	pair := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "near"}, PeerName: "far"}
	r.must(errors.Join(netlink.LinkAdd(pair), up("near", "10.5.0.2/24")))
	thread, do, done := make(chan int), make(chan func() error), make(chan error)
	t.Cleanup(func() { close(do) })
	go func() {
		runtime.LockOSThread() // for good: the thread ends with the goroutine, and its namespace with it
		if unix.Unshare(unix.CLONE_NEWNET) == nil {
			thread <- unix.Gettid()
		}
		for f := range do {
			done <- f()
		}
	}()
	far, err := netlink.LinkByName("far")
	r.must(errors.Join(err, netlink.LinkSetNsPid(far, <-thread)))
	do <- func() error {
		return errors.Join(up("far", "10.5.0.3/24"), netlink.RouteAdd(&netlink.Route{
			Dst: &net.IPNet{IP: net.ParseIP(address4).To4(), Mask: net.CIDRMask(32, 32)}, Gw: net.IPv4(10, 5, 0, 2)}))
	}
	r.must(<-done)
	ask := func(protocol string) error {
		do <- func() error {
			_, _, err := (&dns.Client{Net: protocol, Timeout: silence}).Exchange(new(dns.Msg).SetQuestion("one.example.", dns.TypeA), address4+":53")
			return err
		}
		return <-done
	}
	for _, protocol := range []string{"udp", "tcp"} {
		eventually.That(t, deadline, "a pod gets an answer", func() error { return ask(protocol) })
	}
	near, err := netlink.LinkByName("near")
	r.must(errors.Join(err, network.Links.Put(r.store.As("test"), "near", network.LinkStatus{Index: near.Attrs().Index})))
	for _, protocol := range []string{"udp", "tcp"} {
		if ask(protocol) == nil {
			t.Errorf("a stranger gets an answer over %s", protocol)
		}
	}
}

// up gives a link an address.
func up(name, address string) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	a, err := netlink.ParseAddr(address)
	if err != nil {
		return err
	}
	return errors.Join(netlink.AddrAdd(l, a), netlink.LinkSetUp(l))
}

// A server over TLS must have a certificate for its name, of an authority that the node trusts.
func TestOverTLS(t *testing.T) {
	r := newRig(t)
	ca, err := pki.NewMachineCA(time.Now())
	r.must(err)
	cert, key, err := ca.Issue(pki.Leaf{CN: "dns.example", DNS: []string{"dns.example"}, Server: true, Now: time.Now()})
	r.must(err)
	pair, err := tls.X509KeyPair(cert, key)
	r.must(err)
	l, err := net.Listen("tcp", "127.0.0.5:853")
	r.must(err)
	tlsServer := &dns.Server{Listener: tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{pair}}), Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		_ = w.WriteMsg(new(dns.Msg).SetRcode(q, dns.RcodeNameError))
	})}
	done := make(chan error)
	go func() { done <- tlsServer.ActivateAndServe() }()
	t.Cleanup(func() { _ = l.Close(); <-done })
	bundle := filepath.Join(t.TempDir(), "authorities")
	r.must(os.WriteFile(bundle, ca.Cert, 0o600))
	authorities, err := outbound.Authorities(bundle, nil)
	r.must(err)
	for _, tt := range []struct {
		name    string
		trusted *x509.CertPool
		problem string
	}{
		{"dns.example", authorities, ""},
		{"other.example", authorities, "other.example"},
		{"dns.example", x509.NewCertPool(), "unknown authority"},
	} {
		s := newServer(config.TLSNameserver{Address: netip.MustParseAddr("127.0.0.5"), Name: tt.name}, tt.trusted)
		answer, err := s.exchange(t.Context(), question{name: "a.example.", kind: dns.TypeA})
		switch {
		case tt.problem != "" && (err == nil || !strings.Contains(err.Error(), tt.problem)):
			t.Errorf("%v, want %s", err, tt.problem)
		case tt.problem == "" && (err != nil || answer.Rcode != dns.RcodeNameError):
			t.Errorf("%v, %v", answer, err)
		}
	}
}

// The doctor asks each name server, and tells which is silent, and which only over UDP.
func TestProbe(t *testing.T) {
	r := newRig(t)
	r.dnsmasq("127.0.0.2")
	r.configure()
	tcp, err := net.Listen("tcp", "127.0.0.3:53")
	r.must(err)
	defer tcp.Close()
	go func() {
		for {
			conn, err := tcp.Accept()
			if err != nil {
				return
			}
			stream := &dns.Conn{Conn: conn}
			if packet, err := stream.ReadMsgHeader(nil); err == nil {
				packet[2] |= 0x80 // an answer without an address
				_, _ = stream.Write(packet)
			}
			conn.Close()
		}
	}()
	r.use("127.0.0.2", "127.0.0.3", "127.0.0.4")
	began := time.Now()
	all := Probe(t.Context(), r.store, &r.cfg)
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("it took %s", took)
	}
	if len(all) != 3 || all[0].Err != nil || !strings.Contains(fmt.Sprint(all[1].Err), "it answers over TCP: true") || !strings.Contains(fmt.Sprint(all[2].Err), "it answers over TCP: false") || all[2].Server != "127.0.0.4:53" {
		t.Errorf("%v", all)
	}
}
