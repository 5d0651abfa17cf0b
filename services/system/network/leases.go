package network

import (
	"context"
	"net"
	"slices"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/background"
	"github.com/vishvananda/netlink"
)

// leaseKey identifies a lease.
type leaseKey struct{ link, source string }

// leased is a lease, the client that keeps it, and the function that ends that.
type leased struct {
	lease *lease // nil while there is none
	index int    // of the link
	sent  config.DHCPOptions
	stop  func()
	kick  chan struct{}
	protocol
}

// sources are the sources of addresses for a link with this plan.
func (o *owner) sources(p config.Link) []source {
	return slices.DeleteFunc(slices.Clone(o.o.sources), func(s source) bool { return s.informs || !s.wanted(p) })
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
		if a := o.advertised[l.Attrs().Index].lease(link, time.Now()); a != nil && managed && o.acceptsRA(p) {
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
			o.due = minTime(o.due, again)
		} else if wanted && l.Attrs().Flags&net.FlagUp != 0 { // a link that isn't up yet is handled when it is
			o.startClient(ctx, key, s, p, l.Attrs().Index)
			o.clients[key].sent = sent
		}
	}
}

func (o *owner) startClient(ctx context.Context, key leaseKey, s source, p config.Link, index int) {
	running := &leased{index: index, kick: make(chan struct{}, 1), protocol: s.open(p, func() string { return *o.announced.Load() })}
	o.clients[key] = running
	c := &client{
		source: s.name, quiet: s.informs, link: key.link, log: o.log, kick: running.kick,
		protocol: running.protocol,
	}
	if familyOf(o.pinned) == s.family && o.declined[key].address != o.pinned {
		c.prefer = o.pinned // a server of another network offers another address
	}
	running.stop = background.Start(ctx, func(ctx context.Context) {
		c.report = func(l *lease) {
			o.tell(ctx, func() bool { running.lease = l; return o.clients[key] == running }) // it may have been stopped meanwhile
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
