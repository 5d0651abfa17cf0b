package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/sleep"
)

// layer is one of the settings, and who has made it.
type layer struct {
	config.Network
	by string
}

// layers are those of the settings. The first one that has a link decides of the link; so with names and servers.
func (o *owner) layers() []layer {
	all := []layer{{o.cfg.Machine.Network, byConfiguration}, {o.platform.network, byPlatform}, {o.o.Argument, byArgument}}
	switch {
	case o.configured:
		return all[:2]
	case o.byHand:
		return all[:1]
	}
	return all
}

// ParamIP is the kernel parameter with the network of a machine without a configuration.
const ParamIP = "ip"

// argumentField is a field of ip=: addresses of IPv6 are in brackets.
var argumentField = regexp.MustCompile(`(?:\[([^\]]*)\]|([^:]*))(?::|$)`)

// FromArgument reads ip= as the kernel does (Documentation/admin-guide/nfs/nfsroot.rst) and as dracut.cmdline(7)
// extends it:
//
//	CLIENT:SERVER:GATEWAY:MASK:HOST:DEVICE:HOW:DNS:DNS
//	DEVICE:HOW
//	HOW
//
// MASK may be a prefix length. SERVER isn't used. HOW is dhcp, on, any, dhcp6, auto6, none or off.
func FromArgument(text string) (n config.Network, err error) {
	var f [9]string
	found := argumentField.FindAllStringSubmatch(text, len(f))
	for i, m := range found {
		f[i] = m[1] + m[2]
	}
	switch len(found) {
	case 1:
		f[6], f[0] = f[0], ""
	case 2:
		f[5], f[6], f[0], f[1] = f[0], f[1], "", ""
	}
	n.Hostname = f[4]
	in := config.Interface{Name: f[5]}
	switch how := f[6]; {
	case how == "dhcp6":
		in.DHCP6 = true
	case how == "auto6":
		in.AcceptRA = config.AdvertisementsOn
	case how == "dhcp" || how == "on" || how == "any" || f[0] == "" && how == "":
		in.DHCP = true
	case f[0] == "":
		return n, fmt.Errorf("%q: must be dhcp, dhcp6 or auto6, or beside an address", how)
	default:
		if in.CIDR, err = maskedPrefix(f[0] + "/" + f[3]); err != nil {
			return n, err
		}
	}
	address := func(text string) (a netip.Addr) {
		if text != "" && err == nil {
			a, err = netip.ParseAddr(text)
		}
		return a
	}
	if gateway := address(f[2]); gateway.IsValid() {
		in.Routes = []config.Route{config.DefaultRoute(gateway)}
	}
	n.Nameservers = lists.Some(f[7:], func(text string) (netip.Addr, bool) { a := address(text); return a, a.IsValid() })
	if in.Name != "" {
		n.Interfaces = []config.Interface{in}
	} else if in.CIDR.IsValid() && err == nil {
		err = errors.New("names no device, such as eth0, in its sixth field")
	}
	return n, err
}

// platformGrace is how long links wait for the platform's network: a disk is slow. What comes over the network is used
// when it is there.
const platformGrace, platformAgain = 10 * time.Second, time.Minute

// platform is what the platform says of the machine's network.
type platform struct {
	network config.Network
	known   bool
	problem error
}

// askPlatform reads it, once per boot. It returns when that is known, or when it can only be read over the network.
func (o *owner) askPlatform(ctx context.Context) {
	if o.o.Platform == nil || o.platform.known {
		return
	}
	waiting, begin := context.WithTimeout(ctx, platformGrace)
	o.lookups.Go(func() {
		for range sleep.Every(ctx, platformAgain) {
			data, err := o.o.Platform(ctx, begin)
			now := platform{known: err == nil || errors.Is(err, boot.ErrNone), problem: err}
			if now.known {
				now.problem = dag.Guard(o.log, func() (err error) { now.network, err = FromPlatform(data); return err })
			}
			o.tell(ctx, func() bool { o.platform = now; return true })
			if now.known {
				return
			}
		}
	})
	select {
	case take := <-o.heard:
		take()
	case <-waiting.Done():
	}
}

// description is a document of cloud-init's network-config
// (https://cloudinit.readthedocs.io/en/latest/reference/network-config.html): of version 1 with a list of links and
// name servers, or of version 2 with links by name.
type description struct {
	Network   *description // some platforms put all below it
	Config    []entry1
	Ethernets map[string]link2
	Unused    struct{ Version, Renderer any } `yaml:",inline"`
	More      map[string]any                  `yaml:",inline"`
}

type entry1 struct {
	Type, Name string
	MAC        string `yaml:"mac_address"`
	MTU        int
	Subnets    []struct {
		Type, Address, Netmask string
		Gateway                netip.Addr
		Servers                some[netip.Addr] `yaml:"dns_nameservers"`
		Search                 some[string]     `yaml:"dns_search"`
		Routes                 []way
	}
	Servers some[netip.Addr] `yaml:"address"`
	Search  some[string]
}

type link2 struct {
	Match              struct{ MACAddress, Driver, Name string }
	Name               string `yaml:"set-name"`
	MTU                int
	DHCP4, DHCP6       bool
	AcceptRA           *bool    `yaml:"accept-ra"`
	Addresses          []string // with their masks
	Gateway4, Gateway6 netip.Addr
	Nameservers        struct {
		Addresses []netip.Addr
		Search    []string
	}
	Routes []way
	Unused struct{ Optional, Renderer any } `yaml:",inline"`
	More   map[string]any                   `yaml:",inline"`
}

// way is a route of both versions.
type way struct {
	To                            string // a network with its mask, or "default"
	Network, Destination, Netmask string // the same in version 1
	Via, Gateway                  netip.Addr
	Metric, Table                 uint32
}

// some is a list, or its only entry.
type some[T any] []T

func (s *some[T]) UnmarshalYAML(n *yaml.Node) error {
	if n.Kind == yaml.ScalarNode {
		n = &yaml.Node{Kind: yaml.SequenceNode, Content: []*yaml.Node{n}}
	}
	return n.Decode((*[]T)(s))
}

// FromPlatform reads what a platform says of cards, addresses, routes and name servers. The error is about what isn't
// used of it.
func FromPlatform(data []byte) (n config.Network, err error) {
	var d description
	err = yaml.Unmarshal(data, &d)
	if _, partly := errors.AsType[*yaml.TypeError](err); err != nil && !partly {
		return n, err
	}
	if d.Network != nil {
		d = *d.Network
	}
	errs := []error{err}
	add := func(l link2, id string) {
		if err := l.add(&n, id); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", id, err))
		}
	}
	for _, e := range d.Config {
		switch e.Type {
		case "physical":
			add(e.link(), e.Name)
		case "nameserver":
			n.Nameservers, n.SearchDomains = append(n.Nameservers, e.Servers...), append(n.SearchDomains, e.Search...)
		default:
			errs = append(errs, fmt.Errorf("%s %s isn't read", e.Type, e.Name))
		}
	}
	for _, id := range slices.Sorted(maps.Keys(d.Ethernets)) {
		add(d.Ethernets[id], id)
	}
	for _, kind := range slices.Sorted(maps.Keys(d.More)) {
		errs = append(errs, fmt.Errorf("%s isn't read", kind))
	}
	return n, errors.Join(errs...)
}

func (e entry1) link() (l link2) {
	masked := func(address, mask string) string { return strings.TrimSuffix(address+"/"+mask, "/") }
	l.Match.MACAddress, l.MTU = e.MAC, e.MTU
	for _, s := range e.Subnets {
		switch s.Type {
		case "dhcp", "dhcp4":
			l.DHCP4 = true
		case "dhcp6", "ipv6_dhcpv6-stateful":
			l.DHCP6 = true
		case "ipv6_slaac", "ipv6_dhcpv6-stateless":
			l.AcceptRA = new(true)
		case "static", "static6":
			l.Addresses = append(l.Addresses, masked(s.Address, s.Netmask))
		}
		if s.Gateway.IsValid() {
			l.Routes = append(l.Routes, way{To: "default", Via: s.Gateway})
		}
		for _, r := range s.Routes {
			r.To, r.Via = masked(r.Network+r.Destination, r.Netmask), r.Gateway
			l.Routes = append(l.Routes, r)
		}
		l.Nameservers.Addresses, l.Nameservers.Search = append(l.Nameservers.Addresses, s.Servers...), append(l.Nameservers.Search, s.Search...)
	}
	return l
}

// add adds the link: an entry for each address.
func (l link2) add(n *config.Network, id string) (err error) {
	for _, key := range slices.Sorted(maps.Keys(l.More)) {
		err = errors.Join(err, fmt.Errorf("%s isn't read", key))
	}
	in := config.Interface{Name: l.Name, HardwareAddr: strings.ToLower(l.Match.MACAddress), Driver: l.Match.Driver}
	in.Name = either(in.HardwareAddr+in.Driver == "", cmp.Or(l.Match.Name, id), in.Name)
	if strings.Contains(in.Name, "*") {
		return fmt.Errorf("the name %s of several cards isn't read", in.Name)
	}
	one := in
	if one.MTU, one.DHCP, one.DHCP6 = l.MTU, l.DHCP4, l.DHCP6; l.AcceptRA != nil {
		one.AcceptRA = config.Advertisements(strconv.FormatBool(*l.AcceptRA))
	}
	one.Routes = lists.Some([]netip.Addr{l.Gateway4, l.Gateway6}, func(gateway netip.Addr) (config.Route, bool) {
		return config.DefaultRoute(gateway), gateway.IsValid()
	})
	for _, r := range l.Routes {
		to := config.DefaultRoute(r.Via)
		if to.Metric, to.Table = r.Metric, r.Table; r.To != "default" {
			network, wrong := maskedPrefix(r.To)
			if to.Network = network; wrong != nil {
				return errors.Join(err, wrong)
			}
		}
		one.Routes = append(one.Routes, to)
	}
	n.Interfaces = append(n.Interfaces, one)
	n.Nameservers, n.SearchDomains = append(n.Nameservers, l.Nameservers.Addresses...), append(n.SearchDomains, l.Nameservers.Search...)
	for _, text := range l.Addresses {
		var wrong error
		if in.CIDR, wrong = maskedPrefix(text); wrong != nil {
			return errors.Join(err, wrong)
		}
		n.Interfaces = append(n.Interfaces, in)
	}
	return err
}

// maskedPrefix is an address with its mask, which may be a prefix length, or a single one.
func maskedPrefix(text string) (netip.Prefix, error) {
	address, mask, masked := strings.Cut(text, "/")
	a, err := netip.ParseAddr(address)
	if err != nil || !masked {
		return netip.PrefixFrom(a, a.BitLen()), err
	}
	bits, err := strconv.Atoi(mask)
	if m, bad := netip.ParseAddr(mask); bad == nil {
		var size int
		bits, size = net.IPMask(m.AsSlice()).Size()
		err = map[bool]error{true: errors.New("has holes")}[size == 0]
	}
	p := netip.PrefixFrom(a, bits)
	if err != nil || !p.IsValid() {
		return p, fmt.Errorf("mask %q: must be a mask such as 255.255.255.0, or a prefix length", mask)
	}
	return p, nil
}
