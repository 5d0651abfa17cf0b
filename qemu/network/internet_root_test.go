package network

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"

	"github.com/garboard-os/garboard/qemu/osthread"
)

// insideEnv marks the process that runs in a network namespace of its own.
const insideEnv = "GARBOARD_TEST_INSIDE"

// outside is a machine of the internet: an address that no node has (RFC 5737), in the namespace of the test.
const outside = "203.0.113.7"

// A node reaches what this machine reaches, by TCP and UDP, and this machine's name server, but only if its network has
// a way out, and never the machine's loopback. The machine gets nothing for it: no link, no address and no route.
func TestInternet(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: a network namespace")
	}
	if os.Getenv(insideEnv) == "" {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestInternet$", "-test.v", "-test.timeout=2m")
		cmd.Env = append(os.Environ(), insideEnv+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
		out, err := cmd.CombinedOutput()
		if bytes.Contains(out, []byte("--- SKIP: TestInternet")) {
			t.Skipf("%s", out)
		}
		if err != nil || !bytes.Contains(out, []byte("--- PASS: TestInternet")) {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	resolvers, err := dns.ClientConfigFromFile("/etc/resolv.conf")
	if err != nil || len(resolvers.Servers) == 0 {
		t.Skipf("this machine has no name server: %v", err)
	}
	lo, err := netlink.LinkByName("lo")
	must(t, err, netlink.LinkSetUp(lo))
	for _, a := range []string{outside, resolvers.Servers[0]} {
		if !netip.MustParseAddr(a).IsLoopback() {
			must(t, netlink.AddrAdd(lo, &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(netip.MustParseAddr(a), 32))}))
		}
	}
	answering(t, "127.0.0.1:7000", outside+":7000", net.JoinHostPort(resolvers.Servers[0], "53"))
	before := machine(t)
	for _, open := range []bool{true, false} {
		t.Run(fmt.Sprintf("open %t", open), func(t *testing.T) {
			n := Node{"out-1", netip.MustParseAddr("10.5.0.2")}
			l, err := New(Config{Cluster: "out", Prefix: netip.MustParsePrefix("10.5.0.0/24"), Nodes: []Node{n}, Internet: open}, slog.New(slog.DiscardHandler))
			must(t, err)
			defer func() { must(t, l.Close()) }()
			node := joined(t, l, n)
			for _, to := range []struct {
				network, address string
				reached          bool
			}{
				{"tcp", outside + ":7000", open}, {"udp", outside + ":7000", open}, {"udp", NameServer.String() + ":53", open},
				{"tcp", "127.0.0.1:7000", false}, {"tcp", outside + ":7001", false},
			} {
				if err := asked(node, to.network, to.address, map[bool]time.Duration{true: 20 * time.Second, false: time.Second}[to.reached]); (err == nil) != to.reached {
					t.Errorf("%s %s: %v", to.network, to.address, err)
				}
			}
			if now := machine(t); now != before {
				t.Errorf("the machine was\n%sand is\n%s", before, now)
			}
		})
	}
	if now := machine(t); now != before {
		t.Errorf("the machine was\n%sand is\n%s", before, now)
	}
}

func must(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// answering sends back what comes, by TCP and UDP.
func answering(t *testing.T, addresses ...string) {
	t.Helper()
	for _, a := range addresses {
		l, err := net.Listen("tcp", a)
		must(t, err)
		t.Cleanup(func() { l.Close() })
		go func() {
			for conn, err := l.Accept(); err == nil; conn, err = l.Accept() {
				_, _ = io.Copy(conn, conn)
				conn.Close()
			}
		}()
		p, err := net.ListenPacket("udp", a)
		must(t, err)
		t.Cleanup(func() { p.Close() })
		go func() {
			b := make([]byte, 2048)
			for n, from, err := p.ReadFrom(b); err == nil; n, from, err = p.ReadFrom(b) {
				_, _ = p.WriteTo(b[:n], from)
			}
		}()
	}
}

// joined is a thread in the namespace of a node, with its cable, its address and its default route.
func joined(t *testing.T, l *LAN, n Node) *osthread.Thread {
	t.Helper()
	peer, err := l.Veth(n)
	must(t, err)
	link, err := l.links.LinkByName(peer)
	must(t, err)
	node, err := osthread.NewInNamespace()
	must(t, err)
	t.Cleanup(func() { node.Close() })
	var own *os.File
	must(t, node.Do(func() (err error) { own, err = os.Open("/proc/thread-self/ns/net"); return err }))
	defer own.Close()
	must(t, l.links.LinkSetNsFd(link, int(own.Fd())))
	must(t, node.Do(func() error {
		link, err := netlink.LinkByName(peer)
		if err != nil {
			return err
		}
		return errors.Join(netlink.AddrAdd(link, &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(n.Address, 24))}), netlink.LinkSetUp(link),
			netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: Gateway(l.config.Prefix).AsSlice()}))
	}))
	return node
}

// asked sends more than a packet has, by TCP, and wants it back.
func asked(from *osthread.Thread, network, address string, within time.Duration) error {
	question := bytes.Repeat([]byte("question"), 100)
	if network == "tcp" {
		question = bytes.Repeat(question, 100)
	}
	var conn net.Conn
	if err := from.Do(func() (err error) {
		ctx, cancel := context.WithTimeout(context.Background(), within)
		defer cancel()
		conn, err = new(net.Dialer).DialContext(ctx, network, address)
		return err
	}); err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(within)); err != nil {
		return err
	}
	go func() { _, _ = conn.Write(question) }()
	answer := make([]byte, len(question))
	if _, err := io.ReadFull(conn, answer); err != nil {
		return err
	}
	if !bytes.Equal(question, answer) {
		return errors.New("another answer")
	}
	return nil
}

// machine is what the kernel says about the links, addresses and routes of this process's namespace.
func machine(t *testing.T) (text string) {
	t.Helper()
	links, err := netlink.LinkList()
	must(t, err)
	for _, l := range links {
		text += l.Attrs().Name + "\n"
	}
	addresses, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	must(t, err)
	for _, a := range addresses {
		text += a.String() + "\n"
	}
	routes, err := netlink.RouteList(nil, netlink.FAMILY_ALL)
	must(t, err)
	for _, r := range routes {
		text += r.String() + "\n"
	}
	forwards, err := os.ReadFile("/proc/sys/net/ipv4/ip_forward")
	must(t, err)
	return text + "forwards " + string(forwards)
}
