package dag

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"strings"
	"time"
)

// Chart is a diagram of a boot: when each service waited, prepared, started and
// ran until it was up for the first time, and which chain of services
// determined the duration. All times are since the kernel's start.
type Chart struct {
	From time.Duration // the first event
	To   time.Duration // when the last service was up, or the last event if one never was
	Rows []Row         // by the time at which they were up, those that never were last
	// Critical is the chain that determined the duration of the boot, first to
	// last: the service that was up last, before it the last of its needs, and so
	// on.
	Critical []string
}

// Row is one service of a chart.
type Row struct {
	ID       string
	Spans    []Span
	Up       time.Duration // 0 if it never was up
	Critical bool
	State    State // at Up, or at the end
	after    []string
}

// Span is a time spent in one state, before the service was up.
type Span struct {
	State    State
	From, To time.Duration
}

// In is the time spent in a state before the service was up.
func (r Row) In(state State) time.Duration {
	var sum time.Duration
	for _, s := range r.Spans {
		if s.State == state {
			sum += s.Took()
		}
	}
	return sum
}

// Took is its length.
func (s Span) Took() time.Duration { return s.To - s.From }

// bar is how a state is drawn. The marks of the text are ASCII, for serial consoles.
type bar struct {
	State  State
	Colour string
	mark   byte
	Label  string
}

var bars = []bar{
	{Waiting, "#d9dee5", '.', "waiting"},
	{Preparing, "#f2b84b", '-', "preparing"},
	{Starting, "#6aa5dd", '=', "starting"},
	{Running, "#3569a8", '#', "running, not healthy yet"},
	{Failed, "#c8443c", 'x', "failed"},
}

// NewChart draws the boot from its events, oldest first (Graph.BootEvents).
func NewChart(events []Event) Chart {
	var c Chart
	rows := make(map[string]*Row)
	var end time.Duration
	if len(events) > 0 {
		c.From, end = events[0].SinceBoot, events[len(events)-1].SinceBoot
	}
	for _, e := range events {
		row := rows[e.Service]
		if row == nil {
			row = &Row{ID: e.Service}
			rows[e.Service] = row
		}
		row.take(e)
	}
	allUp := true
	for _, row := range rows {
		if row.Up == 0 {
			allUp = false
			row.close(end)
		}
		c.To = max(c.To, row.Up)
	}
	if !allUp {
		c.To = end
	}
	c.Critical = criticalPath(rows)
	for _, row := range rows {
		c.Rows = append(c.Rows, *row)
	}
	upOrNever := func(r Row) time.Duration { return cmp.Or(r.Up, math.MaxInt64) }
	slices.SortFunc(c.Rows, func(a, b Row) int {
		return cmp.Or(cmp.Compare(upOrNever(a), upOrNever(b)), strings.Compare(a.ID, b.ID))
	})
	return c
}

// take processes one event. Events after the first time up don't belong to the
// boot.
func (r *Row) take(e Event) {
	if r.Up != 0 {
		return
	}
	r.close(e.SinceBoot)
	r.State = e.State
	if e.After != nil {
		r.after = e.After
	}
	if e.Up {
		r.Up = max(e.SinceBoot, 1)
		return
	}
	if n := len(r.Spans); n == 0 || r.Spans[n-1].State != e.State {
		r.Spans = append(r.Spans, Span{State: e.State, From: e.SinceBoot, To: e.SinceBoot})
	}
}

func (r *Row) close(at time.Duration) {
	if n := len(r.Spans); n > 0 {
		r.Spans[n-1].To = at
	}
}

// criticalPath goes back from the service that was up last. The graph has no
// cycles, but events of several graphs might, so each service is used once.
func criticalPath(rows map[string]*Row) []string {
	last := func(ids []string) *Row {
		var found *Row
		for _, id := range ids {
			row := rows[id]
			if row == nil || row.Up == 0 || row.Critical {
				continue
			}
			if found == nil || row.Up > found.Up || row.Up == found.Up && row.ID < found.ID {
				found = row
			}
		}
		return found
	}
	var path []string
	for row := last(slices.Collect(maps.Keys(rows))); row != nil; row = last(row.after) {
		row.Critical = true
		path = append(path, row.ID)
	}
	slices.Reverse(path)
	return path
}
