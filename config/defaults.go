package config

import (
	"net/netip"
	"time"
)

const (
	// DefaultAPIServerPort is the usual port of Kubernetes.
	DefaultAPIServerPort = 6443
	// DefaultTimeBootTimeout ends the wait for a first sync. It is longer than the
	// resolution of a server's name and four queries take.
	DefaultTimeBootTimeout = 30 * time.Second

	defaultTimeServer  = "pool.ntp.org"
	defaultRouteMetric = 1024 // the kernel's default for IPv6, and that of routes from DHCP
	defaultMIIMon      = 100  // ms, as the kernel's bonding documentation recommends
	defaultFilePerm    = 0o644

	// clusterDNSOffset is the offset within the service subnet that kubeadm uses
	// for the DNS service.
	clusterDNSOffset = 10
)

var (
	DefaultPodSubnet     = netip.MustParsePrefix("10.244.0.0/16") // flannel's default
	DefaultServiceSubnet = netip.MustParsePrefix("10.96.0.0/12")  // kubeadm's default
)

// defaults fill in what a document leaves out, in this order. Each names its field.
var defaults = []struct {
	path string
	fill func(*Config)
}{
	{"persist", func(c *Config) {
		if c.Persist == nil {
			c.Persist = new(true)
		}
	}},
	{"machine.network.autoHostname", func(c *Config) { keep(&c.Machine.Network.AutoHostname, HostnameAuto) }},
	{"machine.network.interfaces", func(c *Config) {
		for i := range c.Machine.Network.Interfaces {
			fillInterface(&c.Machine.Network.Interfaces[i])
		}
	}},
	{"machine.time.servers", func(c *Config) { list(&c.Machine.Time.Servers, defaultTimeServer) }},
	{"machine.time.bootTimeout", func(c *Config) { keep(&c.Machine.Time.BootTimeout, DefaultTimeBootTimeout) }},
	{"machine.files", func(c *Config) {
		for i := range c.Machine.Files {
			keep(&c.Machine.Files[i].Permissions, defaultFilePerm)
			keep(&c.Machine.Files[i].Op, FileCreate)
		}
	}},
	{"machine.disks", func(c *Config) {
		for i := range c.Machine.Disks {
			for n := range c.Machine.Disks[i].Partitions {
				keep(&c.Machine.Disks[i].Partitions[n].FileSystem, XFS)
			}
		}
	}},
	{"machine.logging.destinations", func(c *Config) {
		for i := range c.Machine.Logging.Destinations {
			keep(&c.Machine.Logging.Destinations[i].Format, LogJSONLines)
		}
	}},
	{"cluster.clusterName", func(c *Config) { keep(&c.Cluster.Name, "garboard") }},
	{"cluster.controlPlane.localAPIServerPort", func(c *Config) { keep(&c.Cluster.ControlPlane.LocalAPIServerPort, DefaultAPIServerPort) }},
	{"cluster.network.cni.name", func(c *Config) { keep(&c.Cluster.Network.CNI.Name, CNIFlannel) }},
	{"cluster.network.cni.flannel.image", func(c *Config) { keep(&c.Cluster.Network.CNI.Flannel.Image, DefaultFlannelImage) }},
	{"cluster.network.policyAgent.image", func(c *Config) { keep(&c.Cluster.Network.PolicyAgent.Image, DefaultPoliciesImage) }},
	{"cluster.network.dnsDomain", func(c *Config) { keep(&c.Cluster.Network.DNSDomain, "cluster.local") }},
	{"cluster.network.podSubnets", func(c *Config) { list(&c.Cluster.Network.PodSubnets, DefaultPodSubnet) }},
	{"cluster.network.serviceSubnets", func(c *Config) { list(&c.Cluster.Network.ServiceSubnets, DefaultServiceSubnet) }},
	{"machine.kubelet.clusterDNS", func(c *Config) {
		if c.Machine.Kubelet.ClusterDNS == nil {
			c.Machine.Kubelet.ClusterDNS = ClusterDNS(c.Cluster.Network.ServiceSubnets)
		}
	}},
	{"machine.kubelet.image", func(c *Config) { keep(&c.Machine.Kubelet.Image, DefaultKubeletImage) }},
	{"cluster.etcd.image", func(c *Config) { keep(&c.Cluster.Etcd.Image, DefaultEtcdImage) }},
	{"cluster.apiServer.image", func(c *Config) { keep(&c.Cluster.APIServer.Image, DefaultAPIServerImage) }},
	{"cluster.controllerManager.image", func(c *Config) { keep(&c.Cluster.ControllerManager.Image, DefaultControllerManagerImage) }},
	{"cluster.scheduler.image", func(c *Config) { keep(&c.Cluster.Scheduler.Image, DefaultSchedulerImage) }},
	{"cluster.proxy.image", func(c *Config) { keep(&c.Cluster.Proxy.Image, DefaultProxyImage) }},
	{"cluster.proxy.mode", func(c *Config) { keep(&c.Cluster.Proxy.Mode, ProxyNFTables) }},
	{"cluster.coreDNS.image", func(c *Config) { keep(&c.Cluster.CoreDNS.Image, DefaultCoreDNSImage) }},
}

// FillDefaults sets every field that has a default and isn't set. Load calls it; other
// code calls it for a Config that it has built itself. A second call changes nothing.
func (c *Config) FillDefaults() {
	for _, d := range defaults {
		d.fill(c)
	}
}

func fillInterface(in *Interface) {
	routes := func(routes []Route) {
		for i := range routes {
			keep(&routes[i].Metric, defaultRouteMetric)
			keep(&routes[i].Type, RouteUnicast)
		}
	}
	routes(in.Routes)
	for i := range in.VLANs {
		routes(in.VLANs[i].Routes)
		keep(&in.VLANs[i].Protocol, vlanProtocols[0])
	}
	if in.MACVLAN != nil {
		keep(&in.MACVLAN.Mode, macvlanModes[0])
	}
	if in.Bond != nil {
		keep(&in.Bond.Mode, "balance-rr")
		keep(&in.Bond.LACPRate, "slow")
		keep(&in.Bond.XmitHashPolicy, "layer2")
		if in.Bond.MIIMon == nil {
			in.Bond.MIIMon = new(defaultMIIMon)
			if in.Bond.ARPInterval != 0 {
				*in.Bond.MIIMon = 0 // the kernel allows only one of both
			}
		}
	}
}

func list[T any](v *[]T, to ...T) {
	if len(*v) == 0 {
		*v = to
	}
}

// ClusterDNS are the addresses of the cluster's DNS service in its subnets.
func ClusterDNS(subnets []netip.Prefix) (addrs []netip.Addr) {
	for _, subnet := range subnets {
		if !subnet.IsValid() {
			continue
		}
		addr := subnet.Masked().Addr()
		for range clusterDNSOffset {
			addr = addr.Next()
		}
		addrs = append(addrs, addr)
	}
	return addrs
}
