package network

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strconv"

	"github.com/garboard-os/garboard/config"
)

// ParamIP is the kernel parameter with the network of a machine without a configuration.
const ParamIP = "ip"

// argumentField is a field of ip=: addresses of IPv6 are in brackets.
var argumentField = regexp.MustCompile(`(?:\[([^\]]*)\]|([^:]*))(?::|$)`)

// FromArgument reads ip= as the kernel does (Documentation/admin-guide/nfs/nfsroot.rst) and as dracut.cmdline(7) extends it:
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
		if in.CIDR, err = argumentPrefix(f[0], f[3]); err != nil {
			return n, err
		}
	}
	if f[2] != "" {
		gateway, err := netip.ParseAddr(f[2])
		if err != nil {
			return n, err
		}
		in.Routes = []config.Route{config.DefaultRoute(gateway)}
	}
	for _, text := range slices.DeleteFunc(f[7:], func(text string) bool { return text == "" }) {
		server, err := netip.ParseAddr(text)
		if err != nil {
			return n, err
		}
		n.Nameservers = append(n.Nameservers, server)
	}
	if in.Name == "" && in.CIDR.IsValid() {
		return n, errors.New("names no device, such as eth0, in its sixth field")
	}
	if in.Name != "" {
		n.Interfaces = []config.Interface{in}
	}
	return n, nil
}

func argumentPrefix(address, mask string) (netip.Prefix, error) {
	a, err := netip.ParseAddr(address)
	if err != nil {
		return netip.Prefix{}, err
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
