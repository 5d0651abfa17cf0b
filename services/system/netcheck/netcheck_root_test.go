package netcheck

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/net/dns/dnsmessage"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/garboard-os/garboard/tools/testing/isolate"
)

func TestMain(m *testing.M) { isolate.Main(m, syscall.CLONE_NEWNET) }

const there = "10.5.0.9"

func ip(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		t.Fatalf("ip %s: %v: %s", strings.Join(args, " "), err, out)
	}
}

// host is another machine at eth0's cable. do runs with its network.
func host(t *testing.T) (do func(func() error)) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces")
	}
	in := func(f func() error) {
		t.Helper()
		done := make(chan error)
		go func() {
			runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
			done <- f()
		}()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
	var ns netns.NsHandle
	in(func() (err error) { ns, err = netns.New(); return err })
	t.Cleanup(func() { ns.Close() })
	do = func(f func() error) {
		t.Helper()
		in(func() error {
			if err := netns.Set(ns); err != nil {
				return err
			}
			return f()
		})
	}
	ip(t, "link", "set", "lo", "up")
	ip(t, "link", "add", "eth0", "type", "veth", "peer", "name", "far0")
	t.Cleanup(func() { ip(t, "link", "del", "eth0") })
	far, err := netlink.LinkByName("far0")
	if err == nil {
		err = netlink.LinkSetNsFd(far, int(ns))
	}
	if err != nil {
		t.Fatal(err)
	}
	do(func() error {
		for _, args := range [][]string{{"link", "set", "lo", "up"}, {"link", "set", "far0", "up"}, {"address", "add", there + "/24", "dev", "far0"}, {"address", "add", "10.6.0.9/32", "dev", "far0"}, {"address", "add", "fd00::9/64", "dev", "far0", "nodad"}} {
			if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
				t.Errorf("ip %v: %s", args, out)
			}
		}
		return nil
	})
	ip(t, "link", "set", "eth0", "up")
	ip(t, "address", "add", "10.5.0.2/24", "dev", "eth0")
	ip(t, "address", "add", "fd00::2/64", "dev", "eth0", "nodad")
	ip(t, "route", "add", "10.6.0.9/32", "via", there)
	ip(t, "route", "add", "198.51.100.0/24", "via", there)
	return do
}

// certificate is one of the host, which is its own authority.
func certificate(t *testing.T) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "the host"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, DNSNames: []string{"good.example"}, IPAddresses: []net.IP{net.ParseIP(there), net.ParseIP("fd00::9")},
	}
	der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	c, err = x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(c)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pool
}

// serve has servers on the host: TLS on port 443, one that talks first on 22, and DNS.
func serve(t *testing.T, do func(func() error), cert tls.Certificate) {
	t.Helper()
	accept := func(l net.Listener, err error, each func(net.Conn)) error {
		if err != nil {
			return err
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() { defer c.Close(); each(c) }()
			}
		}()
		return nil
	}
	do(func() error {
		l, err := tls.Listen("tcp", ":443", &tls.Config{Certificates: []tls.Certificate{cert}})
		return accept(l, err, func(c net.Conn) { c.(*tls.Conn).Handshake() })
	})
	do(func() error {
		l, err := net.Listen("tcp", ":22")
		return accept(l, err, func(c net.Conn) { c.Write([]byte("SSH-2.0-x\r\n")); c.Read(make([]byte, 1)) })
	})
	do(func() error {
		c, err := net.ListenPacket("udp", ":53")
		if err != nil {
			return err
		}
		t.Cleanup(func() { c.Close() })
		go names(c)
		return nil
	})
}

// names answers questions for the address of good.example.
func names(c net.PacketConn) {
	for packet := make([]byte, 512); ; {
		n, from, err := c.ReadFrom(packet)
		if err != nil {
			return
		}
		var m dnsmessage.Message
		if m.Unpack(packet[:n]) != nil || len(m.Questions) != 1 {
			continue
		}
		m.Response, m.Authoritative, m.Additionals = true, true, nil
		switch q := m.Questions[0]; {
		case q.Name.String() != "good.example.":
			m.RCode = dnsmessage.RCodeNameError
		case q.Type == dnsmessage.TypeA:
			m.Answers = []dnsmessage.Resource{{Header: dnsmessage.ResourceHeader{Name: q.Name, Class: q.Class, TTL: 1}, Body: &dnsmessage.AResource{A: netip.MustParseAddr(there).As4()}}}
		}
		if answer, err := m.Pack(); err == nil {
			c.WriteTo(answer, from)
		}
	}
}

// Each layer is where the way to a host ends, and the way to a host where all is well ends nowhere.
func TestWhereItEnds(t *testing.T) {
	do := host(t)
	cert, pool := certificate(t)
	serve(t, do, cert)
	// was there once
	ip(t, "neighbour", "replace", "10.5.0.66", "lladdr", "02:00:00:00:00:66", "nud", "stale", "dev", "eth0")
	good, silent := netip.MustParseAddr(there), netip.MustParseAddr("10.5.0.8")
	way := []string{"route", "link", "address", "neighbour"}
	all := slices.Concat(way, []string{"TCP", "TLS"})
	for name, c := range map[string]struct {
		Check
		layers []string // all that are told; the last one with the error
		text   string   // in the last result and error
		fails  bool
	}{
		"all is well":               {Check{Host: there, Port: 443, Trusted: pool}, all, "certificate of CN=the host by CN=the host until 20", false},
		"the same by IPv6":          {Check{Host: "fd00::9", Port: 443, Trusted: pool}, all, "; trusted", false},
		"by name, one server":       {Check{Host: "good.example", Port: 443, Trusted: pool, Servers: []netip.Addr{silent, good}}, append([]string{"DNS"}, all...), "; trusted", false},
		"no such name":              {Check{Host: "bad.example", Servers: []netip.Addr{good}}, []string{"DNS"}, "no name server has an address for bad.example", true},
		"no name server":            {Check{Host: "good.example"}, []string{"DNS"}, "no name server has an address for good.example", true},
		"no route":                  {Check{Host: "192.0.2.1", Port: 443}, []string{"route"}, "the node has no route to 192.0.2.1", true},
		"nobody is there":           {Check{Host: "10.5.0.77", Port: 443}, way, "10.5.0.77 doesn't answer by ARP", true},
		"it was there once":         {Check{Host: "10.5.0.66", Port: 443}, way, "10.5.0.66 doesn't answer by ARP", true},
		"nobody is there, IPv6":     {Check{Host: "fd00::77", Port: 443}, way, "fd00::77 doesn't answer by ND", true},
		"to the gateway":            {Check{Host: "198.51.100.1"}, way, there + " is ", false},
		"the node itself":           {Check{Host: "10.5.0.2"}, way, "lo needs none", false},
		"nothing listens":           {Check{Host: there, Port: 444}, all[:5], "connection refused", true},
		"another speaks":            {Check{Host: there, Port: 22}, all, "port 22 has no TLS", false},
		"an authority of nobody":    {Check{Host: there, Port: 443, Trusted: x509.NewCertPool()}, all, "the node doesn't trust it: x509: certificate signed by unknown authority", true},
		"a certificate for another": {Check{Host: "10.6.0.9", Port: 443, Trusted: pool}, all, "x509: certificate is valid for 10.5.0.9", true},
	} {
		ended(t, name, c.Check, c.layers, c.text, c.fails)
	}
	do(func() error { return exec.Command("ip", "link", "set", "far0", "down").Run() })
	eventually.That(t, 5*time.Second, "eth0 has no carrier", func() error {
		out, err := exec.Command("ip", "link", "show", "eth0").Output()
		if err == nil && !bytes.Contains(out, []byte("NO-CARRIER")) {
			err = os.ErrExist
		}
		return err
	})
	ended(t, "the cable is out", Check{Host: there}, way[:2], "eth0 has no carrier", true)
}

func ended(t *testing.T, name string, c Check, layers []string, text string, fails bool) {
	t.Helper()
	var told []string
	var last *apiv1.NetworkStep
	c.Tell = func(s *apiv1.NetworkStep) error {
		if last.GetError() != "" {
			t.Errorf("%s: there is a step after the end", name)
		}
		told, last = append(told, s.Layer), s
		if took := s.Took.AsDuration(); took > stepTime*max(1, time.Duration(len(c.Servers)))+2*time.Second {
			t.Errorf("%s: %s took %s", name, s.Layer, took)
		}
		return nil
	}
	if err := c.Run(context.Background()); err != nil {
		t.Errorf("%s: %v", name, err)
	}
	whole := last.GetResult() + " " + last.GetError()
	if ends := last.GetError() != ""; !slices.Equal(told, layers) || fails != ends || !strings.Contains(whole, text) {
		t.Errorf("%s: told %q, the last %q, ends %v; want %q, %q, %v", name, told, whole, ends, layers, text, fails)
	}
}
