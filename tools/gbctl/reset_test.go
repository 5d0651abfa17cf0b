package main

import (
	"strings"
	"testing"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
)

// Who is asked is told of all that goes, and of nothing else.
func TestLoss(t *testing.T) {
	all := resetQuestion([]string{"n1"}, &apiv1.ResetRequest{})
	for _, label := range boot.WipeLabels {
		one := resetQuestion([]string{"n1", "n2"}, &apiv1.ResetRequest{SystemLabelsToWipe: []string{label}})
		if wipedData[label] == "" || !strings.Contains(all, wipedData[label]) || one != "Nodes n1, n2 lose, each, for good: "+wipedData[label]+"." {
			t.Errorf("%s: %q, alone %q", label, all, one)
		}
	}
	disks := resetQuestion([]string{"n1"}, &apiv1.ResetRequest{SystemLabelsToWipe: []string{boot.LabelState}, UserDisksToWipe: []string{"/dev/sdb", "/dev/sdc"}})
	if !strings.HasSuffix(disks, "; all data on /dev/sdb, /dev/sdc.") {
		t.Errorf("with disks: %q", disks)
	}
}
