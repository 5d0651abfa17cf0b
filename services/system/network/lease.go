package network

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/background"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/sleep"
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
	return either(len(l.addresses) == 0, "names and servers", config.Joined(l.addresses, ", "))
}

// by is who wants what the lease has.
func (l *lease) by() string { return l.Source + " from " + l.Server }

// near reports whether an address of another lease is in the same network.
func (l *lease) near(other *lease) bool {
	return slices.ContainsFunc(l.addresses, func(own leasedAddress) bool {
		// DHCPv6 grants no length
		network := either(own.IsSingleIP() && own.Addr().Is6(), netip.PrefixFrom(own.Addr(), 64), own.Prefix)
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

const (
	// Pauses between attempts to get an address double from the first to the last,
	// plus or minus a tenth, as RFC 2131 §4.1 demands. The RFC begins with 4 s. A
	// link that has just come up often drops the first frames, so we begin sooner.
	askFirst = time.Second
	askMax   = 64 * time.Second
	// extendMin is the shortest pause between attempts to extend a lease (RFC 2131
	// §4.4.5), unless less of the lease is left.
	extendMin = 60 * time.Second
	// answerWait is the wait for an answer; after that, the packet counts as lost.
	answerWait = 10 * time.Second
	// confirmFor is longer than a switch with the spanning tree protocol takes to forward after the link is up: 30 s by
	// default (IEEE 802.1D).
	confirmFor = 50 * time.Second
	// warnAfter is how long an answer may be missing before that is logged.
	warnAfter = 10 * time.Second
	// remindEvery is the interval of log lines during a longer wait.
	remindEvery = 5 * time.Minute
)

var (
	// errNoAnswer: there was no answer.
	errNoAnswer = errors.New("no answer")
	// errRefused is the server's refusal: the lease has ended, or never existed.
	errRefused = errors.New("the server refused")
	// errKicked: the link came back during the wait for an answer, which may be lost.
	errKicked  = errors.New("link came back")
	errExpired = errors.New("it expired unanswered")
)

// client keeps the lease of one link from one source, in the way of RFC 2131
// §4.4, figure 5, for DHCP:
//
//	                                 T1                 T2
//	acquire ──────────▶ bound ──────────────▶ renewing ────▶ rebinding
//	   ▲                  ▲    its server       │       any server │
//	   │                  └─────────────────────┴──────────────────┤
//	   └──────────────────── refusal, expiry ◀─────────────────────┘
type client struct {
	source string // its name
	quiet  bool   // nobody has asked for a server: that there is none isn't told
	link   string
	protocol
	log *slog.Logger
	// report is called with each new or extended lease, and with nil when it is lost.
	report func(*lease)
	// kick signals that the link is back: the next attempt is made at once.
	kick chan struct{}
	// prefer is the address to ask for first, if one is known.
	prefer netip.Addr

	// These are networkd's.
	index int // of the link
	sent  config.DHCPOptions
	lease *lease // nil while there is none
	stop  func()
}

// run keeps a lease until ctx ends. Its input comes from other hosts: a message
// that causes a panic must not end the machine.
func (c *client) run(ctx context.Context) {
	for ctx.Err() == nil {
		if err := dag.Guard(c.log, func() error { c.keep(ctx); return nil }); err != nil {
			c.report(nil)
			sleep.Until(ctx, c.kick, askMax)
		}
	}
}

func (c *client) keep(ctx context.Context) {
	l := c.obtain(ctx)
	if l == nil {
		return
	}
	c.have(l)
	if l, err := c.hold(ctx, l); ctx.Err() == nil {
		c.log.Warn(fmt.Sprintf("lost the %s lease of %s on %s: %v; asking for a new one", c.source, l, c.link, err))
		c.report(nil)
	}
}

func (c *client) have(l *lease) {
	l.Source = c.source
	if len(l.addresses) > 0 {
		c.prefer = l.addresses[0].Addr()
	}
	c.report(l)
}

// obtain asks until there is a lease; nil after ctx has ended.
func (c *client) obtain(ctx context.Context) *lease {
	since := time.Now()
	warn := since.Add(warnAfter)
	for pause := askFirst; ctx.Err() == nil; pause = min(pause*2, askMax) {
		// machines that were switched on together don't ask at the same time
		wait := pause + time.Duration((rand.Float64()-0.5)*0.2*float64(pause))
		next := time.Now().Add(wait)
		l, err := c.ask(ctx, min(wait, answerWait))
		if errors.Is(err, errKicked) {
			pause = askFirst / 2 // doubled by the loop
			continue
		}
		if err == nil {
			c.log.Info(fmt.Sprintf("%s lease on %s: %s from %s", c.source, c.link, l, l.Server))
			return l
		}
		if now := time.Now(); ctx.Err() == nil && !c.quiet && !now.Before(warn) {
			warn = now.Add(remindEvery)
			what := either(errors.Is(err, errNoAnswer), fmt.Sprintf("no %s answer on %s", c.source, c.link), fmt.Sprintf("no %s lease on %s: %v", c.source, c.link, err))
			c.log.Warn(fmt.Sprintf("%s for %s; asking again at least every %s. A %s server on that network ends this, "+
				"or a static address (cidr) for %s in machine.network.interfaces", what, now.Sub(since).Round(time.Second), askMax, c.source, c.link))
		}
		sleep.Until(ctx, c.kick, time.Until(next))
	}
	return nil
}

// ask tries once, and ends early if the link comes back.
func (c *client) ask(ctx context.Context, wait time.Duration) (*lease, error) {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	back := false
	stop := background.Start(ctx, func(ctx context.Context) {
		if back = sleep.Until(ctx, c.kick, 2*wait); back {
			cancel()
		}
	})
	l, err := c.acquire(ctx, c.prefer)
	if stop(); back && err != nil {
		return nil, errKicked
	}
	return l, err
}

// hold extends the lease as long as a server does so: from T1 its server, from T2 any. It returns the lease that ended,
// and the reason.
func (c *client) hold(ctx context.Context, l *lease) (*lease, error) {
	next, confirmed := l.renewAt, time.Time{} // confirmed: when the link's return is settled, zero if it is
	for {
		select {
		case <-c.kick: // the link came back
			confirmed = time.Now().Add(confirmFor)
		case <-time.After(time.Until(next)):
		case <-ctx.Done():
		}
		now := time.Now()
		switch {
		case ctx.Err() != nil:
			return l, ctx.Err()
		case !l.Expires.IsZero() && !now.Before(l.Expires):
			return l, errExpired
		}
		rebind := !now.Before(l.rebindAt)
		end := either(rebind, l.Expires, l.rebindAt)
		// Half of the rest, but at least extendMin; the last pause ends with the phase.
		back := !confirmed.IsZero()
		pause := either(back, answerWait, min(max(end.Sub(now)/2, extendMin), end.Sub(now)))
		once, cancel := context.WithTimeout(ctx, min(pause, answerWait))
		longer, err := c.extend(once, l, rebind || back)
		cancel()
		switch {
		case errors.Is(err, errRefused):
			return l, err
		case err != nil && back && !now.Before(confirmed):
			longer, err = c.elsewhere(ctx, l), nil
		case err != nil && rebind:
			c.log.Warn(fmt.Sprintf("no %s server extends the lease of %s on %s, which ends in %s: %v",
				c.source, l, c.link, time.Until(l.Expires).Round(time.Second), err))
		}
		if next = now.Add(pause); err != nil {
			continue
		}
		if longer.String() != l.String() {
			c.log.Warn(fmt.Sprintf("%s server changed the address on %s from %s to %s", c.source, c.link, l, longer))
		}
		l, next, confirmed = longer, longer.renewAt, time.Time{}
		c.have(l)
	}
}

// elsewhere asks for another lease, because nobody has confirmed this one after the link came back: that may be on
// another network now (RFC 2131 §3.7). A server there that doesn't know the address offers one of that network. Without
// an answer, and with an offer of the same network, the lease stays.
func (c *client) elsewhere(ctx context.Context, l *lease) *lease {
	once, cancel := context.WithTimeout(ctx, answerWait)
	defer cancel()
	other, err := c.acquire(once, c.prefer)
	if err == nil && (other.String() == l.String() || !l.near(other)) {
		return other
	}
	if ctx.Err() == nil {
		c.log.Warn(fmt.Sprintf("%s came back, and no %s server there knows %s, which stays until its lease ends", c.link, c.source, l))
	}
	return l
}
