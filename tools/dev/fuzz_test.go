package main

import "testing"

func TestOnlyTimeIsUp(t *testing.T) {
	t.Parallel()
	const progress = "fuzz: elapsed: 4s, execs: 33 (0/sec), new interesting: 0 (total: 25)\n"
	for name, test := range map[string]struct {
		said string
		want bool
	}{
		"the end of its time":   {progress + "--- FAIL: FuzzX (4.20s)\n    context deadline exceeded\nFAIL\nexit status 1\nFAIL\tx\t4.2s\n", true},
		"an input":              {progress + "--- FAIL: FuzzX (4.20s)\n    --- FAIL: FuzzX (0.00s)\n        x_test.go:1: context deadline exceeded\n    \n    Failing input written to testdata/fuzz/FuzzX/1\nFAIL\n", false},
		"an input, and the end": {progress + "--- FAIL: FuzzX (4.20s)\n    context deadline exceeded\n    Failing input written to testdata/fuzz/FuzzX/1\nFAIL\n", false},
		"a hang":                {progress + "--- FAIL: FuzzX (4.20s)\n    fuzzing process hung or terminated unexpectedly while minimizing: exit status 2\nFAIL\n", false},
		"a seed":                {"--- FAIL: FuzzX (0.00s)\n    --- FAIL: FuzzX/seed#0 (0.00s)\n        context deadline exceeded\nFAIL\n", false},
		"something else":        {"# x\nx_test.go:1: undefined: y\nFAIL\tx [build failed]\n", false},
	} {
		if got := onlyTimeIsUp(test.said); got != test.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}
