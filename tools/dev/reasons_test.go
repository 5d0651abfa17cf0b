package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestWhyAStoryFailedIsRepeated(t *testing.T) {
	t.Parallel()
	const before = `=== RUN   TestOther
    cluster.go:1: other
--- PASS: TestOther (0.10s)
=== RUN   TestReset
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
FAIL
`
	const repeated = `What TestReset said before these consoles:
    reset_test.go:88:     0.6s  power is on
    reset_test.go:99:    12.0s  it went on
What TestReset/part said before these consoles:
    reset_test.go:91: not within 1m0s: the pods are ready: 3 of 4 are
`
	short := strings.Replace(before, "the console of", "the log of", 1)
	for _, tc := range []struct{ name, in, want string }{
		{"hidden by consoles", before + after, before + repeated + after},
		{"with nothing in between", short + after, short + after},
		{"passed", strings.ReplaceAll(before+after, "FAIL", "PASS"), strings.ReplaceAll(before+after, "FAIL", "PASS")},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			var out strings.Builder
			r := &reasons{to: &out}
			for _, b := range []byte(tc.in) { // lines come in pieces
				if _, err := r.Write([]byte{b}); err != nil {
					t.Fatal(err)
				}
			}
			if diff := cmp.Diff(tc.want, out.String()); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
