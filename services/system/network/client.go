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
	"github.com/garboard-os/garboard/services/core/sleep"
)

const (
	// Pauses between attempts to get an address double from the first to the
	// last, give or take a tenth, as RFC 2131 §4.1 asks. It begins with 4 s; a
	// link that has just come up often drops the first frames, so begin sooner.
	askFirst = time.Second
	askMax   = 64 * time.Second
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

var (
	// errNoAnswer is silence.
	errNoAnswer = errors.New("no answer")
	// errRefused is the server's refusal: the lease is over, or never was.
	errRefused = errors.New("the server refused")
	// errKicked: the link came back while we waited for an answer that was lost.
	errKicked = errors.New("link came back")
)

// client keeps the lease of one link from one source, as RFC 2131 §4.4, figure 5, has it
// for DHCP:
//
//	                                 T1                 T2
//	acquire ──────────▶ bound ──────────────▶ renewing ────▶ rebinding
//	   ▲                  ▲    its server       │       any server │
//	   │                  └─────────────────────┴──────────────────┤
//	   └──────────────────── refusal, expiry ◀─────────────────────┘
type client struct {
	source string // its name
	link   string
	protocol
	log *slog.Logger
	// report hears of each new or extended lease, and nil when it is lost.
	report func(*lease)
	// kick says that the link is back: what was to be asked later is asked now.
	kick <-chan struct{}
	// prefer is the address to ask for first, where one is known.
	prefer netip.Addr
}

// run keeps a lease until ctx ends. Strangers write what it reads: a message that
// makes it panic must not end the machine.
func (c *client) run(ctx context.Context) {
	for ctx.Err() == nil {
		if err := dag.Guard(c.log, func() error { c.keep(ctx); return nil }); err != nil {
			c.report(nil)
			sleep.Until(ctx, c.kick, askMax)
		}
	}
}

func (c *client) keep(ctx context.Context) {
	for {
		l := c.obtain(ctx)
		if l == nil {
			return
		}
		c.have(l)
		l, err := c.hold(ctx, l)
		if ctx.Err() != nil {
			return
		}
		c.log.Warn(fmt.Sprintf("lost the %s lease of %s on %s: %v; asking for a new one", c.source, l, c.link, err))
		c.report(nil)
	}
}

func (c *client) have(l *lease) {
	if len(l.addresses) > 0 {
		c.prefer = l.addresses[0].Addr()
	}
	c.report(l)
}

// obtain asks until there is a lease; nil when ctx has ended.
func (c *client) obtain(ctx context.Context) *lease {
	since, warned := time.Now(), time.Time{}
	for pause := askFirst; ctx.Err() == nil; pause = min(pause*2, askMax) {
		wait := jitter(pause)
		next := time.Now().Add(wait)
		l, err := c.ask(ctx, min(wait, answerWait))
		if errors.Is(err, errKicked) {
			pause = askFirst / 2 // doubled by the loop
			continue
		}
		if err == nil {
			c.log.Info(fmt.Sprintf("%s lease on %s: %s from %s", c.source, c.link, l, l.server))
			return l
		}
		now := time.Now()
		if ctx.Err() == nil && now.Sub(since) >= warnAfter && (warned.IsZero() || now.Sub(warned) >= remindEvery) {
			warned = now
			c.log.Warn(noAnswer(c.source, c.link, now.Sub(since), err))
		}
		sleep.Until(ctx, c.kick, time.Until(next))
	}
	return nil
}

// noAnswer is the line at the console: what is missing, since when, what
// follows, and what ends it.
func noAnswer(source, link string, since time.Duration, err error) string {
	what := fmt.Sprintf("no %s answer on %s", source, link)
	if !errors.Is(err, errNoAnswer) {
		what = fmt.Sprintf("no %s lease on %s: %v", source, link, err)
	}
	return fmt.Sprintf("%s for %s; asking again at least every %s. A %s server on that network ends this, "+
		"or a static address (cidr) for %s in machine.network.interfaces", what, since.Round(time.Second), askMax, source, link)
}

// ask tries once, and gives up early when the link comes back.
func (c *client) ask(ctx context.Context, wait time.Duration) (*lease, error) {
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
	l, err := c.acquire(ctx, c.prefer)
	if cause := context.Cause(ctx); err != nil && errors.Is(cause, errKicked) {
		return nil, cause
	}
	return l, err
}

// hold extends the lease for as long as a server lets it, and says which one ended, and why.
func (c *client) hold(ctx context.Context, l *lease) (*lease, error) {
	for {
		if l.expireAt.IsZero() {
			<-ctx.Done()
			return l, ctx.Err()
		}
		sleep.Until(ctx, c.kick, time.Until(l.renewAt))
		longer, err := c.prolong(ctx, l)
		if err != nil {
			return l, err
		}
		if longer.String() != l.String() {
			c.log.Warn(fmt.Sprintf("%s server changed the address on %s from %s to %s", c.source, c.link, l, longer))
		}
		l = longer
		c.have(l)
	}
}

// prolong asks the server until T2, then any server until the lease expires.
func (c *client) prolong(ctx context.Context, l *lease) (*lease, error) {
	for ctx.Err() == nil {
		now := time.Now()
		if !now.Before(l.expireAt) {
			return nil, errors.New("it expired unanswered")
		}
		rebind, end := false, l.rebindAt
		if !now.Before(l.rebindAt) {
			rebind, end = true, l.expireAt
		}
		// Half of what is left, but not in a hurry; the last pause ends with the phase.
		pause := min(max(end.Sub(now)/2, extendMin), end.Sub(now))
		once, cancel := context.WithTimeout(ctx, min(pause, answerWait))
		longer, err := c.extend(once, l, rebind)
		cancel()
		if err == nil || errors.Is(err, errRefused) {
			return longer, err
		}
		if rebind {
			c.log.Warn(fmt.Sprintf("no %s server extends the lease of %s on %s, which ends in %s: %v",
				c.source, l, c.link, time.Until(l.expireAt).Round(time.Second), err))
		}
		sleep.Until(ctx, c.kick, time.Until(now.Add(pause)))
	}
	return nil, ctx.Err()
}

// jitter keeps machines that were switched on together from asking together.
func jitter(d time.Duration) time.Duration {
	return d + time.Duration((rand.Float64()-0.5)*0.2*float64(d))
}
