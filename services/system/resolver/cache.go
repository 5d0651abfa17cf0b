package resolver

import (
	"slices"
	"sync"
	"time"

	"github.com/miekg/dns"
)

const (
	// maxEntries of maxEntry bytes are 4 MiB.
	maxEntries, maxEntry = 1024, 4096
	// maxTTL is how long an answer is believed, in seconds: a wrong one doesn't stay for days.
	maxTTL = 3600
)

// question is what an answer depends on.
type question struct {
	name   string // in lower case
	kind   uint16
	secure bool // with the records of DNSSEC
}

// cache has the answers that are valid.
type cache struct {
	mu      sync.Mutex // guards entries
	entries map[question]entry
}

type entry struct {
	packet []byte // not a Message, which packing writes to
	from   time.Time
	ttl    uint32
}

func (c *cache) get(q question, now time.Time) *dns.Msg {
	c.mu.Lock()
	e := c.entries[q]
	c.mu.Unlock()
	age := uint32(now.Sub(e.from) / time.Second)
	m := new(dns.Msg)
	if age >= e.ttl || m.Unpack(e.packet) != nil {
		return nil
	}
	for _, rr := range slices.Concat(m.Answer, m.Ns, m.Extra) {
		rr.Header().Ttl -= age
	}
	return m
}

// put keeps an answer. If there are too many, it begins anew.
func (c *cache) put(q question, m *dns.Msg, now time.Time) {
	packet, err := m.Pack()
	ttl := lasts(m)
	if ttl == 0 || err != nil || len(packet) > maxEntry {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.entries == nil || len(c.entries) >= maxEntries {
		c.entries = map[question]entry{}
	}
	c.entries[q] = entry{packet, now, ttl}
}

// lasts is for how many seconds an answer is valid: that there is nothing, as the SOA record says (RFC 2308).
func lasts(m *dns.Msg) uint32 {
	ttl, sure := uint32(maxTTL), len(m.Answer) > 0 && m.Rcode == dns.RcodeSuccess
	for _, rr := range slices.Concat(m.Answer, m.Ns, m.Extra) {
		ttl = min(ttl, rr.Header().Ttl)
		if soa, is := rr.(*dns.SOA); is {
			ttl, sure = min(ttl, soa.Minttl), true
		}
	}
	if !sure || m.Rcode != dns.RcodeSuccess && m.Rcode != dns.RcodeNameError {
		return 0
	}
	return ttl
}
