package main

import (
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/qemu"
)

// What took minutes to measure is printed, though what comes after it fails.
func TestMeasureAll(t *testing.T) {
	broken := errors.New("it broke")
	good := measure{"first", func() ([]figure, error) { return []figure{{what: "weight", value: "3 kg"}}, nil }}
	bad := measure{"second", func() ([]figure, error) { return nil, broken }}
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
		if err := bench(t.Context(), io.Discard, args.provisioner, args.clusters); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", args, err, want)
		}
	}
}
