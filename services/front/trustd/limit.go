package trustd

import (
	"net/netip"
	"sync"
	"time"

	limit "golang.org/x/time/rate"
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
	*limit.Limiter
	used time.Time
}

// take reports whether addr may send a request now, or else after which time. A refused
// request of an address doesn't count for its site.
func (l *limits) take(addr netip.Addr, now time.Time) (wait time.Duration, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	own := l.bucket(netip.PrefixFrom(addr, addr.BitLen()), perAddress, now)
	if wait = own.wait(now); wait > 0 {
		return wait, false
	}
	if addr.Is6() {
		site := l.bucket(netip.PrefixFrom(addr, siteBits).Masked(), perSite, now)
		if wait = site.wait(now); wait > 0 {
			return wait, false
		}
		site.AllowN(now, 1)
	}
	return 0, own.AllowN(now, 1)
}

// bucket is the one of a prefix, as it is now. The caller holds mu.
func (l *limits) bucket(of netip.Prefix, r rate, now time.Time) *bucket {
	b := l.buckets[of]
	if b == nil {
		b = l.add(of, r, now)
	}
	b.SetLimitAt(now, b.Limit()) // it counts from now on, also after the clock was set back
	b.used = now
	return b
}

// wait is how long a request has to wait for its turn: a second at least, or not at all.
func (b *bucket) wait(now time.Time) time.Duration {
	missing := 1 - b.TokensAt(now)
	if missing <= 0 {
		return 0
	}
	return max(time.Duration(missing/float64(b.Limit())*float64(time.Second)), time.Second)
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
	b := &bucket{Limiter: limit.NewLimiter(limit.Every(r.every), r.burst)}
	l.buckets[of] = b
	return b
}
