package secrets

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/clock"
	"github.com/garboard-os/garboard/services/system/machine"
	"github.com/garboard-os/garboard/services/system/network"
)

// node is what certificates are made for.
type node struct {
	config   *config.Config
	hostname string
	primary  netip.Addr // which the node is known by
	addrs    []netip.Addr
}

var loopback = []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}

// nodeInputs are the facts of a node. The clock is one of them only to look again
// after it was set: certificates made by a wrong clock may be expired, or not valid
// yet.
func nodeInputs() []resource.Input {
	return []resource.Input{
		{Type: machine.Configs.Type()}, {Type: network.Addresses.Type()}, {Type: network.Hostnames.Type()}, {Type: clock.Statuses.Type()},
	}
}

// readNode is false while the node doesn't know itself yet.
func readNode(r resource.Reader) (n node, ok bool, err error) {
	cfg, err := machine.Configs.Get(r, machine.ConfigID)
	if err != nil {
		return n, false, ignoreNotFound(err)
	}
	hostname, err := network.Hostnames.Get(r, network.HostnameID)
	if err != nil {
		return n, false, ignoreNotFound(err)
	}
	addresses, err := network.Addresses.Get(r, network.AddressID)
	if err != nil {
		return n, false, ignoreNotFound(err)
	}
	n = node{config: cfg.Spec, hostname: hostname.Spec, primary: addresses.Spec.Primary.Unmap(), addrs: nodeAddrs(cfg.Spec, addresses.Spec)}
	return n, len(n.addrs) > 0, nil
}

// nodeAddrs are the addresses at which others reach the node. Those of bridges
// and tunnels of the pod network come and go, and would make new certificates.
func nodeAddrs(c *config.Config, a network.NodeAddress) []netip.Addr {
	all := []netip.Addr{a.Primary}
	for _, prefix := range a.All {
		all = append(all, prefix.Addr())
	}
	inner := slices.Concat(c.Cluster.Network.PodSubnets, c.Cluster.Network.ServiceSubnets)
	return uniqueAddrs(slices.DeleteFunc(all, func(addr netip.Addr) bool {
		return !addr.IsValid() || addr.IsLoopback() || addr.IsLinkLocalUnicast() ||
			slices.ContainsFunc(inner, func(p netip.Prefix) bool { return p.Contains(addr) })
	}))
}

// server adds the names under which the node itself is reached.
func (n node) server(leaf pki.Leaf) pki.Leaf {
	leaf.Server = true
	leaf.DNS = append(leaf.DNS, n.hostname, "localhost")
	leaf.IPs = uniqueAddrs(slices.Concat(leaf.IPs, n.addrs, loopback))
	return leaf
}

// addEndpoint adds the names that all control planes share (S-158): what the
// configuration calls the cluster's endpoint, and the addresses that go from one
// to the other.
func (n node) addEndpoint(leaf *pki.Leaf) {
	addHosts(leaf, []string{n.config.Cluster.ControlPlane.Endpoint.Hostname()})
	for _, link := range n.config.Machine.Network.Interfaces {
		if link.VIP != nil {
			leaf.IPs = append(leaf.IPs, link.VIP.IP)
		}
	}
}

// addHosts adds what users write: names and addresses.
func addHosts(leaf *pki.Leaf, hosts []string) {
	for _, host := range hosts {
		if addr, err := netip.ParseAddr(host); err == nil {
			leaf.IPs = append(leaf.IPs, addr)
		} else {
			leaf.DNS = append(leaf.DNS, host)
		}
	}
}

// Missing: the configuration lacks a secret (S-282), as one that was made for an older
// release does.
const Missing reason.Code = "SecretMissing"

func missing(field string) error {
	return reason.With(Missing, fmt.Errorf("missing cluster.%s secret", field))
}

func missingMachine(field string) error {
	return reason.With(Missing, fmt.Errorf("missing machine.%s secret", field))
}

// ignoreNotFound is for what somebody else will publish: the change wakes us.
func ignoreNotFound(err error) error {
	if errors.Is(err, resource.ErrNotFound) {
		return nil
	}
	return err
}
