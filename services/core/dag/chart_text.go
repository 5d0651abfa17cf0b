package dag

import (
	"bufio"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/garboard-os/garboard/services/core/lists"
)

// barWidth is the bars' width in characters: with the other columns a chart
// fits a terminal of 132.
const barWidth = 60

// Text writes the chart as a table with bars.
func (c Chart) Text(w io.Writer) error {
	out := bufio.NewWriter(w)
	width := c.width()
	fmt.Fprintf(out, "  %-*s %9s %9s %9s %9s %9s  %s\n", width, "SERVICE", "UP AT", "WAITING", "PREPARING", "STARTING", "RUNNING",
		fmt.Sprintf("%-*s%s", barWidth-len(seconds(c.To)), seconds(c.From), seconds(c.To)))
	for _, row := range c.Rows {
		mark, up := " ", string(row.State)
		if row.Critical {
			mark = "*"
		}
		if row.Up != 0 {
			up = seconds(row.Up)
		}
		fmt.Fprintf(out, "%s %-*s %9s", mark, width, row.ID, up)
		for _, state := range []State{Waiting, Preparing, Starting, Running} {
			fmt.Fprintf(out, " %9s", seconds(row.In(state)))
		}
		fmt.Fprintf(out, "  %s\n", strings.TrimRight(c.bar(row), " "))
	}
	legend := lists.Of(bars, func(b bar) string { return fmt.Sprintf("%c %s", b.mark, b.Label) })
	fmt.Fprintf(out, "%s, | up; times since the kernel's start\n", strings.Join(legend, ", "))
	if len(c.Critical) > 0 {
		fmt.Fprintf(out, "* critical path: %s\n", strings.Join(c.Critical, " > "))
	}
	return out.Flush()
}

// width is that of the longest ID, or of the heading of that column, in characters.
func (c Chart) width() int {
	width := len("SERVICE")
	for _, row := range c.Rows {
		width = max(width, utf8.RuneCountInString(row.ID))
	}
	return width
}

func (c Chart) bar(row Row) string {
	bar := []byte(strings.Repeat(" ", barWidth))
	for _, span := range row.Spans {
		for _, m := range bars {
			if m.State == span.State {
				for x := c.column(span.From); x <= c.column(span.To); x++ {
					bar[x] = m.mark
				}
			}
		}
	}
	if row.Up != 0 {
		bar[c.column(row.Up)] = '|'
	}
	return string(bar)
}

// column is the position of a time in a bar.
func (c Chart) column(at time.Duration) int {
	if c.To <= c.From {
		return 0
	}
	x := int(int64(barWidth-1) * int64(at-c.From) / int64(c.To-c.From))
	return min(max(x, 0), barWidth-1)
}

// seconds prints a duration with milliseconds, so that the columns align.
func seconds(d time.Duration) string {
	return fmt.Sprintf("%.3fs", d.Seconds())
}
