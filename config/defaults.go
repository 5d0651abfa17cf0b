package config

import (
	"net/netip"
	"reflect"
)

const (
	// DefaultAPIServerPort is the usual port of Kubernetes.
	DefaultAPIServerPort = 6443
	// clusterDNSOffset is the offset within the service subnet that kubeadm uses
	// for the DNS service.
	clusterDNSOffset = 10
)

// The subnets of a cluster whose configuration has none.
var (
	DefaultPodSubnet     = netip.MustParsePrefix("10.244.0.0/16")
	DefaultServiceSubnet = netip.MustParsePrefix("10.96.0.0/12")
)

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
		switch n, ok := tables().Defaults[path]; {
		case !field.IsZero() && !(list && field.Len() == 0):
		case ok:
			(&decoder{report: &report{}, budget: maxExpanded}).value(&n, field) // a test looks at each
		case images[path] != "":
			field.SetString(images[path])
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
