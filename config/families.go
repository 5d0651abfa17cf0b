package config

import (
	"net/netip"
	"slices"
)

// checkFamilies: Kubernetes has a first address family, that of the first subnet of pods and of Services. In it are the
// addresses that a pod or a Service has without asking for more.
func checkFamilies(c *Config, r *report) {
	net := c.Cluster.Network
	for i, subnet := range net.ServiceSubnets {
		same := func(pods netip.Prefix) bool { return pods.Addr().BitLen() == subnet.Addr().BitLen() }
		where := at("cluster", "network", "serviceSubnets", i)
		switch {
		case len(net.PodSubnets) == 0 || !subnet.IsValid():
		case !slices.ContainsFunc(net.PodSubnets, same):
			r.bad(where, "%s has no subnet of its address family in podSubnets: no pod would have an address for these Services", subnet)
		case i == 0 && !same(net.PodSubnets[0]):
			r.bad(where, "%s is of another address family than %s, the first of podSubnets; put the same family first in both", subnet, net.PodSubnets[0])
		}
	}
}

// IPv6 reports whether pods or services have addresses of IPv6.
func (n ClusterNetwork) IPv6() bool {
	return slices.ContainsFunc(slices.Concat(n.PodSubnets, n.ServiceSubnets), func(p netip.Prefix) bool { return p.Addr().Is6() })
}

// NodeIPs are a node's addresses in the cluster, out of the primary one and all: one of each family of
// PodSubnets, in their order. Without any of these families it is the primary one.
func (n ClusterNetwork) NodeIPs(primary netip.Addr, all []netip.Prefix) (ips []netip.Addr) {
	own := []netip.Addr{primary}
	for _, p := range all {
		own = append(own, p.Addr())
	}
	for _, subnet := range n.PodSubnets {
		if i := slices.IndexFunc(own, func(a netip.Addr) bool { return a.BitLen() == subnet.Addr().BitLen() }); i >= 0 {
			ips = append(ips, own[i])
		}
	}
	if len(ips) == 0 {
		return own[:1]
	}
	return ips
}
