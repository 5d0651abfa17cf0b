package trustd

import (
	"net/netip"
	"sync"
	"time"
)

const (
	// burst is how often an address may ask at once, and then once per every. A node
	// needs one certificate at its start, and tries again while something is wrong,
	// with pauses that grow to half a minute.
	burst = 10
	every = 5 * time.Second
	// maxBuckets bounds the addresses that are remembered: more than a network has
	// nodes that come at the same time.
	maxBuckets = 1024
	// siteBits is what one owner has of IPv6 addresses (RFC 6177 §2): asking from
	// each of them in turn doesn't help.
	siteBits = 64
)

// limits is how often each address may ask.
type limits struct {
	mu      sync.Mutex // guards buckets
	buckets map[netip.Prefix]*bucket
}

// bucket is full when it isn't there.
type bucket struct {
	tokens int
	last   time.Time // when tokens was counted
	used   time.Time
}

// take says whether addr may ask now, and if not, after which time it may.
func (l *limits) take(addr netip.Addr, now time.Time) (wait time.Duration, ok bool) {
	bits := addr.BitLen()
	if addr.Is6() {
		bits = siteBits
	}
	site, err := addr.Prefix(bits)
	if err != nil {
		return every, false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	b := l.buckets[site]
	if b == nil {
		b = l.add(site, now)
	}
	b.refill(now)
	b.used = now
	if b.tokens == 0 {
		return max(b.last.Add(every).Sub(now), time.Second), false
	}
	b.tokens--
	return 0, true
}

func (b *bucket) refill(now time.Time) {
	since := now.Sub(b.last)
	if since < 0 { // the clock was set
		b.last = now
		return
	}
	if more := int(min(since/every, burst)); more > 0 {
		b.tokens = min(b.tokens+more, burst)
		b.last = b.last.Add(since / every * every)
	}
}

// add makes a bucket, if need be in place of the one that was used longest ago. The
// caller holds mu.
func (l *limits) add(site netip.Prefix, now time.Time) *bucket {
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
	b := &bucket{tokens: burst, last: now}
	l.buckets[site] = b
	return b
}
