package main

import (
	"strings"
	"testing"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
)

// Who is asked is told of all that goes, and of nothing else.
func TestLoss(t *testing.T) {
	all := loss([]string{"n1"}, &apiv1.ResetRequest{})
	for _, label := range boot.WipeLabels {
		one := loss([]string{"n1", "n2"}, &apiv1.ResetRequest{SystemLabelsToWipe: []string{label}})
		if lostWith[label] == "" || !strings.Contains(all, lostWith[label]) || one != "Nodes n1, n2 lose, each, for good: "+lostWith[label]+"." {
			t.Errorf("%s: %q, alone %q", label, all, one)
		}
	}
	disks := loss([]string{"n1"}, &apiv1.ResetRequest{SystemLabelsToWipe: []string{boot.LabelState}, UserDisksToWipe: []string{"/dev/sdb", "/dev/sdc"}})
	if !strings.HasSuffix(disks, "; all that is on /dev/sdb, /dev/sdc.") {
		t.Errorf("with disks: %q", disks)
	}
}
