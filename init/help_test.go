package main

import "testing"

// What isn't the kernel's way to call this program does nothing.
func TestHelpRefusesWhatTheKernelDoesNotSay(t *testing.T) {
	for _, args := range [][]string{nil, {"-q"}, {"--", "xfs"}, {askPowerOff, "now"}, {"-q", "xfs", "--"}} {
		if help(args) == 0 {
			t.Errorf("%q was taken", args)
		}
	}
	// A module that no kernel has.
	if help([]string{"-q", "--", "garboard-no-such-module"}) == 0 {
		t.Error("loaded a module that isn't there")
	}
}
