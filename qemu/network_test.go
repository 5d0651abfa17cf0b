package qemu

import (
	"math"
	"slices"
	"testing"
	"time"
)

func TestNetworksThatCantBe(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		n  Network
		ok bool
	}{
		{Network{}, true}, {Network{Loss: 1}, true}, {Network{Delay: MaxDelay, Jitter: MaxDelay}, true},
		{Network{Loss: 1.01}, false}, {Network{Loss: -0.1}, false}, {Network{Loss: math.NaN()}, false},
		{Network{Delay: -1}, false}, {Network{Jitter: -1}, false}, {Network{Delay: MaxDelay + 1}, false}, {Network{Jitter: time.Hour}, false},
	} {
		if err := tc.n.check(); (err == nil) != tc.ok {
			t.Errorf("%+v: %v", tc.n, err)
		}
	}
}

// Who of two nodes hears the other, depending on how the network of the first is.
func TestDrops(t *testing.T) {
	t.Parallel()
	c := &lan{plan: Plan{Name: "c"}}
	frame := func(from, to string) []byte {
		return slices.Concat(hardwareAddress("c", to), hardwareAddress("c", from), []byte{8, 0})
	}
	for _, n := range []struct {
		network      Network
		sends, hears bool
	}{
		{Network{}, true, true},
		{Network{Loss: 0.5}, true, true}, // the wire's business
		{Network{Off: true}, false, false},
		{Network{CutFrom: []string{"other"}}, false, false},
		{Network{CutFrom: []string{"third"}}, true, true},
		{Network{DeafTo: []string{"other"}}, true, false},
		{Network{DeafTo: []string{"third"}}, true, true},
		{Network{CutFrom: []string{"third"}, DeafTo: []string{"other"}}, true, false},
	} {
		drops := c.drops(n.network)
		passes := func(from, to string) bool { return drops == nil || !drops(frame(from, to)) }
		if sends, hears := passes("self", "other"), passes("other", "self"); sends != n.sends || hears != n.hears {
			t.Errorf("%v: sends %v, hears %v", n.network, sends, hears)
		}
	}
}
