package resolver

import (
	"fmt"
	"log/slog"
	"net"
	"testing"
	"time"

	"github.com/miekg/dns"
)

func record(t testing.TB, text string) dns.RR {
	t.Helper()
	rr, err := dns.NewRR(text)
	if err != nil {
		t.Fatal(err)
	}
	return rr
}

func TestHowLongAnswersLast(t *testing.T) {
	t.Parallel()
	soa := record(t, "example. 600 IN SOA ns.example. root.example. 1 2 3 4 60")
	for name, tt := range map[string]struct {
		m    *dns.Msg
		want uint32
	}{
		"the shortest":        {&dns.Msg{Answer: []dns.RR{record(t, "a.example. 60 IN CNAME b.example."), record(t, "b.example. 5 IN A 192.0.2.1")}}, 5},
		"an hour at most":     {&dns.Msg{Answer: []dns.RR{record(t, "a.example. 86400 IN A 192.0.2.1")}}, 3600},
		"no such name":        {&dns.Msg{MsgHdr: dns.MsgHdr{Rcode: dns.RcodeNameError}, Ns: []dns.RR{soa}}, 60},
		"no such record":      {&dns.Msg{Ns: []dns.RR{soa}}, 60},
		"nothing without SOA": {&dns.Msg{MsgHdr: dns.MsgHdr{Rcode: dns.RcodeNameError}}, 0},
		"an error":            {&dns.Msg{MsgHdr: dns.MsgHdr{Rcode: dns.RcodeServerFailure}, Ns: []dns.RR{soa}}, 0},
	} {
		if got := lasts(tt.m); got != tt.want {
			t.Errorf("%s: %d, want %d", name, got, tt.want)
		}
	}
}

func asks(name string, kind uint16) question {
	return question{Question: dns.Question{Name: name, Qtype: kind, Qclass: dns.ClassINET}}
}

func TestCache(t *testing.T) {
	t.Parallel()
	c, now := cache{}, time.Now()
	q := asks("a.example.", dns.TypeA)
	c.put(q, &dns.Msg{Answer: []dns.RR{record(t, "a.example. 60 IN A 192.0.2.1")}}, now)
	if m := c.get(q, now.Add(50*time.Second)); m == nil || m.Answer[0].Header().Ttl != 10 {
		t.Errorf("%v, want a TTL of 10 s", m)
	}
	for name, q := range map[string]question{"another kind": asks(q.Name, dns.TypeAAAA), "with DNSSEC": {Question: q.Question, secure: true}} {
		if m := c.get(q, now); m != nil {
			t.Errorf("%s: %v", name, m)
		}
	}
	if m := c.get(q, now.Add(time.Minute)); m != nil {
		t.Errorf("%v after its time", m)
	}
	for i := range 3 * maxEntries {
		name := fmt.Sprintf("a%d.example.", i)
		c.put(asks(name, dns.TypeA), &dns.Msg{Answer: []dns.RR{record(t, name+" 60 IN A 192.0.2.1")}}, now)
		if c.get(asks(name, dns.TypeA), now) == nil {
			t.Fatalf("%s isn't kept", name)
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
	r := &resolver{ctx: f.Context(), outside: func(net.Addr) bool { return false }, log: slog.New(slog.DiscardHandler), names: map[string][]dns.RR{"node.": {record(f, "node. 30 IN A 10.5.0.2")}}}
	f.Fuzz(func(t *testing.T, packet []byte) {
		q := new(dns.Msg)
		if (checked{resolver: r}).bad(packet, nil) || q.Unpack(packet) != nil || len(q.Question) != 1 { // the library answers those itself
			return
		}
		out, err := r.answer(q, true).Pack()
		if err != nil {
			return // a name that can't be written is dropped
		}
		m := new(dns.Msg)
		if err := m.Unpack(out); err != nil || !m.Response || m.Id != q.Id || len(out) > maxPacket {
			t.Errorf("%v, %d bytes: %v for %v", err, len(out), m, q)
		}
	})
}
