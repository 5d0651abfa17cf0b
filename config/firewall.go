package config

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// Firewall filters what reaches the node. docs/firewall.md has what is filtered without any setting.
type Firewall struct {
	Enabled *bool `yaml:"enabled"` // default true; with false, nothing is filtered
	// AllowMetadata lets pods reach the metadata service of a cloud at 169.254.169.254 and fd00:ec2::254, which gives
	// the credentials of the machine.
	AllowMetadata bool `yaml:"allowMetadata"`
	// NodeNetworks are the networks of all nodes. With them, only nodes reach trustd. Without them, each machine that
	// isn't a pod does.
	NodeNetworks []netip.Prefix `yaml:"nodeNetworks"`
	// Rules are for packets to this node, in their order: the first that matches decides, before the node's own rules.
	// What no rule matches is accepted. Replies to connections of the node are always accepted.
	Rules []FirewallRule `yaml:"rules" key:"name"`
}

// On reports whether anything is filtered.
func (f Firewall) On() bool { return f.Enabled == nil || *f.Enabled }

// FirewallRule matches packets that have all of its properties.
type FirewallRule struct {
	Name   string `yaml:"name"`   // required: at most 32 of the characters a-z, 0-9 and -
	Action string `yaml:"action"` // required: accept or drop
	// the link that the packet comes from, by its name in the kernel, such as eth0, or the alias of a card in
	// machine.network.interfaces
	Interface string `yaml:"interface"`
	Protocol  string `yaml:"protocol"` // tcp, udp or icmp, of both families; default: all protocols
	// Ports are destination ports of tcp or udp, such as 443 or 8000-8100.
	Ports        []string       `yaml:"ports"`
	Sources      []netip.Prefix `yaml:"sources"`      // networks that the packet comes from; default: all
	Destinations []netip.Prefix `yaml:"destinations"` // addresses of the node
}

const (
	FirewallAccept = "accept" // an action of a rule
	FirewallDrop   = "drop"   // the other one

	// maxFirewallMatches bounds the combinations of ports, sources and destinations, each of which is a rule in the
	// kernel: they are compared one after the other, and their transaction must fit into the buffer of a netlink socket
	// (200 KiB).
	maxFirewallMatches = 250
	machineAPIPort     = 50000 // docs/ports.md
)

// Ports is the range in the text.
func Ports(text string) (first, last uint16, err error) {
	from, to, _ := strings.Cut(text, "-")
	a, errA := strconv.ParseUint(from, 10, 16)
	b, errB := strconv.ParseUint(cmp.Or(to, from), 10, 16)
	if errA != nil || errB != nil || a == 0 || a > b {
		return 0, 0, fmt.Errorf("%s is neither a port nor a range of ports, such as 443 or 8000-8100", quote(text))
	}
	return uint16(a), uint16(b), nil
}

func checkFirewall(c *Config, r *report) {
	f, where := c.Machine.Network.Firewall, at("machine", "network", "firewall")
	matches, open := 0, false
	for i, rule := range f.Rules {
		where := where.with("rules", i)
		matches += max(len(rule.Ports), 1) * max(len(rule.Sources), 1) * max(len(rule.Destinations), 1)
		rule.check(r, where)
		api := (rule.Protocol == "" || rule.Protocol == "tcp") && rule.hasPort(machineAPIPort)
		open = open || rule.Action == FirewallAccept && api
		if rule.Action == FirewallDrop && !open && api && rule.Interface == "" && everyone(rule.Sources) && everyone(rule.Destinations) {
			r.bad(where, "drops the machine API, tcp port %d, from everywhere: gbctl couldn't reach the node any more; put a rule before this one that accepts the port from where you work", machineAPIPort)
		}
	}
	if matches > maxFirewallMatches {
		r.bad(where.with("rules"), "have %d combinations of ports, sources and destinations, and a node compares %d", matches, maxFirewallMatches)
	}
}

func (f FirewallRule) check(r *report, where place) {
	if len(f.Ports) > 0 && f.Protocol != "tcp" && f.Protocol != "udp" {
		r.bad(where.with("ports"), "need protocol tcp or udp")
	}
	same := func(from netip.Prefix) bool {
		return slices.ContainsFunc(f.Destinations, func(to netip.Prefix) bool { return from.Addr().Is4() == to.Addr().Is4() })
	}
	if len(f.Sources) > 0 && len(f.Destinations) > 0 && !slices.ContainsFunc(f.Sources, same) {
		r.bad(where, "matches no packet: its sources and destinations are of different address families")
	}
}

func (f FirewallRule) hasPort(port uint16) bool {
	return len(f.Ports) == 0 || slices.ContainsFunc(f.Ports, func(text string) bool {
		first, last, err := Ports(text)
		return err == nil && first <= port && port <= last
	})
}

// everyone reports whether the networks are all addresses of a family.
func everyone(networks []netip.Prefix) bool {
	return len(networks) == 0 || slices.ContainsFunc(networks, func(p netip.Prefix) bool { return p.Bits() == 0 })
}
