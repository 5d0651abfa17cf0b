package config

import (
	"net/netip"
	"slices"
)

// cautions are about configurations that work, but maybe not as meant. They are
// warnings: none of them stops a node.
var cautions = []check{
	{"workers don't need private keys", cautionWorkerKeys},
	{"static keys of STATE lie in the open", cautionStaticState},
	{"DNS address is a service's", cautionClusterDNS},
	{"workers get no further names", cautionWorkerNames},
	{"shared address is a neighbour of its node", cautionVIP},
	{"fields without effect in this release", cautionNoEffect},
}

func cautionWorkerKeys(c *Config, r *report) {
	if c.Machine.Type != Worker {
		return
	}
	for _, k := range []struct {
		where place
		key   KeyPEM
	}{
		{at("machine", "ca", "key"), c.Machine.CA.Key},
		{at("cluster", "ca", "key"), c.Cluster.CA.Key},
		{at("cluster", "aggregatorCA", "key"), c.Cluster.AggregatorCA.Key},
		{at("cluster", "etcd", "ca", "key"), c.Cluster.Etcd.CA.Key},
		{at("cluster", "serviceAccount", "key"), c.Cluster.ServiceAccount.Key},
	} {
		if len(k.key) > 0 {
			r.warn(k.where, "a worker doesn't need this private key; leave it out, so that a stolen worker doesn't give the cluster away")
		}
	}
}

// cautionWorkerNames: trustd signs what a worker can prove.
func cautionWorkerNames(c *Config, r *report) {
	if c.Machine.Type == Worker && len(c.Machine.CertSANs) > 0 {
		r.warn(at("machine", "certSANs"), "control planes sign for a worker only its host name and the address that it asks from; these names aren't in its certificate")
	}
}

func cautionStaticState(c *Config, r *report) {
	if c.Machine.SystemDiskEncryption.State == nil {
		return
	}
	for i, key := range c.Machine.SystemDiskEncryption.State.Keys {
		if key.Static != nil {
			r.warn(at("machine", "systemDiskEncryption", "state", "keys", i, "static"), "a passphrase for STATE is kept unencrypted on META; use nodeID, and static for the ephemeral partition only")
		}
	}
}

func cautionClusterDNS(c *Config, r *report) {
	for i, addr := range c.Machine.Kubelet.ClusterDNS {
		if !slices.ContainsFunc(c.Cluster.Network.ServiceSubnets, func(subnet netip.Prefix) bool { return subnet.Contains(addr) }) {
			r.warn(at("machine", "kubelet", "clusterDNS", i), "%s is outside of the service subnets", addr)
		}
	}
}

// cautionVIP: who is on the link finds the address by asking all of its subnet, and from
// elsewhere routers do. DHCP may yet give an address of that subnet.
func cautionVIP(c *Config, r *report) {
	links := c.Machine.Network.Links()
	for i, in := range c.Machine.Network.Interfaces {
		if in.VIP == nil || !in.VIP.IP.IsValid() {
			continue
		}
		link := links[slices.IndexFunc(links, func(l Link) bool { return l.Name == in.Name })]
		own := slices.DeleteFunc(slices.Clone(link.Addresses), func(p netip.Prefix) bool { return p.Addr().Is4() != in.VIP.IP.Is4() })
		if len(own) == 0 || link.DHCP || slices.ContainsFunc(own, func(p netip.Prefix) bool { return p.Contains(in.VIP.IP) }) {
			continue
		}
		r.warn(interfaceAt(i, "vip", "ip"), "%s is outside of %s, the subnet of %s: others find it only if they are routed to that link", in.VIP.IP, own[0].Masked(), in.Name)
	}
}

// cautionNoEffect names what is read and checked, but what no service of this
// release acts on: a disk that is believed to be encrypted mustn't be a surprise.
func cautionNoEffect(c *Config, r *report) {
	const what = "has no effect in this release"
	if e := c.Machine.SystemDiskEncryption; e.State != nil || e.Ephemeral != nil {
		r.warn(at("machine", "systemDiskEncryption"), what)
	}
}
