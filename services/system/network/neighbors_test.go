package network

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// tlv is one of IEEE 802.1AB.
func tlv(kind byte, value string) string {
	return string([]byte{kind<<1 | byte(len(value)>>8), byte(len(value))}) + value
}

const mac = "\x02\x05\x00\x00\x00\x09"

// three are those that each frame has, with a time of 120 s.
var three = tlv(1, "\x04"+mac) + tlv(2, "\x05swp7") + tlv(3, "\x00\x78")

func TestParseLLDP(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 300)
	for name, tt := range map[string]struct {
		frame string
		want  LinkNeighbor
	}{
		"three":   {three, LinkNeighbor{Chassis: "02:05:00:00:00:09", Port: "swp7"}},
		"its end": {three + tlv(0, "") + tlv(5, "after"), LinkNeighbor{Chassis: "02:05:00:00:00:09", Port: "swp7"}},
		"all": {
			three + tlv(4, "uplink of rack 7") + tlv(5, "sw-1.example.org") + tlv(6, "ignored") + tlv(127, "\x00\x80\xc2\x01\x0f\xa0") + tlv(127, "\x00\x12\x0f\x01") + tlv(0, ""),
			LinkNeighbor{Chassis: "02:05:00:00:00:09", Port: "swp7", System: "sw-1.example.org", VLAN: 4000},
		},
		"a port's MAC":            {tlv(1, "\x07one") + tlv(2, "\x03"+mac) + tlv(3, "\x00\x78"), LinkNeighbor{Chassis: "one", Port: "02:05:00:00:00:09"}},
		"text for a terminal":     {three + tlv(5, "a\x1b[2J\n\"\xff"), LinkNeighbor{Chassis: "02:05:00:00:00:09", Port: "swp7", System: `a\x1b[2J\n\"\xff`}},
		"a text that is too long": {three + tlv(5, long), LinkNeighbor{Chassis: "02:05:00:00:00:09", Port: "swp7", System: long[:maxText]}},
	} {
		n, ttl, ok := parseLLDP([]byte(tt.frame))
		if diff := cmp.Diff(tt.want, n); diff != "" || !ok || ttl != 120*time.Second {
			t.Errorf("%s: %s, %t: -want +got:\n%s", name, ttl, ok, diff)
		}
	}
	for name, frame := range map[string]string{
		"nothing":            "",
		"its end only":       tlv(0, ""),
		"no time":            tlv(1, "\x04"+mac) + tlv(2, "\x05swp7"),
		"a short time":       tlv(1, "\x04"+mac) + tlv(2, "\x05swp7") + tlv(3, "\x78"),
		"another order":      tlv(2, "\x05swp7") + tlv(1, "\x04"+mac) + tlv(3, "\x00\x78"),
		"two of the first":   three + tlv(1, "\x07two"),
		"no name":            tlv(1, "\x07") + tlv(2, "\x05swp7") + tlv(3, "\x00\x78"),
		"more than there is": three + "\x0a\x07short",
	} {
		if n, _, ok := parseLLDP([]byte(frame)); ok {
			t.Errorf("%s is taken: %+v", name, n)
		}
	}
}

// What a neighbour sends is printable, and has a bound.
func FuzzParseLLDP(f *testing.F) {
	f.Add([]byte(three))
	f.Add([]byte(three + tlv(4, "port") + tlv(5, "\x1b") + tlv(127, "\x00\x80\xc2\x01\x0f\xa0") + tlv(0, "")))
	f.Fuzz(func(t *testing.T, frame []byte) {
		n, ttl, ok := parseLLDP(frame)
		if ok && (n.Chassis == "" || n.Port == "") || ttl < 0 || ttl > 0xffff*time.Second {
			t.Errorf("taken: %+v for %s", n, ttl)
		}
		for _, text := range []string{n.Chassis, n.Port, n.System} {
			if len(text) > 10*maxText || strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r > '~' }) {
				t.Errorf("text %q", text)
			}
		}
	})
}

// A link has a few neighbours at most, only cards have any, and a time of 0 is a neighbour's farewell.
func TestNeighborsHaveABound(t *testing.T) {
	t.Parallel()
	l := owner{switches: map[int]map[string]LinkNeighbor{1: {}}}
	now := time.Now()
	frame := func(i int, ttl string) []byte {
		return []byte(tlv(1, fmt.Sprintf("\x07chassis%d", i)) + tlv(2, "\x05swp7") + tlv(3, ttl))
	}
	for i := range 2 * maxSwitches {
		l.told(1, frame(i, "\x00\x78"), now)
		l.told(2, frame(i, "\x00\x78"), now)
	}
	if len(l.switches[1]) != maxSwitches || len(l.switches) != 1 {
		t.Errorf("there are %d neighbours of %d links", len(l.switches[1]), len(l.switches))
	}
	l.told(1, frame(0, "\x00\x00"), now)
	l.told(1, frame(2*maxSwitches, "\x00\x78"), now)
	if n := l.switches[1]; len(n) != maxSwitches || n["chassis0"].Port != "" || n[fmt.Sprintf("chassis%d", 2*maxSwitches)].Expires != now.Add(120*time.Second) {
		t.Errorf("after a farewell and another neighbour: %+v", n)
	}
}
