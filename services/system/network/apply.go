package network

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// physicalEthernet reports whether a link is a network card: its kind isn't a
// virtual one of the kernel (veth, bridge, vxlan …), and it is Ethernet.
func physicalEthernet(l netlink.Link) bool {
	a := l.Attrs()
	return l.Type() == "device" && a.EncapType == "ether" && a.Flags&net.FlagLoopback == 0
}

// bringUp sets the link up if it isn't.
func bringUp(l netlink.Link) error {
	a := l.Attrs()
	if a.Flags&net.FlagUp != 0 {
		return nil
	}
	if err := netlink.LinkSetUp(l); err != nil {
		return fmt.Errorf("set %s up: %w", a.Name, err)
	}
	return nil
}

// apply changes the link from the state that we applied before to the new one,
// and returns the state that it has now. Settings by other programs stay.
func apply(l netlink.Link, was, is linkState) (linkState, error) {
	a := l.Attrs()
	now := linkState{index: a.Index}
	var errs []error
	var err error
	if now.mtu, now.mtuBefore, err = applyMTU(l, was, is.mtu); err != nil {
		errs = append(errs, err)
	}
	// Old routes are removed before the addresses that they depend on; new ones are added after.
	for _, r := range missing(was.routes, is.routes) {
		if err := netlink.RouteDel(r.kernel(a.Index, is.addresses)); err != nil && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, fmt.Errorf("remove route %s from %s: %w", r, a.Name, err))
			now.routes = append(now.routes, r)
		}
	}
	for _, p := range missing(was.addresses, is.addresses) {
		if err := netlink.AddrDel(l, &netlink.Addr{IPNet: ipNet(p)}); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			errs = append(errs, fmt.Errorf("remove address %s from %s: %w", p, a.Name, err))
			now.addresses = append(now.addresses, p)
		}
	}
	// When an address is removed, the kernel also drops the routes that depend on it
	// and the other addresses of its network (secondary ones): then all are set again.
	again := len(missing(was.addresses, is.addresses)) > 0
	for _, p := range is.addresses {
		if again || len(missing([]netip.Prefix{p}, was.addresses)) > 0 {
			if err := netlink.AddrReplace(l, &netlink.Addr{IPNet: ipNet(p)}); err != nil {
				errs = append(errs, fmt.Errorf("add address %s to %s: %w", p, a.Name, err))
				continue
			}
		}
		now.addresses = append(now.addresses, p)
	}
	for _, r := range is.routes {
		if again || len(missing([]route{r}, was.routes)) > 0 {
			if err := netlink.RouteReplace(r.kernel(a.Index, is.addresses)); err != nil {
				errs = append(errs, fmt.Errorf("add route %s to %s: %w", r, a.Name, err))
				continue
			}
		}
		now.routes = append(now.routes, r)
	}
	return now, errors.Join(errs...)
}

// applyMTU sets the MTU, or restores the old one. It returns the MTU that we
// have set, 0 for none, and the old one.
func applyMTU(l netlink.Link, was linkState, mtu int) (now, before int, err error) {
	a := l.Attrs()
	to := mtu
	switch {
	case mtu == was.mtu:
		return was.mtu, was.mtuBefore, nil
	case mtu == 0:
		to = was.mtuBefore
	case was.mtu == 0:
		was.mtuBefore = a.MTU
	}
	if err := netlink.LinkSetMTU(l, to); err != nil {
		return was.mtu, was.mtuBefore, fmt.Errorf("set the MTU of %s to %d: %w", a.Name, to, err)
	}
	return mtu, was.mtuBefore, nil
}

// kernel is the route in netlink's form. A gateway outside of the link's
// networks is reached on the link as well: some clouds assign /32.
func (r route) kernel(index int, addresses []netip.Prefix) *netlink.Route {
	k := &netlink.Route{
		LinkIndex: index,
		Dst:       ipNet(r.network),
		Priority:  int(r.metric),
		Protocol:  unix.RTPROT_STATIC,
	}
	if !r.gateway.IsValid() {
		k.Scope = netlink.SCOPE_LINK
		return k
	}
	k.Gw = r.gateway.AsSlice()
	near := slices.ContainsFunc(addresses, func(p netip.Prefix) bool { return p.Masked().Contains(r.gateway) })
	if !near && !r.gateway.IsLinkLocalUnicast() {
		k.Flags = int(netlink.FLAG_ONLINK)
	}
	return k
}

func (r route) String() string {
	if !r.gateway.IsValid() {
		return fmt.Sprintf("%s metric %d", r.network, r.metric)
	}
	return fmt.Sprintf("%s via %s metric %d", r.network, r.gateway, r.metric)
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
