package firewall

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/config"
)

var p = netip.MustParsePrefix

// node is a configuration with defaults.
func node(t config.MachineType, change func(*config.Firewall)) *config.Config {
	c := &config.Config{Machine: config.Machine{Type: t}}
	if change != nil {
		change(&c.Machine.Network.Firewall)
	}
	c.FillDefaults()
	return c
}

var (
	addresses     = []netip.Prefix{p("10.5.0.2/24"), p("fd00:5::2/64")}
	controlPlanes = []netip.Addr{netip.MustParseAddr("10.5.0.3"), netip.MustParseAddr("10.9.0.3")}
)

// packet is one, with what the rules look at.
type packet struct {
	chain    string
	link     string
	protocol string
	port     uint16
	from, to string
	goesOn   bool
}

// decide is what the rules mean, in another way than the kernel's.
func decide(table []rule, k packet) (action, by string) {
	in := func(all []netip.Prefix, a string) bool {
		addr := netip.MustParseAddr(a)
		return len(all) == 0 || slices.ContainsFunc(all, func(p netip.Prefix) bool { return p.Contains(addr) })
	}
	for _, r := range table {
		port := len(r.ports) == 0 || slices.ContainsFunc(r.ports, func(p ports) bool { return p[0] <= k.port && k.port <= p[1] })
		link := r.link == "" || r.link == k.link
		if r.chain != k.chain || !port || !link || r.protocol != "" && r.protocol != k.protocol || !in(r.from, k.from) || !in(r.to, k.to) || r.goesOn && !k.goesOn {
			continue
		}
		return r.action, r.name
	}
	return "", ""
}

func TestRules(t *testing.T) {
	t.Parallel()
	const pod, cp, far, worker, stranger = "10.244.3.4", "10.5.0.3", "10.9.0.3", "10.5.0.77", "198.51.100.7"
	plain := node(config.ControlPlane, nil)
	networks := node(config.ControlPlane, func(f *config.Firewall) { f.NodeNetworks = []netip.Prefix{p("10.7.0.0/16")} })
	open := node(config.ControlPlane, func(f *config.Firewall) {
		f.AllowMetadata = true
		f.Rules = []config.FirewallRule{
			{Name: "metrics", Action: config.FirewallAccept, Protocol: "tcp", Ports: []string{"2379"}, Sources: []netip.Prefix{p("10.244.0.0/16")}},
			{Name: "nobody", Action: config.FirewallDrop, Interface: "eth1"},
			{Name: "range", Action: config.FirewallDrop, Protocol: "udp", Ports: []string{"100-200", "300"}},
		}
	})
	to := func(port uint16, from string) packet {
		return packet{chain: input, link: "eth0", protocol: "tcp", port: port, from: from, to: "10.5.0.2"}
	}
	on := func(link string, k packet) packet { k.link = link; return k }
	through := func(port uint16, to string) packet {
		return packet{chain: forward, link: "cni0", protocol: "tcp", port: port, from: pod, to: to}
	}
	for _, test := range []struct {
		what string
		cfg  *config.Config
		k    packet
		want string // verdict and name; "" is that no rule matches, which is accepted
	}{
		{"the node itself", plain, on("lo", to(2379, "10.5.0.2")), "accept"},
		{"a control plane", plain, to(2380, cp), "accept"},
		{"one in a network of its own", plain, to(2379, far), "accept"},
		{"one that joins nearby", plain, to(2379, worker), "accept"},
		{"over IPv6", plain, packet{chain: input, link: "eth0", protocol: "tcp", port: 2380, from: "fd00:5::9", to: "fd00:5::2"}, "accept"},
		{"a pod of this node", plain, on("cni0", to(2379, pod)), "drop pods-to-etcd"},
		{"a pod that isn't masqueraded", plain, to(2379, pod), "drop pods-to-etcd"},
		{"a pod of an unknown network", plain, on("cali1", to(2379, "172.20.0.1")), "drop strangers-to-etcd"},
		{"a stranger", plain, to(2380, stranger), "drop strangers-to-etcd"},
		{"a stranger over IPv6", plain, packet{chain: input, link: "eth0", protocol: "tcp", port: 2380, from: "2001:db8::9", to: "fd00:5::2"}, "drop strangers-to-etcd"},
		{"udp", plain, packet{chain: input, link: "eth0", protocol: "udp", port: 2379, from: pod, to: "10.5.0.2"}, ""},
		{"other ports", plain, on("cni0", to(6443, pod)), ""},
		{"trustd for a worker somewhere", plain, to(50001, stranger), ""},
		{"trustd for pods", plain, on("cni0", to(50001, pod)), "drop pods-to-trustd"},
		{"trustd for the nodes' networks", networks, to(50001, "10.7.3.4"), "accept"},
		{"trustd for the node's own network", networks, to(50001, worker), "accept"},
		{"trustd for a control plane", networks, to(50001, far), "accept"},
		{"trustd for a stranger", networks, to(50001, stranger), "drop strangers-to-trustd"},
		{"etcd for the nodes' networks", networks, to(2379, "10.7.3.4"), "accept"},
		{"the machine API", networks, to(50000, stranger), ""},
		{"pod to another control plane", plain, through(2379, cp), "drop pods-to-etcd"},
		{"pod to the other port", plain, through(2380, far), "drop pods-to-etcd"},
		{"pod to trustd", plain, through(50001, cp), "drop pods-to-trustd"},
		{"pod to an etcd of pods", plain, through(2379, "10.244.9.9"), ""},
		{"pod to an etcd elsewhere", plain, through(2379, stranger), ""},
		{"pod to the API", plain, through(6443, cp), ""},
		{"pod to the metadata", plain, through(80, "169.254.169.254"), "drop pods-to-metadata"},
		{"pod to the metadata over IPv6", plain, packet{chain: forward, link: "veth1", protocol: "tcp", port: 80, from: "fd00:99::1", to: "fd00:ec2::254"}, "drop pods-to-metadata"},
		{"metadata, allowed", open, through(80, "169.254.169.254"), ""},
		{"another pod network", plain, packet{chain: forward, link: "cali1", protocol: "tcp", port: 2379, from: "172.20.0.1", to: cp}, "drop pods-to-etcd"},
		{"a stranger through a Service", plain, packet{chain: forward, link: "eth0", protocol: "tcp", port: 2379, from: stranger, to: cp}, "drop pods-to-etcd"},
		{"a node routes for others", plain, packet{chain: forward, link: "eth0", protocol: "tcp", port: 2379, from: worker, to: cp}, "accept"},
		{"on a worker", node(config.Worker, nil), through(2379, cp), "drop pods-to-etcd"},
		{"to a worker's own port", node(config.Worker, nil), to(2379, pod), ""},
		{"opened for pods", open, on("cni0", to(2379, pod)), "accept metrics"},
		{"opened for pods, elsewhere", open, through(2379, cp), "accept metrics"},
		{"the other port stays closed", open, on("cni0", to(2380, pod)), "drop pods-to-etcd"},
		{"a link", open, on("eth1", to(22, stranger)), "drop nobody"},
		{"a reply", open, packet{chain: input, link: "eth1", protocol: "tcp", port: 40000, from: stranger, to: "10.5.0.2", goesOn: true}, "accept"},
		{"neighbours", open, packet{chain: input, link: "eth1", protocol: "icmp", from: "fe80::1", to: "fe80::2", goesOn: true}, "accept"},
		{"in a range", open, packet{chain: input, link: "eth0", protocol: "udp", port: 150, from: stranger, to: "10.5.0.2"}, "drop range"},
		{"beside it", open, packet{chain: input, link: "eth0", protocol: "udp", port: 201, from: stranger, to: "10.5.0.2"}, ""},
		{"a single one", open, packet{chain: input, link: "eth0", protocol: "udp", port: 300, from: stranger, to: "10.5.0.2"}, "drop range"},
	} {
		verdict, by := decide(rules(test.cfg, addresses, controlPlanes), test.k)
		if got := strings.TrimSpace(verdict + " " + by); got != test.want {
			t.Errorf("%s: %q, want %q", test.what, got, test.want)
		}
	}
	// Before the node has an address, only itself reaches etcd.
	if verdict, by := decide(rules(plain, nil, nil), to(2379, worker)); verdict+by != "dropstrangers-to-etcd" {
		t.Errorf("without an address: %s %s", verdict, by)
	}
	if verdict, _ := decide(rules(plain, nil, nil), through(2379, cp)); verdict != "" {
		t.Errorf("an unknown address is taken for a control plane: %s", verdict)
	}
}

// The endpoint is protected where it is an address that the control planes share.
func TestSharedEndpoint(t *testing.T) {
	t.Parallel()
	c := node(config.Worker, nil)
	if err := c.Cluster.ControlPlane.Endpoint.UnmarshalText([]byte("https://10.5.0.100:6443")); err != nil {
		t.Fatal(err)
	}
	k := packet{chain: forward, link: "cni0", protocol: "tcp", port: 50001, from: "10.244.3.4", to: "10.5.0.100"}
	if verdict, by := decide(rules(c, addresses, controlPlanes), k); verdict != drop || by != "pods-to-trustd" {
		t.Errorf("%s %s", verdict, by)
	}
}

// Rules of the configuration don't cut pods off from the node's resolver.
func TestResolver(t *testing.T) {
	t.Parallel()
	c := node(config.Worker, func(f *config.Firewall) { f.Rules = []config.FirewallRule{{Name: "rest", Action: drop}} })
	for _, protocol := range []string{"udp", "tcp"} {
		k := packet{chain: input, link: "cni0", protocol: protocol, port: 53, from: "10.244.3.4", to: c.ResolverAddress().String()}
		c.Machine.Network.Resolver.Enabled = new(false)
		if got, _ := decide(rules(c, addresses, nil), k); got != drop {
			t.Errorf("off, %s: %s", protocol, got)
		}
		c.Machine.Network.Resolver.Enabled = new(true)
		if got, _ := decide(rules(c, addresses, nil), k); got != accept {
			t.Errorf("on, %s: %s", protocol, got)
		}
		k.to = "10.5.0.2"
		if got, _ := decide(rules(c, addresses, nil), k); got != drop {
			t.Errorf("to another address, %s: %s", protocol, got)
		}
	}
}
