package network

import (
	"math"
	"slices"
	"testing"
	"time"
)

func TestConditionsOutOfRange(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		n  Conditions
		ok bool
	}{
		{Conditions{}, true}, {Conditions{Loss: 1}, true}, {Conditions{Delay: MaxDelay, Jitter: MaxDelay}, true},
		{Conditions{Loss: 1.01}, false}, {Conditions{Loss: -0.1}, false}, {Conditions{Loss: math.NaN()}, false},
		{Conditions{Delay: -1}, false}, {Conditions{Jitter: -1}, false}, {Conditions{Delay: MaxDelay + 1}, false}, {Conditions{Jitter: time.Hour}, false},
	} {
		if err := tc.n.Check(); (err == nil) != tc.ok {
			t.Errorf("%+v: %v", tc.n, err)
		}
	}
}

// Which of two nodes receives frames of the other, for each kind of conditions of the first.
func TestDrops(t *testing.T) {
	t.Parallel()
	c := &LAN{config: Config{Cluster: "c"}}
	frame := func(from, to string) []byte {
		return slices.Concat(HardwareAddress("c", to), HardwareAddress("c", from), []byte{8, 0})
	}
	for _, n := range []struct {
		network      Conditions
		sends, hears bool
	}{
		{Conditions{}, true, true},
		{Conditions{Loss: 0.5}, true, true}, // package wire drops these
		{Conditions{Off: true}, false, false},
		{Conditions{CutFrom: []string{"other"}}, false, false},
		{Conditions{CutFrom: []string{"third"}}, true, true},
		{Conditions{DeafTo: []string{"other"}}, true, false},
		{Conditions{DeafTo: []string{"third"}}, true, true},
		{Conditions{CutFrom: []string{"third"}, DeafTo: []string{"other"}}, true, false},
	} {
		drops := c.drops(n.network)
		passes := func(from, to string) bool { return drops == nil || !drops(frame(from, to)) }
		if sends, hears := passes("self", "other"), passes("other", "self"); sends != n.sends || hears != n.hears {
			t.Errorf("%v: sends %v, hears %v", n.network, sends, hears)
		}
	}
}

func TestHardwareAddressIsStable(t *testing.T) {
	t.Parallel()
	if a, b := HardwareAddress("a", "n").String(), HardwareAddress("a", "n").String(); a != b || a == HardwareAddress("b", "n").String() {
		t.Errorf("MAC addresses %s, %s", a, b)
	}
	if m := HardwareAddress("a", "n"); m[0]&3 != 2 { // locally administered, not multicast
		t.Errorf("MAC address %s", m)
	}
}
