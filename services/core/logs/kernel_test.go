package logs

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestKernelRecords(t *testing.T) {
	for record, want := range map[string]*KernelRecord{
		"6,339,5140900,-;NET: Registered PF_INET\n SUBSYSTEM=net\n": {Level: 6, Sequence: 339, SinceBoot: 5140900 * time.Microsecond, Message: "NET: Registered PF_INET"},
		"30,340,5690716,-,caller=T1;[garboard] up":                  {Level: 6, Sequence: 340, SinceBoot: 5690716 * time.Microsecond, Message: "[garboard] up"},
		`3,1,0,-;a\x09b\x0ac\xfz \x`:                                {Level: 3, Sequence: 1, Message: "a\tb\nc\\xfz \\x"},
		"2,1,1,-;bad \xff":                                          {Level: 2, Sequence: 1, SinceBoot: time.Microsecond, Message: "bad \xff"},
		"":                                                          nil,
		"6,1,-;short":                                               nil,
		"x,1,2,-;none":                                              nil,
		"6,1,-2,-;none":                                             nil,
		"6,-,2,-;none":                                              nil,
	} {
		if diff := cmp.Diff(want, parseKernel([]byte(record))); diff != "" {
			t.Errorf("%q: %s", record, diff)
		}
	}
}
