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
	open, serves := len(firewall.Rules) > 0, cfg.Machine.Type.ControlPlane()
	resolves, resolver := open && cfg.Machine.Network.Resolver.On(), single(cfg.ResolverAddress())
	var table []rule
	add := func(when bool, r rule) {
		if when {
			table = append(table, r)
		}
	}
	add(true, rule{chain: input, action: accept, link: "lo"})
	add(!firewall.AllowMetadata, rule{name: "pods-to-metadata", chain: forward, action: drop, to: metadata})
	add(open, rule{chain: input, action: accept, goesOn: true})
	// RFC 8415: a server answers from another address
	add(open, rule{chain: input, action: accept, protocol: "udp", ports: []ports{{546, 546}}})
	// the resolver itself answers nobody outside of the node
	add(resolves, rule{chain: input, action: accept, protocol: "udp", ports: []ports{{53, 53}}, to: resolver})
	add(resolves, rule{chain: input, action: accept, protocol: "tcp", ports: []ports{{53, 53}}, to: resolver})
	for _, c := range firewall.Rules {
		r := rule{name: c.Name, chain: input, action: c.Action, link: c.Interface, protocol: c.Protocol, from: c.Sources, to: c.Destinations}
		for _, text := range c.Ports {
			first, last, _ := config.Ports(text) // the configuration is checked
			r.ports = append(r.ports, ports{first, last})
		}
		// what is opened is open to pods on their way to other nodes, too
		add(true, r)
		r.chain = forward
		add(r.action == accept, r)
	}
	both, trusted := slices.Concat(etcdPorts, trustdPorts), slices.Concat(peers, nodes)
	// by a node that is their router
	add(len(trusted) > 0, rule{chain: forward, action: accept, protocol: "tcp", ports: both, from: trusted})
	add(len(servers) > 0, rule{name: "pods-to-etcd", chain: forward, action: drop, protocol: "tcp", ports: etcdPorts, to: servers})
	add(len(servers) > 0, rule{name: "pods-to-trustd", chain: forward, action: drop, protocol: "tcp", ports: trustdPorts, to: servers})
	add(serves && len(peers) > 0, rule{chain: input, action: accept, protocol: "tcp", ports: both, from: peers})
	add(serves, rule{name: "pods-to-etcd", chain: input, action: drop, protocol: "tcp", ports: etcdPorts, from: pods})
	add(serves, rule{name: "pods-to-trustd", chain: input, action: drop, protocol: "tcp", ports: trustdPorts, from: pods})
	add(serves && len(nodes) > 0, rule{chain: input, action: accept, protocol: "tcp", ports: both, from: nodes})
	add(serves, rule{name: "strangers-to-etcd", chain: input, action: drop, protocol: "tcp", ports: etcdPorts})
	add(serves && len(firewall.NodeNetworks) > 0, rule{name: "strangers-to-trustd", chain: input, action: drop, protocol: "tcp", ports: trustdPorts})
	return table
}

func single(addresses ...netip.Addr) []netip.Prefix {
	return lists.Of(addresses, func(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) })
}
