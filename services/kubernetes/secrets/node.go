package secrets

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/clock"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
)

// node is the data of the node for certificates.
type node struct {
	config   *config.Config
	hostname string
	primary  netip.Addr // the node's address in the cluster, of the family in which API servers are known
	addrs    []netip.Addr
	former   []string // hosts of the endpoints that the cluster had before
}

var loopback = []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}

// nodeInputs are the facts of a node. The clock is an input only to check again
// after it was set: certificates made by a wrong clock may be expired, or not
// valid yet.
func nodeInputs() []resource.Input {
	return []resource.Input{
		{Type: configuration.Configs.Type()}, {Type: network.Addresses.Type()}, {Type: network.Hostnames.Type()}, {Type: clock.Statuses.Type()},
	}
}

// readNode is false while the node has no name or address yet.
func readNode(r resource.Reader) (n node, ok bool, err error) {
	cfg, noConfig := configuration.Configs.Get(r, configuration.ConfigID)
	hostname, noName := network.Hostnames.Get(r, network.HostnameID)
	addresses, noAddress := network.Addresses.Get(r, network.AddressID)
	if err := cmp.Or(noConfig, noName, noAddress); err != nil {
		return n, false, resource.IgnoreNotFound(err)
	}
	n = node{config: cfg.Spec, hostname: hostname.Spec, primary: cfg.Spec.Cluster.Network.NodeIPs(addresses.Spec.Primary, addresses.Spec.All)[0].Unmap(), addrs: nodeAddrs(cfg.Spec, addresses.Spec)}
	known, _ := Issuers.Get(r, IssuersID) // none before etcd was asked
	for _, endpoint := range known.Spec {
		if u, err := config.ParseURL(endpoint); err == nil && u.Hostname() != cfg.Spec.Cluster.ControlPlane.Endpoint.Hostname() && !slices.Contains(n.former, u.Hostname()) {
			n.former = append(n.former, u.Hostname())
		}
	}
	return n, len(n.addrs) > 0, nil
}

// readReachable is readNode for the API of a control plane. It has a certificate for the
// addresses that are there while networkd waits for others, perhaps in vain: else the
// configuration, which may be the cause, couldn't be corrected.
func readReachable(r resource.Reader) (n node, ok bool, err error) {
	if n, ok, err = readNode(r); ok || err != nil {
		return n, ok, err
	}
	cfg, err := configuration.Configs.Get(r, configuration.ConfigID)
	if err != nil || !cfg.Spec.Machine.Type.ControlPlane() {
		return n, false, resource.IgnoreNotFound(err)
	}
	status, err := network.Statuses.Get(r, network.ID)
	n = node{config: cfg.Spec, hostname: cmp.Or(cfg.Spec.Machine.Network.Hostname, "localhost")}
	n.addrs = nodeAddrs(cfg.Spec, network.NodeAddress{All: status.Spec.Addresses})
	return n, len(n.addrs) > 0, resource.IgnoreNotFound(err)
}

// nodeAddrs are the addresses at which others reach the node. Those of bridges and tunnels
// of the pod network are added and removed often, and would cause new certificates.
func nodeAddrs(c *config.Config, a network.NodeAddress) []netip.Addr {
	all := append([]netip.Addr{a.Primary}, lists.Of(a.All, netip.Prefix.Addr)...)
	inner := slices.Concat(c.Cluster.Network.PodSubnets, c.Cluster.Network.ServiceSubnets)
	return uniqueAddrs(slices.DeleteFunc(all, func(addr netip.Addr) bool {
		return !addr.IsValid() || addr.IsLoopback() || addr.IsLinkLocalUnicast() ||
			slices.ContainsFunc(inner, func(p netip.Prefix) bool { return p.Contains(addr) })
	}))
}

// server adds the names of the node itself.
func (n node) server(leaf pki.Leaf) pki.Leaf {
	leaf.Server = true
	leaf.DNS = append(leaf.DNS, n.hostname, "localhost")
	leaf.IPs = uniqueAddrs(slices.Concat(leaf.IPs, n.addrs, loopback))
	return leaf
}

// addEndpoint adds the names that all control planes share: those of
// the cluster's endpoint in the configuration, those of the endpoints before, which nodes and
// kubeconfigs may still have, and the shared addresses.
func (n node) addEndpoint(leaf *pki.Leaf) {
	addHosts(leaf, append([]string{n.config.Cluster.ControlPlane.Endpoint.Hostname()}, n.former...))
	for _, link := range n.config.Machine.Network.Interfaces {
		if link.VIP != nil {
			leaf.IPs = append(leaf.IPs, link.VIP.IP)
		}
	}
}

// addHosts adds names and addresses from the configuration.
func addHosts(leaf *pki.Leaf, hosts []string) {
	for _, host := range hosts {
		if addr, err := netip.ParseAddr(host); err == nil {
			leaf.IPs = append(leaf.IPs, addr)
		} else {
			leaf.DNS = append(leaf.DNS, host)
		}
	}
}

// digests are those of the configuration with these names.
func (n node) digests(names ...string) (map[string]string, error) {
	all, err := n.config.Digests()
	maps.DeleteFunc(all, func(name, _ string) bool { return !slices.Contains(names, name) })
	return all, err
}

// Missing: the configuration lacks the secrets for static pods: it was made for an older release.
const Missing reason.Code = "SecretMissing"
