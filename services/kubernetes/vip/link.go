package vip

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// forever is the lifetime of an address without an end.
const forever = 0xffffffff // seconds

// alias is the shared address in its form on a link: with its own prefix, so that
// the node's routes and other addresses don't depend on it. In IPv6 it is deprecated
// from the start, so that the kernel never uses it as a source address (RFC 6724 §5,
// rule 3), and usable at once: this package has already looked for duplicates.
func alias(address netip.Addr) *netlink.Addr {
	bits := address.BitLen()
	a := &netlink.Addr{IPNet: &net.IPNet{IP: address.AsSlice(), Mask: net.CIDRMask(bits, bits)}}
	if address.Is6() {
		a.ValidLft, a.PreferedLft, a.Flags = forever, 0, unix.IFA_F_NODAD
	}
	return a
}

// isAlias is false for the same address with the prefix of the link: then it is the
// node's own address, from DHCP, and belongs to networkd.
func isAlias(a netlink.Addr, address netip.Addr) bool {
	return a.IP.Equal(address.AsSlice()) && bytes.Equal(a.Mask, net.CIDRMask(address.BitLen(), address.BitLen()))
}

func family(address netip.Addr) int {
	if address.Is4() {
		return netlink.FAMILY_V4
	}
	return netlink.FAMILY_V6
}

// has reports whether the address is on the link.
func has(l netlink.Link, address netip.Addr) (bool, error) {
	all, err := netlink.AddrList(l, family(address))
	// other addresses change meanwhile; to add it twice does no harm
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return false, fmt.Errorf("addresses of %s: %w", l.Attrs().Name, err)
	}
	return slices.ContainsFunc(all, func(a netlink.Addr) bool { return isAlias(a, address) }), nil
}

func put(l netlink.Link, address netip.Addr) error {
	if err := netlink.AddrReplace(l, alias(address)); err != nil {
		return fmt.Errorf("add %s to %s: %w", address, l.Attrs().Name, err)
	}
	return nil
}

// remove removes the address from every link that has it: after a restart it
// may be on a link whose name has changed since.
func remove(address netip.Addr) error {
	all, err := netlink.AddrList(nil, family(address))
	var errs []error
	if err != nil { // some may be listed despite the error
		errs = append(errs, fmt.Errorf("addresses of all links: %w", err))
	}
	for _, a := range all {
		if !isAlias(a, address) {
			continue
		}
		l, err := netlink.LinkByIndex(a.LinkIndex)
		if err != nil {
			continue // the link is gone, and the address with it
		}
		if err := netlink.AddrDel(l, &netlink.Addr{IPNet: a.IPNet}); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			errs = append(errs, fmt.Errorf("remove %s from %s: %w", address, l.Attrs().Name, err))
		}
	}
	return errors.Join(errs...)
}

// neighbours are machines that are probably on the link: routers.
func neighbours(l netlink.Link, address netip.Addr) []netip.Addr {
	routes, err := netlink.RouteList(l, family(address))
	if err != nil {
		return nil // then only the other control planes are probed
	}
	var all []netip.Addr
	for _, r := range routes {
		if gateway, ok := netip.AddrFromSlice(r.Gw); ok && !slices.Contains(all, gateway.Unmap()) && len(all) < maxNeighbours {
			all = append(all, gateway.Unmap())
		}
	}
	return all
}

// maxNeighbours limits how many are probed at once.
const maxNeighbours = 8
