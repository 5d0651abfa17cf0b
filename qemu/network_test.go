package qemu

import (
	"slices"
	"testing"
)

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
