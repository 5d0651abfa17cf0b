package firewall

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/config"
)

const (
	// silence ends a connection that is dropped, which the counters show: packets between namespaces of one kernel take
	// microseconds.
	silence = 100 * time.Millisecond
	// answer is for one that must work, on a busy machine.
	answer = 10 * time.Second
)

// machines is a node, which is this process's namespace, and what is around it:
//
//	pod 10.244.0.2 ─ cni0 ─ node ─ eth0 10.5.0.2 ─ 10.5.0.3 another control plane, with 198.51.100.7, a stranger, and 169.254.169.254
type machines struct {
	*testing.T
	pod, other *space
}

// space is a thread in a network namespace of its own.
type space struct {
	tid int
	do  chan func()
}

func newSpace(t *testing.T) *space {
	s := &space{do: make(chan func())}
	ready := make(chan error)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with the goroutine
		s.tid = unix.Gettid()
		ready <- unix.Unshare(unix.CLONE_NEWNET)
		for f := range s.do {
			f()
		}
	}()
	if err := <-ready; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { close(s.do) })
	return s
}

// in runs f in the namespace; nil is the node's.
func (s *space) in(f func() error) error {
	if s == nil {
		return f()
	}
	done := make(chan error)
	s.do <- func() { done <- f() }
	return <-done
}

func (m *machines) must(err error) {
	m.Helper()
	if err != nil {
		m.Fatal(err)
	}
}

// up gives a link addresses.
func up(name string, addresses ...string) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	for _, text := range addresses {
		a, err := netlink.ParseAddr(text)
		if err != nil {
			return err
		}
		a.Flags = unix.IFA_F_NODAD
		if err := netlink.AddrReplace(l, a); err != nil {
			return fmt.Errorf("%s on %s: %w", text, name, err)
		}
	}
	return netlink.LinkSetUp(l)
}

func route(to, via string) error {
	network := netip.MustParsePrefix(to)
	return netlink.RouteReplace(&netlink.Route{Dst: &net.IPNet{IP: network.Addr().AsSlice(), Mask: net.CIDRMask(network.Bits(), network.Addr().BitLen())}, Gw: net.ParseIP(via)})
}

// forget removes what a machine knows of its neighbours.
func forget() error {
	known, err := netlink.NeighList(0, netlink.FAMILY_V6)
	for _, n := range known {
		if n.State&unix.NUD_NOARP == 0 {
			err = errors.Join(err, netlink.NeighDel(&n))
		}
	}
	return err
}

// connect makes a link between the node and a namespace.
func (m *machines) connect(s *space, name string, here []string, setup func() error) {
	m.Helper()
	pair := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: "far"}
	m.must(netlink.LinkAdd(pair))
	m.Cleanup(func() { _ = netlink.LinkDel(pair) }) // the namespace ends, too
	far, err := netlink.LinkByName("far")
	m.must(err)
	m.must(netlink.LinkSetNsPid(far, s.tid))
	m.must(up(name, here...))
	m.must(s.in(setup))
}

func newMachines(t *testing.T) *machines {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces")
	}
	m := &machines{T: t, pod: newSpace(t), other: newSpace(t)}
	m.must(up("lo"))
	for _, s := range []*space{nil, m.pod, m.other} {
		// it would take a second
		m.must(s.in(func() error { return os.WriteFile("/proc/sys/net/ipv6/conf/default/accept_dad", []byte("0"), 0) }))
	}
	for _, file := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
		m.must(os.WriteFile("/proc/sys/net/"+file, []byte("1"), 0))
	}
	m.connect(m.pod, "cni0", []string{"10.244.0.1/24", "fd00:244::1/64"}, func() error {
		return errors.Join(up("far", "10.244.0.2/24", "fd00:244::2/64"), route("0.0.0.0/0", "10.244.0.1"), route("::/0", "fd00:244::1"))
	})
	m.connect(m.other, "eth0", []string{"10.5.0.2/24", "fd00:5::2/64"}, func() error {
		return errors.Join(up("lo", "198.51.100.7/32", "2001:db8::7/128", "169.254.169.254/32", "fd00:ec2::254/128"), up("far", "10.5.0.3/24", "fd00:5::3/64"),
			route("0.0.0.0/0", "10.5.0.2"), route("::/0", "fd00:5::2"))
	})
	for _, to := range []string{"198.51.100.7/32", "169.254.169.254/32"} {
		m.must(route(to, "10.5.0.3"))
	}
	for _, to := range []string{"2001:db8::7/128", "fd00:ec2::254/128"} {
		m.must(route(to, "fd00:5::3"))
	}
	for _, port := range []string{"2379", "2380", "50000", "50001", "8080"} {
		m.listen(nil, port)
		m.listen(m.other, port)
	}
	m.listen(m.other, "80")
	m.Cleanup(func() { _ = nft{}.replace(nil, nil) })
	return m
}

// listen answers each line.
func (m *machines) listen(s *space, port string) {
	m.Helper()
	m.must(s.in(func() error {
		l, err := net.Listen("tcp", ":"+port)
		if err != nil {
			return err
		}
		m.Cleanup(func() { _ = l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					defer c.Close()
					var b [1]byte
					for {
						if _, err := c.Read(b[:]); err != nil {
							return
						}
						if _, err := c.Write(b[:]); err != nil {
							return
						}
					}
				}()
			}
		}()
		return nil
	}))
}

func talk(c net.Conn, patience time.Duration) error {
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := c.Write([]byte{1}); err != nil {
		return err
	}
	_, err := c.Read(make([]byte, 1))
	return err
}

// dial connects from an address, "" for any, and gets an answer.
func (m *machines) dial(s *space, from, to string, patience time.Duration) (c net.Conn, err error) {
	err = s.in(func() error {
		d := net.Dialer{Timeout: patience}
		if from != "" {
			d.LocalAddr = &net.TCPAddr{IP: net.ParseIP(from)}
		}
		c, err = d.Dial("tcp", to)
		return err
	})
	if err == nil {
		m.Cleanup(func() { _ = c.Close() })
		err = talk(c, patience)
	}
	return c, err
}

func (m *machines) reaches(what string, s *space, from, to string) {
	m.Helper()
	if _, err := m.dial(s, from, to, answer); err != nil {
		m.Errorf("%s: %v", what, err)
	}
}

// refused tries, and the rule counts it.
func (m *machines) refused(what string, s *space, from, to, by string) {
	m.Helper()
	before := m.counted(by)
	if _, err := m.dial(s, from, to, silence); err == nil {
		m.Errorf("%s: %s is reached", what, to)
	}
	if after := m.counted(by); after.packets <= before.packets || after.bytes <= before.bytes {
		m.Errorf("%s: %s has counted %+v, and before %+v", what, by, after, before)
	}
}

func (m *machines) counted(name string) hit {
	m.Helper()
	all, err := nft{}.read()
	m.must(err)
	if _, there := all[name]; !there {
		m.Errorf("the table has no counter %s", name)
	}
	return hit{all[name].Packets, all[name].Bytes}
}

type hit struct{ packets, bytes uint64 }

// put replaces the rules, and nothing that was counted is lost.
func (m *machines) put(table []rule) {
	m.Helper()
	before, err := nft{}.read()
	m.must(err)
	m.must(nft{}.replace(table, before))
	after, err := nft{}.read()
	m.must(err)
	for name, counter := range after {
		if counter.Packets < before[name].Packets {
			m.Errorf("%s has counted %d packets, and before %d", name, counter.Packets, before[name].Packets)
		}
	}
}

// of are the rules of a configuration on this node, which has met another control plane.
func of(c *config.Config) []rule {
	return rules(c, addresses, []netip.Addr{netip.MustParseAddr("10.5.0.3"), netip.MustParseAddr("fd00:5::3")})
}

func TestAttacks(t *testing.T) {
	m := newMachines(t)
	both := node(config.ControlPlane, nil)
	both.Cluster.Network.PodSubnets = append(both.Cluster.Network.PodSubnets, p("fd00:244::/56"))
	m.reaches("without rules", m.pod, "", "10.5.0.2:2379")
	m.put(of(both))

	for _, etcd := range []string{"2379", "2380"} {
		m.refused("a pod", m.pod, "", "10.5.0.2:"+etcd, "pods-to-etcd")
		m.refused("a pod", m.pod, "", "10.244.0.1:"+etcd, "pods-to-etcd")
		m.refused("a pod", m.pod, "", "[fd00:5::2]:"+etcd, "pods-to-etcd")
		m.refused("a pod to another node", m.pod, "", "10.5.0.3:"+etcd, "pods-to-etcd")
		m.refused("a pod to another node", m.pod, "", "[fd00:5::3]:"+etcd, "pods-to-etcd")
		m.refused("a stranger", m.other, "198.51.100.7", "10.5.0.2:"+etcd, "strangers-to-etcd")
		m.refused("a stranger", m.other, "2001:db8::7", "[fd00:5::2]:"+etcd, "strangers-to-etcd")
		m.reaches("a control plane", m.other, "10.5.0.3", "10.5.0.2:"+etcd)
		m.reaches("a control plane", m.other, "fd00:5::3", "[fd00:5::2]:"+etcd)
		m.reaches("the node", nil, "", "10.5.0.2:"+etcd)
		m.reaches("the node", nil, "", "127.0.0.1:"+etcd)
		m.reaches("the node to another one", nil, "", "10.5.0.3:"+etcd)
	}
	m.refused("a pod to trustd", m.pod, "", "10.5.0.2:50001", "pods-to-trustd")
	m.refused("a pod to trustd", m.pod, "", "10.5.0.3:50001", "pods-to-trustd")
	m.reaches("a worker somewhere to trustd", m.other, "198.51.100.7", "10.5.0.2:50001")
	m.refused("a pod to the metadata", m.pod, "", "169.254.169.254:80", "pods-to-metadata")
	m.refused("a pod to the metadata", m.pod, "", "[fd00:ec2::254]:80", "pods-to-metadata")
	m.reaches("the node to the metadata", nil, "", "169.254.169.254:80")
	for _, other := range []string{"50000", "8080"} {
		m.reaches("a pod", m.pod, "", "10.5.0.2:"+other)
		m.reaches("a pod", m.pod, "", "10.5.0.3:"+other)
		m.reaches("a pod", m.pod, "", "[fd00:5::2]:"+other)
		m.reaches("a stranger", m.other, "198.51.100.7", "10.5.0.2:"+other)
	}
	m.reaches("a pod to an etcd that is none of the cluster's", m.pod, "", "198.51.100.7:2379")
}

// A Service with the address of a control plane is another way to its etcd, for pods and for strangers.
func TestThroughAService(t *testing.T) {
	m := newMachines(t)
	c, err := nftables.New()
	m.must(err)
	services := c.AddTable(&nftables.Table{Name: "services", Family: nftables.TableFamilyIPv4})
	chain := c.AddChain(&nftables.Chain{Name: "pre", Table: services, Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityNATDest})
	for port, target := range map[uint16]uint16{7000: 2379, 7001: 8080} {
		c.AddRule(&nftables.Rule{Table: services, Chain: chain, Exprs: []expr.Any{
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_TCP}},
			&expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2, DestRegister: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{byte(port >> 8), byte(port)}},
			&expr.Immediate{Register: 1, Data: net.ParseIP("10.5.0.3").To4()}, &expr.Immediate{Register: 2, Data: []byte{byte(target >> 8), byte(target)}},
			&expr.NAT{Type: expr.NATTypeDestNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: 1, RegProtoMin: 2},
		}})
	}
	m.must(c.Flush())
	m.Cleanup(func() { c.DelTable(services); _ = c.Flush() })
	m.put(of(node(config.Worker, nil)))
	m.reaches("a Service of something else", m.pod, "", "10.5.0.2:7001")
	m.refused("a Service of etcd", m.pod, "", "10.5.0.2:7000", "pods-to-etcd")
	m.must(up("cni0", "10.1.0.1/24")) // a client that is no pod, on a link of the node
	m.must(m.pod.in(func() error { return up("far", "10.1.0.2/24") }))
	m.reaches("a stranger and a Service of something else", m.pod, "10.1.0.2", "10.5.0.2:7001")
	m.refused("a stranger and a Service of etcd", m.pod, "10.1.0.2", "10.5.0.2:7000", "pods-to-etcd")
}

func TestConfiguredRules(t *testing.T) {
	m := newMachines(t)
	with := func(all ...config.FirewallRule) *config.Config {
		return node(config.ControlPlane, func(f *config.Firewall) { f.Rules = all })
	}
	accept, drop := config.FirewallAccept, config.FirewallDrop
	stranger, everyone := []netip.Prefix{p("198.51.100.0/24"), p("198.51.100.7/32")}, []netip.Prefix{p("0.0.0.0/0"), p("::/0")}

	m.put(of(with(config.FirewallRule{Name: "web", Action: drop, Protocol: "tcp", Ports: []string{"8000-8100", "443"}, Sources: stranger, Interface: "eth0", Destinations: []netip.Prefix{p("10.5.0.2/32")}})))
	m.refused("a port of a range", m.other, "198.51.100.7", "10.5.0.2:8080", "web")
	m.reaches("another sender", m.other, "10.5.0.3", "10.5.0.2:8080")
	m.reaches("another port", m.other, "198.51.100.7", "10.5.0.2:50000")
	m.reaches("another family", m.other, "2001:db8::7", "[fd00:5::2]:8080")
	m.reaches("another link", m.pod, "", "10.5.0.2:8080")

	// A connection that is there goes on when a rule comes.
	open, err := m.dial(m.other, "198.51.100.7", "10.5.0.2:50000", answer)
	m.must(err)
	goes, err := m.dial(m.other, "10.5.0.3", "10.5.0.2:50000", answer)
	m.must(err)
	out, err := m.dial(nil, "", "198.51.100.7:8080", answer)
	m.must(err)
	m.put(of(with(config.FirewallRule{Name: "own", Action: accept, Sources: []netip.Prefix{p("10.5.0.0/24")}}, config.FirewallRule{Name: "rest", Action: drop, Sources: everyone})))
	for _, c := range []net.Conn{open, goes, out} {
		m.must(talk(c, answer))
	}
	m.reaches("an answer to the node", nil, "", "198.51.100.7:50000")
	m.reaches("the node itself", nil, "", "127.0.0.1:8080")
	m.refused("whatever isn't accepted", m.other, "198.51.100.7", "10.5.0.2:50000", "rest")
	m.refused("and over IPv6", m.other, "2001:db8::7", "[fd00:5::2]:50000", "rest")
	m.refused("and a pod", m.pod, "", "10.5.0.2:8080", "rest")
	// Neighbours are found anew.
	for _, s := range []*space{nil, m.other} {
		m.must(s.in(forget))
	}
	m.reaches("over IPv6 after that", nil, "", "[fd00:5::3]:8080")

	m.put(of(with(config.FirewallRule{Name: "scrape", Action: accept, Protocol: "tcp", Ports: []string{"2379"}, Sources: []netip.Prefix{p("10.244.0.0/16")}})))
	m.reaches("what is opened for pods", m.pod, "", "10.5.0.2:2379")
	m.reaches("what is opened for pods", m.pod, "", "10.5.0.3:2379")
	m.refused("what isn't", m.pod, "", "10.5.0.3:2380", "pods-to-etcd")
	if m.counted("scrape").packets == 0 {
		t.Error("accepted packets aren't counted")
	}
}

// The kernel takes a whole table or keeps the former one, and other tables are left alone.
func TestOneTransaction(t *testing.T) {
	m := newMachines(t)
	c, err := nftables.New()
	m.must(err)
	foreign := c.AddTable(&nftables.Table{Name: "foreign", Family: nftables.TableFamilyINet})
	m.must(c.Flush())
	m.Cleanup(func() { c.DelTable(foreign); _ = c.Flush() })

	good := of(node(config.ControlPlane, nil))
	m.put(good)
	m.refused("a pod", m.pod, "", "10.5.0.2:2379", "pods-to-etcd")
	before := m.counted("pods-to-etcd")
	bad := append(slices.Clone(good[:1]), rule{chain: input, action: drop, name: strings.Repeat("x", 300)})
	if err := (nft{}).replace(bad, nil); err == nil || strings.Contains(err.Error(), "\n") {
		t.Errorf("the kernel takes a name of 300 bytes: %v", err)
	}
	if after := m.counted("pods-to-etcd"); after != before {
		t.Errorf("the former rules have counted %+v, and before %+v", after, before)
	}
	m.refused("a pod", m.pod, "", "10.5.0.2:2379", "pods-to-etcd")

	// As many as a configuration may have.
	var many []netip.Prefix
	for i := range 249 {
		many = append(many, netip.PrefixFrom(netip.AddrFrom16([16]byte{0x20, 1, 15: byte(i)}), 128))
	}
	m.put(append(slices.Clone(good), rule{name: "many", chain: input, action: drop, from: append(many, p("198.51.100.7/32"))}))
	m.refused("the last of many", m.other, "198.51.100.7", "10.5.0.2:8080", "many")

	m.must(nft{}.replace(nil, nil))
	if all, err := (nft{}).read(); len(all) != 0 || err != nil {
		t.Errorf("%d counters are left: %v", len(all), err)
	}
	m.must(nft{}.replace(nil, nil)) // once more
	m.reaches("without rules", m.pod, "", "10.5.0.2:2379")
	tables, err := c.ListTables()
	m.must(err)
	if len(tables) != 1 || tables[0].Name != "foreign" {
		t.Errorf("%d tables are left, want that of another program", len(tables))
	}
}
