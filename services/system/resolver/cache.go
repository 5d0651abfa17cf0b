package resolver

import (
	"slices"
	"sync"
	"time"

	"golang.org/x/net/dns/dnsmessage"
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
	kind   dnsmessage.Type
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

func (c *cache) get(q question, now time.Time) *dnsmessage.Message {
	c.mu.Lock()
	e := c.entries[q]
	c.mu.Unlock()
	age := uint32(now.Sub(e.from) / time.Second)
	m := new(dnsmessage.Message)
	if age >= e.ttl || m.Unpack(e.packet) != nil {
		return nil
	}
	for _, section := range [][]dnsmessage.Resource{m.Answers, m.Authorities, m.Additionals} {
		for i := range section {
			section[i].Header.TTL -= age
		}
	}
	return m
}

// put keeps an answer. If there are too many, it begins anew.
func (c *cache) put(q question, m *dnsmessage.Message, now time.Time) {
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
func lasts(m *dnsmessage.Message) uint32 {
	ttl, sure := uint32(maxTTL), len(m.Answers) > 0 && m.RCode == dnsmessage.RCodeSuccess
	for _, r := range slices.Concat(m.Answers, m.Authorities, m.Additionals) {
		ttl = min(ttl, r.Header.TTL)
		if soa, is := r.Body.(*dnsmessage.SOAResource); is {
			ttl, sure = min(ttl, soa.MinTTL), true
		}
	}
	if !sure || m.RCode != dnsmessage.RCodeSuccess && m.RCode != dnsmessage.RCodeNameError {
		return 0
	}
	return ttl
}
