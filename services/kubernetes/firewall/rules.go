package firewall

import (
	"net/netip"
	"slices"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/lists"
)

// The chains: packets to the node pass input, packets that the node forwards pass forward.
const (
	input   = "input"
	forward = "forward"
)

// ports are the first and the last one.
type ports [2]uint16

// rule is one of nftables: a packet that has all properties gets the verdict. Of a list, one has to match; an empty one
// is no condition.
type rule struct {
	name     string // of its counter; "" for none
	chain    string
	action   string
	goesOn   bool   // a packet of a connection that there is, or of none: neighbours and routers of IPv6
	link     string // "": any
	protocol string // tcp, udp, icmp
	ports    []ports
	from, to []netip.Prefix
}

var (
	etcdPorts, trustdPorts = []ports{{2379, 2380}}, []ports{{50001, 50001}}
	// metadata are the services of clouds (AWS has the one for IPv6) that give the credentials of the machine to
	// whoever asks.
	metadata = []netip.Prefix{netip.MustParsePrefix("169.254.169.254/32"), netip.MustParsePrefix("fd00:ec2::254/128")}
)

// rules is the whole table: first the rules of the configuration, then the node's own. The first that matches decides.
// met are the cluster's control planes, as far as this node has met them.
//
//	to the node ─▶ input:   lo, [connections, rules of the configuration], etcd and trustd of a control plane
//	through it  ─▶ forward: metadata, [what the configuration accepts], from nodes, etcd and trustd of control planes
//
// Pods of other nodes come with the address of their node, which masquerades them: so each node stops its own pods, and
// whoever comes by a Service. A control plane that joins from a network of its own is known because it has called the
// machine API before.
func rules(cfg *config.Config, own []netip.Prefix, met []netip.Addr) []rule {
	firewall, pods := cfg.Machine.Network.Firewall, cfg.Cluster.Network.PodSubnets
	peers, nodes := single(met...), slices.Clone(firewall.NodeNetworks)
	servers := slices.Clone(peers)
	if shared, err := netip.ParseAddr(cfg.Cluster.ControlPlane.Endpoint.Hostname()); err == nil {
		servers = append(servers, single(shared)...)
	}
	for _, p := range own {
		nodes, servers = append(nodes, p.Masked()), append(servers, single(p.Addr())...)
	}
	table := []rule{{chain: input, action: accept, link: "lo"}}
	if !firewall.AllowMetadata {
		table = append(table, rule{name: "pods-to-metadata", chain: forward, action: drop, to: metadata})
	}
	if len(firewall.Rules) > 0 {
		table = append(table, rule{chain: input, action: accept, goesOn: true},
			// RFC 8415: a server answers from another address
			rule{chain: input, action: accept, protocol: "udp", ports: []ports{{546, 546}}})
	}
	if len(firewall.Rules) > 0 && cfg.Machine.Network.Resolver.On() {
		for _, protocol := range []string{"udp", "tcp"} { // the resolver itself answers nobody outside of the node
			table = append(table, rule{chain: input, action: accept, protocol: protocol, ports: []ports{{53, 53}}, to: single(cfg.ResolverAddress())})
		}
	}
	for _, c := range firewall.Rules {
		r := rule{name: c.Name, chain: input, action: c.Action, link: c.Interface, protocol: c.Protocol, from: c.Sources, to: c.Destinations}
		for _, text := range c.Ports {
			first, last, _ := config.Ports(text) // the configuration is checked
			r.ports = append(r.ports, ports{first, last})
		}
		// what is opened is open to pods on their way to other nodes, too
		if table = append(table, r); r.action == accept {
			r.chain = forward
			table = append(table, r)
		}
	}
	add := func(name, chain, action string, ports []ports, from, to []netip.Prefix) {
		table = append(table, rule{name: name, chain: chain, action: action, protocol: "tcp", ports: ports, from: from, to: to})
	}
	both := slices.Concat(etcdPorts, trustdPorts)
	if trusted := slices.Concat(peers, nodes); len(trusted) > 0 {
		add("", forward, accept, both, trusted, nil) // by a node that is their router
	}
	if len(servers) > 0 {
		add("pods-to-etcd", forward, drop, etcdPorts, nil, servers)
		add("pods-to-trustd", forward, drop, trustdPorts, nil, servers)
	}
	if !cfg.Machine.Type.ControlPlane() {
		return table
	}
	if len(peers) > 0 {
		add("", input, accept, both, peers, nil)
	}
	add("pods-to-etcd", input, drop, etcdPorts, pods, nil)
	add("pods-to-trustd", input, drop, trustdPorts, pods, nil)
	if len(nodes) > 0 {
		add("", input, accept, both, nodes, nil)
	}
	add("strangers-to-etcd", input, drop, etcdPorts, nil, nil)
	if len(firewall.NodeNetworks) > 0 {
		add("strangers-to-trustd", input, drop, trustdPorts, nil, nil)
	}
	return table
}

func single(addresses ...netip.Addr) []netip.Prefix {
	return lists.Of(addresses, func(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) })
}
