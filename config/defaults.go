package config

import (
	"net/netip"
	"reflect"
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

// defaults are what a document leaves out, by the paths of the fields, with [] for the entries
// of a list. That of a list is its only entry.
var defaults = map[string]any{
	"persist":                      true,
	"machine.network.autoHostname": HostnameAuto,
	"machine.network.interfaces[].routes[].metric":         defaultRouteMetric,
	"machine.network.interfaces[].routes[].type":           RouteUnicast,
	"machine.network.interfaces[].vlans[].routes[].metric": defaultRouteMetric,
	"machine.network.interfaces[].vlans[].routes[].type":   RouteUnicast,
	"machine.network.interfaces[].vlans[].protocol":        "802.1q",
	"machine.network.interfaces[].macvlan.mode":            "bridge",
	"machine.network.interfaces[].bond.mode":               "balance-rr",
	"machine.network.interfaces[].bond.lacpRate":           "slow",
	"machine.network.interfaces[].bond.xmitHashPolicy":     "layer2",
	"machine.network.interfaces[].bond.miimon":             defaultMIIMon,
	"machine.network.resolver.enabled":                     true,
	"machine.time.servers":                                 defaultTimeServer,
	"machine.time.bootTimeout":                             DefaultTimeBootTimeout,
	"machine.files[].permissions":                          defaultFilePerm,
	"machine.files[].op":                                   FileCreate,
	"machine.disks[].partitions[].filesystem":              XFS,
	"machine.logging.destinations[].format":                LogJSONLines,
	"machine.kubelet.image":                                DefaultKubeletImage,
	"cluster.clusterName":                                  "garboard",
	"cluster.controlPlane.localAPIServerPort":              DefaultAPIServerPort,
	"cluster.network.cni.name":                             CNIFlannel,
	"cluster.network.cni.flannel.image":                    DefaultFlannelImage,
	"cluster.network.policyAgent.image":                    DefaultPoliciesImage,
	"cluster.network.dnsDomain":                            "cluster.local",
	"cluster.network.podSubnets":                           DefaultPodSubnet,
	"cluster.network.serviceSubnets":                       DefaultServiceSubnet,
	"cluster.etcd.image":                                   DefaultEtcdImage,
	"cluster.apiServer.image":                              DefaultAPIServerImage,
	"cluster.controllerManager.image":                      DefaultControllerManagerImage,
	"cluster.scheduler.image":                              DefaultSchedulerImage,
	"cluster.proxy.image":                                  DefaultProxyImage,
	"cluster.proxy.mode":                                   ProxyNFTables,
	"cluster.coreDNS.image":                                DefaultCoreDNSImage,
}

// FillDefaults sets every field that has a default and isn't set. Load calls it; other
// code calls it for a Config that it has built itself. A second call changes nothing.
func (c *Config) FillDefaults() {
	for _, in := range c.Machine.Network.Interfaces {
		if b := in.Bond; b != nil && b.MIIMon == nil && b.ARPInterval != 0 {
			b.MIIMon = new(0) // the kernel allows only one of both
		}
	}
	fillDefaults(reflect.ValueOf(c).Elem(), "")
	if c.Machine.Kubelet.ClusterDNS == nil {
		c.Machine.Kubelet.ClusterDNS = ClusterDNS(c.Cluster.Network.ServiceSubnets)
	}
}

// fillDefaults is for a struct, and what is in it. prefix is that of its fields' paths.
func fillDefaults(v reflect.Value, prefix string) {
	for f, field := range v.Fields() {
		path, list := prefix+f.Tag.Get("yaml"), field.Kind() == reflect.Slice
		if value, ok := defaults[path]; ok && (field.IsZero() || list && field.Len() == 0) {
			to := field
			if list {
				field.Set(reflect.MakeSlice(field.Type(), 1, 1))
				to = field.Index(0)
			} else if field.Kind() == reflect.Pointer {
				field.Set(reflect.New(field.Type().Elem()))
				to = field.Elem()
			}
			to.Set(reflect.ValueOf(value).Convert(to.Type()))
		}
		switch inner, suffix := element(field.Type()); {
		case inner == nil || field.Kind() == reflect.Map: // no entry of a mapping has a default
		case list:
			for n := range field.Len() {
				fillDefaults(field.Index(n), path+suffix+".")
			}
		case field.Kind() == reflect.Struct || !field.IsNil():
			fillDefaults(reflect.Indirect(field), path+".")
		}
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
