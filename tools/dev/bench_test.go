package main

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/google/go-cmp/cmp"
)

// What took minutes to measure is printed, though what comes after it fails.
func TestMeasureAll(t *testing.T) {
	broken := errors.New("it broke")
	good := measure{"first", func() ([]figure, error) { return []figure{{what: "weight", value: "3 kg"}}, nil }}
	bad := measure{"second", func() ([]figure, error) { return []figure{{what: "height", value: "5 m"}}, broken }}
	for _, tc := range []struct {
		all  []measure
		want error
	}{{[]measure{good}, nil}, {[]measure{good, bad, good}, broken}} {
		var out strings.Builder
		err := measureAll(&out, tc.all)
		if !errors.Is(err, tc.want) || err != nil && !strings.HasPrefix(err.Error(), "second: ") {
			t.Errorf("%v, want %v", err, tc.want)
		}
		if strings.Count(out.String(), "3 kg") != 1 {
			t.Errorf("the figure isn't there, once:\n%s", out.String())
		}
		if strings.Contains(out.String(), "5 m") != (tc.want != nil) {
			t.Errorf("the figure of what failed later:\n%s", out.String())
		}
	}
}

// What is over its budget fails the bench, by name, after all has been printed.
func TestOverBudget(t *testing.T) {
	heavy := figure{what: "weight", value: "3 kg", budget: "≤ 2 kg", over: true}
	slow := figure{what: "start", value: "4 s", budget: "≤ 3 s", over: true}
	good := figure{what: "size", value: "1 m", budget: "≤ 1 m"}
	for _, tc := range []struct {
		figures []figure
		want    string
	}{
		{[]figure{good, {what: "height", value: "2 m"}}, ""},
		{[]figure{heavy, good, slow}, "over budget:\n  weight: 3 kg, ≤ 2 kg is allowed\n  start: 4 s, ≤ 3 s is allowed"},
	} {
		var out strings.Builder
		said := ""
		if err := measureAll(&out, []measure{{"all", func() ([]figure, error) { return tc.figures, nil }}}); err != nil {
			said = err.Error()
		}
		if said != tc.want {
			t.Errorf("it says %q, want %q", said, tc.want)
		}
		for _, f := range tc.figures {
			if !strings.Contains(out.String(), f.value) {
				t.Errorf("%s isn't printed:\n%s", f.what, out.String())
			}
		}
	}
}

// Clusters are made and removed as often as is asked for; only the first is weighed, and
// the longest counts.
func TestBenchClusterRepeats(t *testing.T) {
	var weighed []bool
	once := func(weigh bool) (create, destroy time.Duration, weights []figure, err error) {
		weighed = append(weighed, weigh)
		n := time.Duration(len(weighed))
		if weigh {
			weights = []figure{{what: "memory", value: "1 MB"}}
		}
		return n * 30 * time.Second, n * time.Second, weights, nil
	}
	figures, err := repeat(3, once)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]bool{true, false, false}, weighed); diff != "" {
		t.Error(diff)
	}
	var got []string
	for _, f := range figures {
		got = append(got, fmt.Sprintf("%s %v", f.value, f.over))
	}
	if diff := cmp.Diff([]string{"90.0 s (60.0 s) true", "3.0 s (2.0 s) false", "1 MB false"}, got); diff != "" {
		t.Error(diff)
	}
	broken := errors.New("it broke")
	if _, err := repeat(3, func(weigh bool) (time.Duration, time.Duration, []figure, error) {
		if !weigh {
			return 0, 0, nil, broken
		}
		return 0, 0, nil, nil
	}); !errors.Is(err, broken) || !strings.HasPrefix(err.Error(), "cluster 2 of 3: ") {
		t.Errorf("one that broke: %v", err)
	}
}

func TestBenchIsToldNonsense(t *testing.T) {
	for want, args := range map[string]struct {
		provisioner string
		clusters    int
	}{
		"--clusters 0: must be 1 or more": {qemu.Auto, 0},
		`--provisioner "docker": must be`: {"docker", 1},
	} {
		if err := bench(t.Context(), io.Discard, args.provisioner, "", args.clusters); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", args, err, want)
		}
	}
}
