package network

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"github.com/garboard-os/garboard/config"
)

// family of addresses.
type family string

const (
	ipv4 family = "IPv4"
	ipv6 family = "IPv6"
)

// familyOf an invalid address is neither.
func familyOf(a netip.Addr) family {
	switch {
	case a.Is4():
		return ipv4
	case a.Is6():
		return ipv6
	}
	return ""
}

// lease is what a link was granted for a time. Times are on the monotonic
// clock, so that a change of the wall clock neither ends nor extends a lease.
type lease struct {
	addresses []leasedAddress
	source    string // the name of its protocol
	server    string // that granted it
	link      string // its link-local servers are there

	renewAt, rebindAt, expireAt time.Time // zero: never

	mtu       int // 0: not offered
	routes    []route
	resolvers []netip.Addr
	ntp       []netip.Addr
	hostname  string
	search    []string // domains that complete short names
	problems  []string // values that were left out

	grant any // data that its protocol needs to extend it
}

// leasedAddress may end before the other addresses of its lease.
type leasedAddress struct {
	netip.Prefix
	until time.Time // zero: for good
}

// lasts reports whether the link may still have the address at that time.
func (a leasedAddress) lasts(now time.Time) bool { return a.until.IsZero() || now.Before(a.until) }

// String is the addresses.
func (l *lease) String() string {
	if len(l.addresses) == 0 {
		return "names and servers"
	}
	return config.Joined(l.addresses, ", ")
}

// near reports whether an address of another lease is in the same network.
func (l *lease) near(other *lease) bool {
	return slices.ContainsFunc(l.addresses, func(own leasedAddress) bool {
		network := own.Prefix
		if network.IsSingleIP() && network.Addr().Is6() { // DHCPv6 grants no length
			network = netip.PrefixFrom(network.Addr(), 64)
		}
		return slices.ContainsFunc(other.addresses, func(its leasedAddress) bool { return network.Masked().Contains(its.Addr()) })
	})
}

// source is a way in which links get leases: a protocol for one family of addresses.
type source struct {
	name    string // of the protocol, for users
	family  family
	informs bool // it gives no address: no node waits for it
	// wanted reports whether a link with this plan gets its leases.
	wanted func(p config.Link) bool
	// open begins on one link. hostname is sent to servers, "" for none.
	open func(p config.Link, hostname func() string) protocol
}

// sources of leases, in the order of their priority if values differ.
var sources = []source{{
	name: "DHCP", family: ipv4,
	wanted: func(p config.Link) bool { return p.DHCP },
	open: func(p config.Link, hostname func() string) protocol {
		return dhcp{link: p.Name, options: p.DHCPOptions, hostname: hostname}
	},
}, {
	name: "DHCPv6", family: ipv6,
	wanted: func(p config.Link) bool { return p.DHCP6 },
	open:   func(p config.Link, _ func() string) protocol { return dhcp6{link: p.Name} },
}, {
	name: "stateless-DHCPv6", informs: true,
	wanted: func(p config.Link) bool { return p.Informed && !p.DHCP6 },
	open:   func(p config.Link, _ func() string) protocol { return information6{dhcp6{link: p.Name}} },
}}

// protocol asks for leases on one link. Each call asks once, at most until ctx
// ends, and returns errNoAnswer if there is no answer.
type protocol interface {
	// acquire asks for a lease, of the address prefer if one is known.
	acquire(ctx context.Context, prefer netip.Addr) (*lease, error)
	// extend asks for more time: at the server that granted the lease, or to
	// rebind at any. errRefused ends the lease.
	extend(ctx context.Context, l *lease, rebind bool) (*lease, error)
}
