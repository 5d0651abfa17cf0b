package dag

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// boot is a realistic boot.
func boot() []Event {
	ms := time.Millisecond
	var seq uint64
	e := func(at time.Duration, id string, state State, up bool, after ...string) Event {
		seq++
		return Event{Seq: seq, SinceBoot: at, Service: id, State: state, Up: up, After: after}
	}
	return []Event{
		e(5200*ms, "udevd", Preparing, false),
		e(5200*ms, "machined", Waiting, false, "udevd"),
		e(5210*ms, "udevd", Starting, false),
		e(5300*ms, "udevd", Running, true),
		e(5300*ms, "machined", Preparing, false, "udevd"),
		e(5310*ms, "machined", Starting, false),
		e(5310*ms, "disks", Waiting, false, "machined"),
		e(5310*ms, "networkd", Waiting, false, "machined"),
		e(5310*ms, "kubelet", Waiting, false, "containerd", "networkd"),
		e(5310*ms, "containerd", Waiting, false, "disks"),
		e(5900*ms, "machined", Running, true),
		e(5900*ms, "disks", Preparing, false, "machined"),
		e(5900*ms, "networkd", Preparing, false, "machined"),
		e(5910*ms, "disks", Starting, false),
		e(5910*ms, "networkd", Starting, false),
		e(6600*ms, "networkd", Failed, false),
		e(7100*ms, "networkd", Preparing, false, "machined"),
		e(7110*ms, "networkd", Starting, false),
		e(7400*ms, "disks", Running, true),
		e(7400*ms, "containerd", Preparing, false, "disks"),
		e(7500*ms, "containerd", Starting, false),
		e(7800*ms, "networkd", Running, true),
		e(8100*ms, "containerd", Running, false),
		e(9000*ms, "containerd", Running, true),
		e(9000*ms, "kubelet", Preparing, false, "containerd", "networkd"),
		e(11500*ms, "kubelet", Starting, false),
		e(11600*ms, "kubelet", Running, false),
		e(13200*ms, "kubelet", Running, true),
		e(60000*ms, "containerd", Failed, false),
	}
}

func TestChartFindsSpansAndTheCriticalPath(t *testing.T) {
	c := NewChart(boot())
	if c.From != 5200*time.Millisecond || c.To != 13200*time.Millisecond {
		t.Errorf("from %s to %s", c.From, c.To)
	}
	if diff := cmp.Diff([]string{"udevd", "machined", "disks", "containerd", "kubelet"}, c.Critical); diff != "" {
		t.Error(diff)
	}
	var order []string
	for _, row := range c.Rows {
		order = append(order, row.ID)
		if row.Critical != slices.Contains(c.Critical, row.ID) {
			t.Errorf("%s: critical is %v", row.ID, row.Critical)
		}
	}
	if diff := cmp.Diff([]string{"udevd", "machined", "disks", "networkd", "containerd", "kubelet"}, order); diff != "" {
		t.Error(diff)
	}
	kubelet := c.Rows[5]
	for state, want := range map[State]time.Duration{
		Waiting: 3690 * time.Millisecond, Preparing: 2500 * time.Millisecond, Starting: 100 * time.Millisecond, Running: 1600 * time.Millisecond,
	} {
		if got := kubelet.In(state); got != want {
			t.Errorf("kubelet %s for %s, want %s", state, got, want)
		}
	}
	if got := c.Rows[3].In(Failed); got != 500*time.Millisecond {
		t.Errorf("networkd failed for %s", got)
	}
}

const wantText = `  SERVICE        UP AT   WAITING PREPARING  STARTING   RUNNING  5.200s                                               13.200s
* udevd         5.300s    0.000s    0.010s    0.090s    0.000s  |
* machined      5.900s    0.100s    0.010s    0.590s    0.000s  =====|
* disks         7.400s    0.590s    0.010s    1.490s    0.000s  .....===========|
  networkd      7.800s    0.590s    0.020s    1.380s    0.000s  .....=====xxxx=====|
* containerd    9.000s    2.090s    0.100s    0.600s    0.900s  ................=====#######|
* kubelet      13.200s    3.690s    2.500s    0.100s    1.600s  ............................------------------=############|
. waiting, - preparing, = starting, # running, not healthy yet, x failed, | up; times since the kernel's start
* critical path: udevd > machined > disks > containerd > kubelet
`

func TestChartAsText(t *testing.T) {
	var out bytes.Buffer
	if err := NewChart(boot()).Text(&out); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(wantText, out.String()); diff != "" {
		t.Error(diff)
	}
}

// With GARBOARD_CHART=file.svg the drawing is kept, for a visual check.
func TestChartAsSVG(t *testing.T) {
	events := append(boot(), Event{Service: `sick & "<odd>"`, State: Waiting, SinceBoot: 61 * time.Second, After: []string{"kubelet"}})
	for name, events := range map[string][]Event{"boot": boot(), "not all up": events, "empty": nil, "one": events[:1]} {
		var out bytes.Buffer
		if err := NewChart(events).SVG(&out); err != nil {
			t.Fatal(err)
		}
		if file := os.Getenv("GARBOARD_CHART"); file != "" && name == "boot" {
			if err := os.WriteFile(file, out.Bytes(), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if name == "not all up" && !strings.Contains(out.String(), "sick &amp; ") {
			t.Error("the odd name is missing")
		}
		if strings.Contains(out.String(), "%!") {
			t.Errorf("%s: a value doesn't fit its place: %s", name, &out)
		}
		decoder := xml.NewDecoder(&out)
		for {
			if _, err := decoder.Token(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
	}
}

// For any events, the chart is drawn within its borders.
func TestChartTakesAnyEvents(t *testing.T) {
	ids := []string{"a", "b", "c"}
	states := []State{Waiting, Preparing, Starting, Running, Stopping, Finished, Failed, Skipped, "Odd"}
	rapid.Check(t, func(t *rapid.T) {
		var events []Event
		at := time.Duration(rapid.IntRange(0, 1000).Draw(t, "from"))
		for range rapid.IntRange(0, 30).Draw(t, "events") {
			at += time.Duration(rapid.Int64Range(0, int64(time.Second)).Draw(t, "step"))
			events = append(events, Event{
				Service: rapid.SampledFrom(ids).Draw(t, "id"), State: rapid.SampledFrom(states).Draw(t, "state"),
				Up: rapid.Bool().Draw(t, "up"), SinceBoot: at, After: rapid.SliceOfN(rapid.SampledFrom(ids), 0, 3).Draw(t, "after"),
			})
		}
		c := NewChart(events)
		if err := c.Text(io.Discard); err != nil {
			t.Fatal(err)
		}
		if err := c.SVG(io.Discard); err != nil {
			t.Fatal(err)
		}
		if len(c.Critical) > len(ids) {
			t.Fatalf("critical path %v", c.Critical)
		}
		for _, row := range c.Rows {
			for i, s := range row.Spans {
				if s.To < s.From || s.From < c.From || s.To > c.To || i > 0 && s.From < row.Spans[i-1].To {
					t.Fatalf("spans %v in %s–%s", row.Spans, c.From, c.To)
				}
			}
		}
	})
}
