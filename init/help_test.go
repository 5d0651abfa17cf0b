package main

import "testing"

// Arguments that the kernel doesn't use have no effect.
func TestHelpRefusesWhatTheKernelDoesNotSay(t *testing.T) {
	for _, args := range [][]string{nil, {"-q"}, {"--", "xfs"}, {askPowerOff, "now"}, {"-q", "xfs", "--"}} {
		if help(args) == 0 {
			t.Errorf("%q was taken", args)
		}
	}
	// No kernel has a module of this name.
	if help([]string{"-q", "--", "garboard-no-such-module"}) == 0 {
		t.Error("loaded a module that isn't there")
	}
}
