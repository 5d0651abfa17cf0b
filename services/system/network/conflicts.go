package network

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/system/neighbor"
	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"
	"github.com/vishvananda/netlink"
)

// Conflicts of IPv4 addresses (RFC 5227). The kernel has an address at once, and the node asks beside it whether
// another host has it: only the choice of the node's address waits for that. If one had it first, the node gives the
// address up, and declines a lease of it, until that host is gone. If one comes later, the node keeps the address and
// says again that it has it (§2.4).
const (
	firstProbes = 3 // RFC 5227 §1.1 (PROBE_NUM)
	// probeWait is shorter than that of the RFC: hosts of a network answer within milliseconds, and a boot waits for
	// it.
	probeWait = 200 * time.Millisecond
	// probeGrace is how long the choice of the node's address waits at most.
	probeGrace = time.Second
	// declinePause is the pause before a client asks again (RFC 2131 §3.1.5).
	declinePause = 10 * time.Second
)

// lookEvery is how often another host is looked for; defendEvery is the least time between two announcements (RFC 5227
// §1.1, DEFEND_INTERVAL), and between two reports.
var lookEvery, defendEvery = time.Minute, 10 * time.Second

// watch is the search for another host with an address.
type watch struct {
	end   context.CancelFunc
	mac   string // of the link
	asked bool   // other hosts were asked, or the node has had the address before
	conflict
}

// conflict is the other host's MAC address, "" for none, and whether it had the address before the node.
type conflict struct {
	other string
	first bool
}

// declined is a lease that another host's address was in, or such an address of a router advertisement.
type declined struct {
	until   time.Time  // when the client asks again
	address netip.Addr // that it doesn't ask for: some servers would give it again
	problem string
}

// watchAddresses begins to look for other hosts with the addresses of links with a carrier, and ends for others.
func (o *owner) watchAddresses(ctx context.Context) {
	wanted := map[address]netlink.Link{}
	for _, w := range o.wanted {
		a, is := w.object.(address)
		l := o.links[o.linkName(w.link())]
		if is && l != nil && a.prefix.Addr().Is4() && carrier(l) && neighbor.On(l) && (o.state.objects[a] || o.watches[a].first) {
			wanted[a] = l
		}
	}
	for a, w := range o.watches {
		if l := wanted[a]; l == nil || l.Attrs().HardwareAddr.String() != w.mac {
			w.end()
			delete(o.watches, a)
			if !o.state.objects[a] {
				delete(o.held, a)
			}
		}
	}
	for a, l := range wanted {
		if _, begun := o.watches[a]; begun {
			continue
		}
		ctx, cancel := context.WithCancel(ctx)
		held := o.held[a]
		o.watches[a] = watch{end: cancel, mac: l.Attrs().HardwareAddr.String(), asked: held}
		o.lookups.Go(func() {
			for range sleep.Every(ctx, defendEvery) {
				_ = dag.Guard(o.log, func() error { return o.watch(ctx, a, l, &held) }) // its link may go at any time
			}
		})
	}
}

// watch reports each change until ctx ends. held says that the node has announced the address.
func (o *owner) watch(ctx context.Context, a address, l netlink.Link, held *bool) error {
	heard := make(chan string, 8)
	wire, err := neighbor.Open(l, a.prefix.Addr(), o.log, func(f neighbor.Observed) {
		// Who asks doesn't have it: some switches ask all the time.
		if f.What != neighbor.Probe && f.What != neighbor.DirectProbe && len(heard) < cap(heard) {
			heard <- f.MAC.String()
		}
	})
	if err != nil {
		return err
	}
	defer wire.Close()
	other, probes := "", firstProbes
	for last, told := (conflict{}), false; ctx.Err() == nil; told = true {
		all, err := dump("links", netlink.LinkList)
		if err != nil {
			return err
		}
		for ; probes > 0 && other == ""; probes-- {
			if err := wire.Send(neighbor.ProbeFrame(wire.MAC, nil, a.prefix.Addr())); err != nil {
				return err
			}
			other = stranger(ctx, heard, all, probeWait)
		}
		if ctx.Err() != nil {
			break
		}
		now := conflict{other, other != "" && !*held}
		changed := now != last || !told
		if *held = !now.first; *held && (other != "" || changed) {
			// One that is lost isn't missed: the kernel answers questions.
			_ = wire.Send(neighbor.Announcements(wire.MAC, a.prefix.Addr())...)
		}
		probes = either(now.first, firstProbes, 1)
		if changed {
			o.tell(ctx, func() bool { return o.hear(a, now) })
		}
		if last = now; other != "" && sleep.For(ctx, defendEvery) {
			for len(heard) > 0 {
				<-heard
			}
		}
		other = stranger(ctx, heard, all, lookEvery)
	}
	return nil
}

// stranger is the first other host that says that it has the address within a time; "" if none does. Another link of
// the node on the same network answers, too.
func stranger(ctx context.Context, heard <-chan string, own []netlink.Link, within time.Duration) string {
	for late := time.After(within); ; {
		select {
		case mac := <-heard:
			if !slices.ContainsFunc(own, func(l netlink.Link) bool {
				return l.Attrs().HardwareAddr.String() == mac || l.Attrs().PermHWAddr.String() == mac
			}) {
				return mac
			}
		case <-late:
			return ""
		case <-ctx.Done():
			return ""
		}
	}
}

// hear takes a change of a conflict over, and reports whether it is of a search that still goes on.
func (o *owner) hear(a address, c conflict) bool {
	w, on := o.watches[a]
	if !on {
		return false
	}
	w.conflict, w.asked, o.held[a] = c, true, !c.first
	o.watches[a] = w
	if c.first {
		o.decline(a, c)
	}
	return true
}

func (c conflict) String() string {
	return "another host of the network has this address: MAC " + c.other
}

// decline gives a lease back, if the address is in one; its client asks again after a pause.
func (o *owner) decline(a address, found conflict) {
	for key, c := range o.clients {
		d, can := c.protocol.(interface{ decline(*lease) error })
		if !can || c.index != a.index || c.lease == nil || !slices.ContainsFunc(c.lease.addresses, func(l leasedAddress) bool { return l.Prefix == a.prefix }) {
			continue
		}
		l := c.lease
		o.stopClient(key)
		o.declined[key] = declined{time.Now().Add(declinePause), a.prefix.Addr(), fmt.Sprintf("%s lease of %s on %s was declined: %s", key.source, l, key.link, found)}
		if err := d.decline(l); err != nil {
			o.log.Warn(fmt.Sprintf("decline the lease of %s on %s: %v", l, key.link, err))
		}
	}
}

// decline tells the server that another host has the address (RFC 2131 §4.4.4). There is no answer to it.
func (d dhcp) decline(l *lease) (err error) {
	ack := l.grant.(*dhcpv4.DHCPv4)
	msg, err := dhcpv4.New(dhcpv4.WithMessageType(dhcpv4.MessageTypeDecline), dhcpv4.WithHwAddr(ack.ClientHWAddr), d.withID,
		dhcpv4.WithOption(dhcpv4.OptRequestedIPAddress(ack.YourIPAddr)),
		dhcpv4.WithOption(dhcpv4.OptServerIdentifier(ack.ServerIdentifier())))
	if err != nil {
		return err
	}
	conn, err := nclient4.NewRawUDPConn(d.link, nclient4.ClientPort)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	_, err = conn.WriteTo(msg.ToBytes(), nclient4.DefaultServers)
	return err
}
