package trustd

import (
	"net/netip"
	"sync"
	"time"
)

// rate is how often something may be done: burst times at once, and then once per
// every.
type rate struct {
	burst int
	every time.Duration
}

var (
	// perAddress: a node needs one certificate at its start. Without one it asks again every
	// five seconds (askAgain in services/kubernetes/secrets), which is within the rate.
	perAddress = rate{10, 5 * time.Second}
	// perSite is for all IPv6 addresses of a site: a LAN of nodes that start at once,
	// or one host with many addresses. Slow calls of a site (callTimeout at most) use
	// a quarter of maxConns at most, so that other sites get connections.
	perSite = rate{32, 500 * time.Millisecond}
)

const (
	// siteBits: a LAN, and what one host may have of addresses (RFC 4291 §2.5.1).
	siteBits = 64
	// maxBuckets bounds what is remembered: more addresses than a network has nodes
	// that come at the same time.
	maxBuckets = 1024
)

// limits is how often each address may ask, and each site.
type limits struct {
	mu      sync.Mutex // guards buckets
	buckets map[netip.Prefix]*bucket
}

// bucket is full when it isn't there.
type bucket struct {
	rate
	tokens int
	last   time.Time // when tokens was counted
	used   time.Time
}

// take reports whether addr may send a request now, or else after which time. A refused
// request of an address doesn't count for its site.
func (l *limits) take(addr netip.Addr, now time.Time) (wait time.Duration, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	own := l.bucket(netip.PrefixFrom(addr, addr.BitLen()), perAddress, now)
	if own.tokens == 0 {
		return own.wait(now), false
	}
	if addr.Is6() {
		site := l.bucket(netip.PrefixFrom(addr, siteBits).Masked(), perSite, now)
		if site.tokens == 0 {
			return site.wait(now), false
		}
		site.tokens--
	}
	own.tokens--
	return 0, true
}

// bucket is the one of a prefix, as it is now. The caller holds mu.
func (l *limits) bucket(of netip.Prefix, r rate, now time.Time) *bucket {
	b := l.buckets[of]
	if b == nil {
		b = l.add(of, r, now)
	}
	b.refill(now)
	b.used = now
	return b
}

func (b *bucket) wait(now time.Time) time.Duration {
	return max(b.last.Add(b.every).Sub(now), time.Second)
}

func (b *bucket) refill(now time.Time) {
	since := now.Sub(b.last)
	if since < 0 { // the clock was set
		b.last = now
		return
	}
	if more := int(min(since/b.every, time.Duration(b.burst))); more > 0 {
		b.tokens = min(b.tokens+more, b.burst)
		b.last = b.last.Add(since / b.every * b.every)
	}
}

// add makes a bucket, if need be in place of the one that was used longest ago. The
// caller holds mu.
func (l *limits) add(of netip.Prefix, r rate, now time.Time) *bucket {
	if len(l.buckets) >= maxBuckets {
		var oldest netip.Prefix
		for other, b := range l.buckets {
			if !oldest.IsValid() || b.used.Before(l.buckets[oldest].used) {
				oldest = other
			}
		}
		delete(l.buckets, oldest)
	}
	if l.buckets == nil {
		l.buckets = make(map[netip.Prefix]*bucket)
	}
	b := &bucket{rate: r, tokens: r.burst, last: now}
	l.buckets[of] = b
	return b
}
