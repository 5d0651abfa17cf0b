package network

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/background"
	"github.com/garboard-os/garboard/services/system/configuration"
)

// lease is what a link was granted for a time. Times are on the monotonic
// clock, so that a change of the wall clock neither ends nor extends a lease.
type lease struct {
	LeaseStatus // as it is published; its link-local servers are on its link
	addresses   []leasedAddress

	renewAt, rebindAt time.Time

	mtu    int // 0: not offered
	routes []route
	ntp    []netip.Addr

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
	name string // of the protocol, for users
	bits int    // of its addresses: 32 or 128; 0: it gives none, and no node waits for it
	// wanted reports whether a link with this plan gets its leases.
	wanted func(p config.Link) bool
	// open begins on one link. hostname is sent to servers, "" for none.
	open func(p config.Link, hostname func() string) protocol
}

// sources of leases, in the order of their priority if values differ.
var sources = []source{{
	name: "DHCP", bits: 32,
	wanted: func(p config.Link) bool { return p.DHCP },
	open: func(p config.Link, hostname func() string) protocol {
		return dhcp{link: p.Name, options: p.DHCPOptions, hostname: hostname}
	},
}, {
	name: "DHCPv6", bits: 128,
	wanted: func(p config.Link) bool { return p.DHCP6 },
	open:   func(p config.Link, _ func() string) protocol { return dhcp6{link: p.Name} },
}, {
	name:   "stateless-DHCPv6",
	wanted: func(p config.Link) bool { return p.Informed && !p.DHCP6 },
	open:   func(p config.Link, _ func() string) protocol { return dhcp6{link: p.Name, informs: true} },
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

// leaseKey identifies a lease.
type leaseKey struct{ link, source string }

// sources are the sources of addresses for a link with this plan.
func (o *owner) sources(p config.Link) []source {
	return slices.DeleteFunc(slices.Clone(o.o.sources), func(s source) bool { return s.bits == 0 || !s.wanted(p) })
}

// leases are those of a link; what its routers advertise is the last one.
func (o *owner) leases(link string) (out []*lease) {
	for _, s := range o.o.sources {
		if c := o.clients[leaseKey{link, s.name}]; c != nil && c.lease != nil {
			out = append(out, c.lease)
		}
	}
	if l := o.links[link]; l != nil {
		p, managed := o.plan(l)
		if a := o.of(l.Attrs().Index).advertised.lease(link, time.Now()); a != nil && managed && o.acceptsRA(p) {
			out = append(out, a)
		}
	}
	return out
}

// ask starts and stops the clients of a link.
func (o *owner) ask(ctx context.Context, l netlink.Link, p config.Link) {
	for _, s := range o.o.sources {
		key, wanted, sent := leaseKey{l.Attrs().Name, s.name}, s.wanted(p), p.DHCPOptions
		sent.RouteMetric, sent.RouteTable = 0, 0 // no server gets those
		if c := o.clients[key]; c != nil {
			if wanted && c.index == l.Attrs().Index && c.sent == sent {
				continue
			}
			o.stopClient(key)
		}
		if again := o.declined[key].until; time.Now().Before(again) {
			o.wake(again)
		} else if wanted && l.Attrs().Flags&net.FlagUp != 0 { // a link that isn't up yet is handled when it is
			o.startClient(ctx, key, s, p, l.Attrs().Index)
			o.clients[key].sent = sent
		}
	}
}

func (o *owner) startClient(ctx context.Context, key leaseKey, s source, p config.Link, index int) {
	// servers get only the name of a configuration, and a new one when the lease is extended
	hostname := func() string {
		name, _ := configuration.Wanted(o.o.Store, func(c *config.Config) string { return c.Machine.Network.Hostname })
		return name
	}
	c := &client{
		source: s.name, quiet: s.bits == 0, link: key.link, index: index, log: o.log, kick: make(chan struct{}, 1),
		protocol: s.open(p, hostname),
	}
	o.clients[key] = c
	if o.pinned.BitLen() == s.bits && o.declined[key].address != o.pinned {
		c.prefer = o.pinned // a server of another network offers another address
	}
	c.stop = background.Start(ctx, func(ctx context.Context) {
		c.report = func(l *lease) {
			// it may have been stopped meanwhile
			o.tell(ctx, func() bool { c.lease = l; return o.clients[key] == c })
		}
		c.run(ctx)
	})
}

func (o *owner) stopClient(key leaseKey) {
	o.clients[key].stop()
	delete(o.clients, key)
}

func (o *owner) stopClients() {
	for key := range o.clients {
		o.stopClient(key)
	}
}
