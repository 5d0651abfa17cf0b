package network

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"time"

	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/insomniacslk/dhcp/dhcpv4"
)

const (
	// Pauses between attempts to get an address double from the first to the
	// last, give or take a tenth, as RFC 2131 §4.1 asks. It begins with 4 s; a
	// link that has just come up often drops the first frames, so begin sooner.
	discoverFirst = time.Second
	discoverMax   = 64 * time.Second
	// extendMin is the shortest pause between attempts to extend a lease (RFC
	// 2131 §4.4.5), unless the lease hasn't got that long.
	extendMin = 60 * time.Second
	// answerWait is how long an answer may take; more is a lost packet.
	answerWait = 10 * time.Second
	// warnAfter is how long a missing answer is nobody's business.
	warnAfter = 10 * time.Second
	// remindEvery is how often a wait that goes on is logged again.
	remindEvery = 5 * time.Minute
)

// errNak is the server's refusal: the lease is over, or never was.
var errNak = errors.New("DHCP server refused (NAK)")

// exchange sends one message and waits for its answer, at most until ctx ends.
type exchange interface {
	discover(ctx context.Context, prefer netip.Addr) (offer *dhcpv4.DHCPv4, err error)
	request(ctx context.Context, offer *dhcpv4.DHCPv4) (ack *dhcpv4.DHCPv4, err error)
	// extend asks for more time: the server itself, or with broadcast any.
	extend(ctx context.Context, l *lease, broadcast bool) (ack *dhcpv4.DHCPv4, err error)
}

// dhcpClient keeps the lease of one link (RFC 2131 §4.4, figure 5):
//
//	        offer, ack               T1                 T2
//	acquire ──────────▶ bound ──────────────▶ renewing ────▶ rebinding
//	   ▲                  ▲    ack (unicast)     │  ack (broadcast) │
//	   │                  └─────────────────────┴──────────────────┤
//	   └──────────────────────────── NAK, expiry ◀──────────────────┘
type dhcpClient struct {
	link string
	x    exchange
	log  *slog.Logger
	// report hears of each new or extended lease, and nil when it is lost.
	report func(*lease)
	// kick says that the link is back: what was to be asked later is asked now.
	kick <-chan struct{}
	// prefer is the address to ask for first, where one is known.
	prefer netip.Addr
}

// run keeps a lease until ctx ends. Strangers write what it reads: a message that
// makes it panic must not end the machine.
func (c *dhcpClient) run(ctx context.Context) {
	for ctx.Err() == nil {
		if err := dag.Guard(c.log, func() error { c.keep(ctx); return nil }); err != nil {
			c.report(nil)
			c.sleep(ctx, discoverMax)
		}
	}
}

func (c *dhcpClient) keep(ctx context.Context) {
	for {
		l := c.acquire(ctx)
		if l == nil {
			return
		}
		c.prefer = l.address.Addr()
		c.report(l)
		err := c.hold(ctx, l)
		if ctx.Err() != nil {
			return
		}
		c.log.Warn(fmt.Sprintf("lost the DHCP lease of %s on %s: %v; asking for a new one", c.prefer, c.link, err))
		c.report(nil)
	}
}

// acquire asks until there is a lease; nil when ctx has ended.
func (c *dhcpClient) acquire(ctx context.Context) *lease {
	since, warned := time.Now(), time.Time{}
	for pause := discoverFirst; ctx.Err() == nil; pause = min(pause*2, discoverMax) {
		wait := jitter(pause)
		next := time.Now().Add(wait)
		l, err := c.ask(ctx, min(wait, answerWait))
		if errors.Is(err, errKicked) {
			pause = discoverFirst / 2 // doubled by the loop
			continue
		}
		if err == nil {
			c.log.Info(fmt.Sprintf("DHCP lease on %s: %s from %s", c.link, l.address, l.server))
			return l
		}
		now := time.Now()
		if ctx.Err() == nil && now.Sub(since) >= warnAfter && (warned.IsZero() || now.Sub(warned) >= remindEvery) {
			warned = now
			c.log.Warn(noAnswer(c.link, now.Sub(since), err))
		}
		c.sleep(ctx, time.Until(next))
	}
	return nil
}

// noAnswer is the line at the console: what is missing, since when, what
// follows, and what ends it.
func noAnswer(link string, since time.Duration, err error) string {
	what := fmt.Sprintf("no DHCP answer on %s", link)
	if !errors.Is(err, errNoAnswer) {
		what = fmt.Sprintf("no DHCP lease on %s: %v", link, err)
	}
	return fmt.Sprintf("%s for %s; asking again at least every %s. A DHCP server on that network ends this, "+
		"or a static address (cidr) for %s in machine.network.interfaces", what, since.Round(time.Second), discoverMax, link)
}

// errKicked: the link came back while we waited for an answer that was lost.
var errKicked = errors.New("link came back")

// ask tries once: discover, offer, request, ack.
func (c *dhcpClient) ask(ctx context.Context, wait time.Duration) (*lease, error) {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	ctx, kicked := context.WithCancelCause(ctx)
	defer kicked(nil)
	go func() {
		select {
		case <-c.kick:
			kicked(errKicked)
		case <-ctx.Done():
		}
	}()
	offer, err := c.x.discover(ctx, c.prefer)
	if cause := context.Cause(ctx); errors.Is(cause, errKicked) {
		return nil, cause
	}
	if err != nil {
		return nil, err
	}
	asked := time.Now()
	ack, err := c.x.request(ctx, offer)
	if err != nil {
		return nil, err
	}
	return newLease(ack, asked)
}

// hold extends the lease for as long as a server lets it, and says why it ended.
func (c *dhcpClient) hold(ctx context.Context, l *lease) error {
	for {
		if l.expireAt.IsZero() {
			<-ctx.Done()
			return ctx.Err()
		}
		c.sleep(ctx, time.Until(l.renewAt))
		longer, err := c.extend(ctx, l)
		if err != nil {
			return err
		}
		if longer.address != l.address {
			c.log.Warn(fmt.Sprintf("DHCP server changed the address on %s from %s to %s", c.link, l.address, longer.address))
		}
		l = longer
		c.prefer = l.address.Addr()
		c.report(l)
	}
}

// extend asks the server until T2, then any server until the lease expires.
func (c *dhcpClient) extend(ctx context.Context, l *lease) (*lease, error) {
	for ctx.Err() == nil {
		now := time.Now()
		if !now.Before(l.expireAt) {
			return nil, errors.New("it expired unanswered")
		}
		broadcast, end := false, l.rebindAt
		if !now.Before(l.rebindAt) {
			broadcast, end = true, l.expireAt
		}
		// Half of what is left, but not in a hurry; the last pause ends with the phase.
		pause := min(max(end.Sub(now)/2, extendMin), end.Sub(now))
		longer, err := c.askLonger(ctx, l, broadcast, min(pause, answerWait))
		if err == nil {
			return longer, nil
		}
		if errors.Is(err, errNak) {
			return nil, err
		}
		if broadcast {
			c.log.Warn(fmt.Sprintf("no DHCP server extends the lease of %s on %s, which ends in %s: %v",
				l.address.Addr(), c.link, time.Until(l.expireAt).Round(time.Second), err))
		}
		c.sleep(ctx, time.Until(now.Add(pause)))
	}
	return nil, ctx.Err()
}

func (c *dhcpClient) askLonger(ctx context.Context, l *lease, broadcast bool, wait time.Duration) (*lease, error) {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	asked := time.Now()
	// Without a server that has a name there is only broadcast.
	ack, err := c.x.extend(ctx, l, broadcast || l.server.IsUnspecified())
	if err != nil {
		return nil, err
	}
	return newLease(ack, asked)
}

// sleep ends early when the link is kicked or ctx ends.
func (c *dhcpClient) sleep(ctx context.Context, d time.Duration) {
	if d <= 0 {
		return
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-c.kick:
	case <-t.C:
	}
}

// jitter keeps machines that were switched on together from asking together.
func jitter(d time.Duration) time.Duration {
	return d + time.Duration((rand.Float64()-0.5)*0.2*float64(d))
}
