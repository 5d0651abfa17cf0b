package bench

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
	"time"
)

// A figure is one row of the table that make bench prints.
type figure struct {
	what, value string
	budget      string // "" where the design names none
	over        bool
}

// of compares a value with its budget, if it has one.
func of[N cmp.Ordered](text func(N) string, what string, value N, budget ...N) figure {
	f := figure{what: what, value: text(value)}
	for _, most := range budget {
		f.budget, f.over = "≤ "+text(most), value > most
	}
	return f
}

func megabytes(n int64) string { return fmt.Sprintf("%.1f MB", float64(n)/1e6) }

func seconds(d time.Duration) string { return fmt.Sprintf("%.1f s", d.Seconds()) }

func milliseconds(d time.Duration) string { return fmt.Sprintf("%.1f ms", d.Seconds()*1000) }

func quantile(times []time.Duration, q float64) time.Duration {
	sorted := slices.Sorted(slices.Values(times))
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

// longest is the figure of something that was done some times.
func longest(what string, took []time.Duration, budget time.Duration) figure {
	f := of(seconds, what, slices.Max(took), budget)
	if len(took) > 1 {
		f.what += fmt.Sprintf(", longest of %d (median)", len(took))
		f.value += fmt.Sprintf(" (%s)", seconds(quantile(took, 0.5)))
	}
	return f
}

// table prints figures beside their budgets.
func table(out io.Writer, figures []figure) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "WHAT\tFIGURE\tBUDGET\t")
	for _, f := range figures {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", f.what, f.value, f.budget, map[bool]string{true: "over budget"}[f.over])
	}
	return w.Flush()
}

// memory has the most memory that was in use in each boot of a machine, in their order.
type memory []struct {
	boot string
	most int64
}

// add takes a sample: what isn't available to programs is in use.
func (m *memory) add(boot string, total, available uint64) {
	if boot == "" || total == 0 {
		return
	}
	used := int64(total - available)
	for i := range *m {
		if (*m)[i].boot == boot {
			(*m)[i].most = max((*m)[i].most, used)
			return
		}
	}
	*m = append(*m, struct {
		boot string
		most int64
	}{boot, used})
}

// figure has the most of the boot that was there at the beginning, and that has been left.
func (m memory) figure(what string, budget ...int64) figure {
	if len(m) < 2 {
		return figure{what: what, value: "not measured: the node didn't answer both before and after its restart"}
	}
	return of(megabytes, what, m[0].most, budget...)
}

func TestTable(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	if err := table(&out, []figure{
		of(seconds, "start", 4*time.Second, 3*time.Second), of(megabytes, "size", 1e6, 1e6), of(milliseconds, "answer", 1500*time.Microsecond),
		longest("create", []time.Duration{30 * time.Second, 90 * time.Second, 60 * time.Second}, time.Minute), longest("destroy", []time.Duration{time.Second}, time.Minute),
	}); err != nil {
		t.Fatal(err)
	}
	want := `WHAT                                FIGURE           BUDGET
start                               4.0 s            ≤ 3.0 s   over budget
size                                1.0 MB           ≤ 1.0 MB
answer                              1.5 ms
create, longest of 3 (median)       90.0 s (60.0 s)  ≤ 60.0 s  over budget
destroy                             1.0 s            ≤ 60.0 s
`
	for line := range strings.Lines(want) {
		if !slices.ContainsFunc(strings.Split(out.String(), "\n"), func(got string) bool { return slices.Equal(strings.Fields(got), strings.Fields(line)) }) {
			t.Errorf("no %q in\n%s", line, out.String())
		}
	}
}

// What counts is the most memory of the boot that is measured, and not of the one after it.
func TestMemory(t *testing.T) {
	t.Parallel()
	var m memory
	for _, s := range []struct {
		boot      string
		available uint64
		value     string
	}{
		{"a", 1500e6, "not measured"}, {"a", 900e6, "not measured"}, {"", 1, "not measured"}, {"a", 1200e6, "not measured"}, {"b", 100e6, "1100.0 MB"},
	} {
		m.add(s.boot, 2000e6, s.available)
		if got := m.figure("memory"); !strings.HasPrefix(got.value, s.value) || got.over {
			t.Errorf("after %+v: %+v", s, got)
		}
	}
	if got := m.figure("memory", 1e9); got.value != "1100.0 MB" || got.budget != "≤ 1000.0 MB" || !got.over {
		t.Errorf("%+v", got)
	}
}
