package resolver

import (
	"encoding/binary"
	"fmt"
	"log/slog"
	"net"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// message is an answer with these records, and those of the authority.
func message(t testing.TB, code int, answers []string, authorities ...string) *dns.Msg {
	t.Helper()
	records := func(texts []string) (all []dns.RR) {
		for _, text := range texts {
			rr, err := dns.NewRR(text)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, rr)
		}
		return all
	}
	return &dns.Msg{MsgHdr: dns.MsgHdr{Response: true, Rcode: code}, Answer: records(answers), Ns: records(authorities)}
}

func TestHowLongAnswersLast(t *testing.T) {
	t.Parallel()
	const soa = "example. 600 IN SOA ns.example. root.example. 1 2 3 4 60"
	for name, tt := range map[string]struct {
		m    *dns.Msg
		want uint32
	}{
		"the shortest":        {message(t, 0, []string{"a.example. 60 IN CNAME b.example.", "b.example. 5 IN A 192.0.2.1"}), 5},
		"an hour at most":     {message(t, 0, []string{"a.example. 86400 IN A 192.0.2.1"}), 3600},
		"another kind":        {message(t, 0, []string{"a.example. 86400 IN HTTPS 1 . alpn=h2", "a.example. 7 IN CAA 0 issue ca.example"}), 7},
		"no such name":        {message(t, dns.RcodeNameError, nil, soa), 60},
		"no such record":      {message(t, 0, nil, soa), 60},
		"nothing without SOA": {message(t, dns.RcodeNameError, nil), 0},
		"an error":            {message(t, dns.RcodeServerFailure, nil, soa), 0},
	} {
		if got := lasts(tt.m); got != tt.want {
			t.Errorf("%s: %d, want %d", name, got, tt.want)
		}
	}
}

func TestCache(t *testing.T) {
	t.Parallel()
	c, now := cache{}, time.Now()
	q := question{name: "a.example.", kind: dns.TypeA}
	given := message(t, 0, []string{"a.example. 60 IN A 192.0.2.1"})
	c.put(q, given, now)
	for range 2 { // neither what was given nor what one got is what is kept
		given.Answer[0].Header().Ttl = 1
		if given = c.get(q, now.Add(50*time.Second)); given == nil || given.Answer[0].Header().Ttl != 10 {
			t.Fatalf("%v, want a TTL of 10 s", given)
		}
	}
	for name, q := range map[string]question{"another kind": {name: q.name, kind: dns.TypeAAAA}, "with DNSSEC": {q.name, q.kind, true}} {
		if m := c.get(q, now); m != nil {
			t.Errorf("%s: %v", name, m)
		}
	}
	if m := c.get(q, now.Add(time.Minute)); m != nil {
		t.Errorf("%v after its time", m)
	}
	for i := range 3 * maxEntries {
		q := question{name: fmt.Sprintf("a%d.example.", i), kind: dns.TypeA}
		c.put(q, message(t, 0, []string{q.name + " 60 IN A 192.0.2.1"}), now)
		if c.get(q, now) == nil {
			t.Fatalf("%s isn't kept", q.name)
		}
	}
	if len(c.entries) > maxEntries {
		t.Errorf("%d entries, more than %d", len(c.entries), maxEntries)
	}
}

// Whatever a pod sends, the answer is one to its question, and fits.
func FuzzAnswer(f *testing.F) {
	for _, m := range []*dns.Msg{new(dns.Msg).SetQuestion("node.", dns.TypeA), new(dns.Msg).SetQuestion("node.", dns.TypeAAAA).SetEdns0(4096, true), new(dns.Msg).SetAxfr("example."), {}} {
		packet, err := m.Pack()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(packet)
	}
	r := &resolver{ctx: f.Context(), log: slog.New(slog.DiscardHandler), known: facts{names: map[string][]dns.RR{"node.": {&dns.A{Hdr: dns.RR_Header{Name: "node.", Rrtype: dns.TypeA, Class: dns.ClassINET}, A: net.IPv4(10, 5, 0, 2)}}}}}
	f.Fuzz(func(t *testing.T, packet []byte) {
		out := r.reply(packet, dns.MinMsgSize)
		if out == nil {
			return
		}
		m := new(dns.Msg)
		if err := m.Unpack(out); err != nil || !m.Response || m.Id != binary.BigEndian.Uint16(packet) || len(out) > maxPacket {
			t.Errorf("%v, %d bytes: %v for %x", err, len(out), m, packet)
		}
	})
}
