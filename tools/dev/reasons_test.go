package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestReasonsBeforeConsolesAreRepeated(t *testing.T) {
	t.Parallel()
	const before = `=== RUN   TestReset
    reset_test.go:88:     0.6s  power is on
=== RUN   TestReset/part
    reset_test.go:91: not within 1m0s: the pods are ready: 3 of 4 are
        available
=== RUN   TestReset/well
    reset_test.go:94: 2 of 3
=== NAME  TestReset
    reset_test.go:99:    12.0s  it went on
    cluster.go:86: the console of reset-1 ends with:
        [    0.1] [garboard] udevd: up
`
	const after = `--- FAIL: TestReset (89.97s)
    --- FAIL: TestReset/part (1.00s)
    --- PASS: TestReset/well (1.00s)
`
	const repeated = `What TestReset printed before these consoles:
    reset_test.go:88:     0.6s  power is on
    reset_test.go:99:    12.0s  it went on
What TestReset/part printed before these consoles:
    reset_test.go:91: not within 1m0s: the pods are ready: 3 of 4 are
`
	short := strings.Replace(before, "the console of", "the log of", 1)
	for _, tc := range []struct{ name, in, want, reason string }{
		{"hidden by consoles", before + after, before + repeated + after, "reset_test.go:99:    12.0s  it went on"},
		{"with nothing in between", short + after, short + after, "cluster.go:86: the log of reset-1 ends with:"},
		{"passed", strings.ReplaceAll(before+after, "FAIL", "PASS"), strings.ReplaceAll(before+after, "FAIL", "PASS"), "reset_test.go:99:    12.0s  it went on"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			if diff := cmp.Diff(tc.want, withReasons(tc.in)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if got := reason(tc.in); got != tc.reason {
				t.Errorf("reason is %q, want %q", got, tc.reason)
			}
		})
	}
}
