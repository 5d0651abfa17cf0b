package config

import (
	"net/netip"
	"slices"
)

// warningChecks find settings that work, but perhaps not as intended. They only
// warn: a node starts with such a configuration.
var warningChecks = []check{
	warnWorkerKeys,  // private keys on a worker
	warnKeys,        // keys that protect nothing
	warnClusterDNS,  // DNS address outside of the service subnets
	warnWorkerNames, // extra certificate names on a worker
	warnVIP,         // shared address outside of the subnet
	warnGateways,    // gateways outside of the subnet
	warnAddresses,   // addresses that are hardly meant
	warnEntries,     // entries that do something else
	warnNameservers, // name servers that nobody asks
	warnSysctls,     // sysctls of links with dots in their names
	warnSelfHosted,  // format of a self-hosted control plane
	warnUnprotected, // what comes or goes unprotected
	warnArgs,        // arguments that weaken Kubernetes, or do something else
}

func warnWorkerKeys(c *Config, r *report) {
	if c.Machine.Type != Worker {
		return
	}
	warn := func(where place, key []byte) {
		if len(key) > 0 {
			r.warn(where, "a worker doesn't need this private key; leave it out: with it, a stolen worker gives control over the cluster")
		}
	}
	for _, a := range Authorities {
		issuing, _ := a.Of(c)
		warn(fieldsAt(a.Issuing).with("key"), issuing.Key)
	}
	warn(at("cluster", "serviceAccount", "key"), c.Cluster.ServiceAccount.Key)
	warn(at("cluster", "secret"), []byte(c.Cluster.Secret)) // of Secrets in etcd
}

// warnSelfHosted: configurations of the releases before static pods lack two secrets.
func warnSelfHosted(c *Config, r *report) {
	if c.SelfHosted() {
		r.warn(at("cluster"), "without aggregatorCA and serviceAccount, this is the format for a self-hosted control plane: the node makes no static pods until it has both")
	}
}

// warnWorkerNames: trustd signs only names that a worker can prove.
func warnWorkerNames(c *Config, r *report) {
	if c.Machine.Type == Worker && len(c.Machine.CertSANs) > 0 {
		r.warn(at("machine", "certSANs"), "for a worker, control planes sign only its host name and the address of its connection; these names aren't in its certificate")
	}
}

func warnKeys(c *Config, r *report) {
	for _, e := range c.Encrypted() {
		passphrase := "the passphrase is on STATE, which isn't encrypted: whoever has the system's disk has it; encrypt STATE as well"
		if e.Label == "STATE" {
			passphrase = "the passphrase of STATE has to be on META, which isn't encrypted: whoever has the disk has it; use nodeID here, and static for other partitions only"
		}
		known := e.Label == "STATE" || c.Machine.SystemDiskEncryption.State == nil
		guarded := slices.ContainsFunc(e.Keys, func(k EncryptionKey) bool { return k.KMS != nil || k.TPM != nil })
		for i, key := range e.Keys {
			switch {
			case known && key.Static != nil:
				r.warn(e.where.with("keys", i, "static"), "%s", passphrase)
			case e.Label != "STATE" && key.TPM != nil && c.Machine.SystemDiskEncryption.State == nil:
				r.warn(e.where.with("keys", i, "tpm"), "STATE isn't encrypted: whoever has the disk changes the configuration there, and the machine opens this partition for him; encrypt STATE as well")
			case guarded && key.NodeID != nil:
				r.warn(e.where.with("keys", i, "nodeID"), "opens the partition without the key server or the TPM: whoever has the machine has it; leave it out, and have a recovery key, or a static key beside it for other partitions than STATE")
			}
		}
	}
}

func warnClusterDNS(c *Config, r *report) {
	for i, addr := range c.Machine.Kubelet.ClusterDNS {
		if !slices.ContainsFunc(c.Cluster.Network.ServiceSubnets, func(subnet netip.Prefix) bool { return subnet.Contains(addr) }) {
			r.warn(at("machine", "kubelet", "clusterDNS", i), "%s is outside of the service subnets", addr)
		}
	}
}

// warnVIP: hosts on the link find the address with ARP or neighbour discovery, which works
// within the subnet; for other hosts, routers do it. With DHCP the subnet isn't known yet.
func warnVIP(c *Config, r *report) {
	links, of := c.Machine.Network.entries()
	for i, in := range c.Machine.Network.Interfaces {
		if in.VIP == nil || !in.VIP.IP.IsValid() {
			continue
		}
		link := links[of[i]]
		own := slices.DeleteFunc(slices.Clone(link.Addresses), func(p netip.Prefix) bool { return p.Addr().Is4() != in.VIP.IP.Is4() })
		if len(own) == 0 || link.DHCP || slices.ContainsFunc(own, func(p netip.Prefix) bool { return p.Contains(in.VIP.IP) }) {
			continue
		}
		r.warn(interfaceAt(i, "vip", "ip"), "%s is outside of %s, the subnet of %s: other hosts reach it only through routes to that link", in.VIP.IP, own[0].Masked(), link)
	}
}

// warnGateways: the kernel still looks for a gateway outside of the link's networks on the link,
// but it is mostly a mistake. Networks of DHCP and of router advertisements aren't known yet.
func warnGateways(c *Config, r *report) {
	for _, s := range segments(c) {
		networks := slices.Clone(s.all.Addresses)
		for _, route := range s.all.Routes {
			if !route.Gateway.IsValid() {
				networks = append(networks, route.Network) // its hosts are on the link
			}
		}
		for i, route := range s.routes {
			gateway := route.Gateway
			own := slices.DeleteFunc(slices.Clone(networks), func(p netip.Prefix) bool { return !p.IsValid() || p.Addr().Is4() != gateway.Is4() })
			unknown := gateway.Is4() && s.all.DHCP || gateway.Is6() && len(own) == 0
			if !gateway.IsValid() || gateway.IsLinkLocalUnicast() || unknown || slices.ContainsFunc(own, func(p netip.Prefix) bool { return p.Contains(gateway) }) {
				continue
			}
			r.warn(s.where.with("routes", i, "gateway"), "%s is in none of the networks of %s: the route works only if the gateway is on that link nevertheless", gateway, s.name)
		}
	}
}

func warnUnprotected(c *Config, r *report) {
	registries := at("machine", "registries")
	for host, mirror := range c.Machine.Registries.Mirrors {
		for i, u := range mirror.Endpoints {
			if u.Scheme == "http" {
				r.warn(registries.with("mirrors", host, "endpoints", i), "images come without TLS: whoever is on the way can replace them, unless machine.images.verify demands signatures")
			}
		}
	}
	for host, registry := range c.Machine.Registries.Config {
		if registry.TLS != nil && registry.TLS.InsecureSkipVerify {
			r.warn(registries.with("config", host, "tls", "insecureSkipVerify"), "anybody can answer in the place of %s, and gets its credentials; use tls.ca", host)
		}
	}
	for i, arg := range c.Machine.Install.ExtraKernelArgs {
		if RedactText(arg) != arg {
			r.warn(at("machine", "install", "extraKernelArgs", i), "every pod can read the arguments of the kernel, and this one has credentials in it: %s; docs/media.md has better places", RedactText(arg))
		}
	}
	for i, name := range c.Machine.Kubelet.Persist {
		r.warn(at("machine", "kubelet", "persist", i), "what pods leave there stays over a boot, and the node runs it as root: whoever could write there once has the node until the entry is removed and the node is rebooted. gbctl get volumes shows it as persist/%s", name)
	}
	for i, d := range c.Machine.Logging.Destinations {
		if d.Endpoint.Scheme == "udp" {
			r.warn(at("machine", "logging", "destinations", i, "endpoint"), "logs go over UDP: anybody on the way can read them, and lines get lost; use tls")
		}
	}
}

// warnContainer is for nodes in containers, which have no disks.
func warnContainer(c *Config, r *report) {
	for _, e := range c.Encrypted() {
		r.warn(e.where, "has no effect in a container: the node's data is in directories of the host, which it doesn't encrypt")
	}
}
