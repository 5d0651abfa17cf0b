package main

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/api/garboardv1"
	"github.com/google/go-cmp/cmp"
)

func TestInstallSteps(t *testing.T) {
	t.Parallel()
	const console = `[   21.044] [garboard] install-4kfz2mqa find: done
[   21.050] [garboard] install-4kfz2mqa verify: running
[   23.550] [garboard] install-4kfz2mqa verify: read: 50%
[   25.550] [garboard] install-4kfz2mqa verify: done
[   25.600] [garboard] install-4kfz2mqa write: running
[   28.100] [garboard] install-4kfz2mqa write: done
`
	want := []stepTime{{"verify", 4500 * time.Millisecond}, {"write", 2500 * time.Millisecond}}
	got, err := installSteps(console)
	for i := range got {
		got[i].took = got[i].took.Round(time.Millisecond)
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(stepTime{})); err != nil || diff != "" {
		t.Errorf("%v\n%s", err, diff)
	}
	for _, cut := range []string{"", strings.Split(console, "[   25.600]")[0]} {
		if got, err := installSteps(cut); err == nil {
			t.Errorf("%q has the steps %v", cut, got)
		}
	}
}

// A figure that compares an emulated machine with this computer says so.
func TestCopyFigure(t *testing.T) {
	t.Parallel()
	for accelerator, emulated := range map[string]bool{"tcg": true, "kvm": false} {
		got := copyFigure(3*time.Second, 500*time.Millisecond, accelerator)
		if got.value != "6.0 × 0.5 s" || strings.HasSuffix(got.what, "(the machine is emulated, and dd isn't)") != emulated || got.budget != "" {
			t.Errorf("%s: %+v", accelerator, got)
		}
	}
}

// What counts is the most memory of the boot that is measured, and not of the one after it.
func TestBootMemory(t *testing.T) {
	t.Parallel()
	var m bootMemory
	for _, s := range []struct {
		boot      string
		available uint64
		value     string
	}{
		{"a", 1500e6, "not measured"}, {"a", 900e6, "not measured"}, {"", 1, "not measured"}, {"a", 1200e6, "not measured"}, {"b", 100e6, "1100.0 MB"},
	} {
		m.add(&garboardv1.NodeStatusResponse{BootId: s.boot, MemoryTotal: 2000e6, MemoryAvailable: s.available})
		if got := m.figure("memory", 0); !strings.HasPrefix(got.value, s.value) || got.over {
			t.Errorf("after %+v: %+v", s, got)
		}
	}
	if got := m.figure("memory", 1e9); got.value != "1100.0 MB" || got.budget != "≤ 1000.0 MB" || !got.over {
		t.Errorf("%+v", got)
	}
}

// A cluster that isn't there yet is no error, and what is measured ends the samples.
func TestWhileWatched(t *testing.T) {
	t.Setenv("GARBOARD_HOME", t.TempDir())
	broken := errors.New("it broke")
	if m, err := whileWatched(t.Context(), "nowhere", func() error { return broken }); !errors.Is(err, broken) || len(m) != 0 {
		t.Errorf("%v, %v", m, err)
	}
}
