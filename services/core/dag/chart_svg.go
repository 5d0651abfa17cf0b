package dag

import (
	"bufio"
	"encoding/xml"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"
)

// Sizes of the drawing, in pixels.
const (
	svgRow    = 22  // a service
	svgBar    = 14  // its bar
	svgTop    = 74  // title, legend and axis above the rows
	svgFoot   = 38  // critical path below them
	svgPlot   = 820 // the time axis
	svgGlyph  = 7.3 // a character of the 12 px monospace font
	svgMargin = 16
	svgUpText = 64 // room for the time behind the last bar
	svgTicks  = 8  // about so many lines on the axis
)

const svgStyle = `text{font:12px ui-monospace,"DejaVu Sans Mono",Menlo,monospace;fill:#24303c}` +
	`.title{font-weight:bold;font-size:14px}.axis{fill:#66727f;font-size:11px}.grid{stroke:#e6eaee}` +
	`.critical{font-weight:bold;fill:#a8321f}.up{stroke:#1c7a3f;stroke-width:3}.path{fill:none;stroke:#a8321f;stroke-width:1.5;stroke-dasharray:4 3}`

// SVG writes the chart as a self-contained drawing.
func (c Chart) SVG(w io.Writer) error {
	out := bufio.NewWriter(w)
	label := len("SERVICE")
	for _, row := range c.Rows {
		label = max(label, utf8.RuneCountInString(row.ID))
	}
	s := sketch{Chart: c, out: out, left: svgMargin + float64(label)*svgGlyph + svgMargin}
	width := s.left + svgPlot + svgUpText + svgMargin
	height := svgTop + len(c.Rows)*svgRow + svgFoot
	fmt.Fprintf(out, `<svg xmlns="http://www.w3.org/2000/svg" width="%.0f" height="%d" viewBox="0 0 %.0f %d">`+"\n", width, height, width, height)
	fmt.Fprintf(out, "<style>%s</style>\n<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n", svgStyle)
	s.text(svgMargin, 24, "title", c.title())
	s.legend()
	s.axis()
	for i, row := range c.Rows {
		s.row(i, row)
	}
	s.path()
	if len(c.Critical) > 0 {
		s.text(svgMargin, float64(height-14), "critical", "critical path: "+strings.Join(c.Critical, " → "))
	}
	fmt.Fprintln(out, "</svg>")
	return out.Flush()
}

func (c Chart) title() string {
	up := 0
	for _, row := range c.Rows {
		if row.Up != 0 {
			up++
		}
	}
	if up == len(c.Rows) {
		return fmt.Sprintf("Boot: all services up %s after the kernel's start", seconds(c.To))
	}
	return fmt.Sprintf("Boot: %d of %d services up %s after the kernel's start", up, len(c.Rows), seconds(c.To))
}

type sketch struct {
	Chart
	out  *bufio.Writer
	left float64 // start of the time axis
}

func (s sketch) x(at time.Duration) float64 {
	if s.To <= s.From {
		return s.left
	}
	return s.left + svgPlot*float64(at-s.From)/float64(s.To-s.From)
}

func (s sketch) text(x, y float64, class, text string) {
	fmt.Fprintf(s.out, `<text x="%.1f" y="%.1f" class="%s">`, x, y, class)
	// A bufio.Writer reports its errors at the end, in Flush.
	_ = xml.EscapeText(s.out, []byte(text))
	fmt.Fprintln(s.out, "</text>")
}

func (s sketch) legend() {
	x := s.left
	for _, c := range bars {
		fmt.Fprintf(s.out, `<rect x="%.1f" y="36" width="11" height="11" rx="2" fill="%s"/>`, x, c.colour)
		s.text(x+16, 46, "axis", c.label)
		x += 16 + float64(len(c.label))*svgGlyph + svgMargin
	}
	fmt.Fprintf(s.out, `<line x1="%.1f" x2="%.1f" y1="35" y2="48" class="up"/>`, x+2, x+2)
	s.text(x+10, 46, "axis", "up")
}

// axis draws a line per round number of seconds, counted from the kernel's
// start.
func (s sketch) axis() {
	step := tick(s.To - s.From)
	bottom := svgTop + len(s.Rows)*svgRow
	for at := (s.From + step - 1) / step * step; at <= s.To; at += step {
		fmt.Fprintf(s.out, `<line x1="%.1f" x2="%.1f" y1="%d" y2="%d" class="grid"/>`, s.x(at), s.x(at), svgTop-6, bottom)
		s.text(s.x(at)-8, svgTop-10, "axis", at.String())
	}
}

// tick is the round step that draws about svgTicks lines.
func tick(span time.Duration) time.Duration {
	for unit := time.Millisecond; ; unit *= 10 {
		for _, n := range []time.Duration{1, 2, 5} {
			if span <= svgTicks*n*unit {
				return n * unit
			}
		}
	}
}

func (s sketch) row(i int, row Row) {
	y := float64(svgTop + i*svgRow)
	class := ""
	if row.Critical {
		class = "critical"
	}
	s.text(svgMargin, y+12, class, row.ID)
	end := s.left
	for _, span := range row.Spans {
		for _, c := range bars {
			if c.state != span.State {
				continue
			}
			end = s.x(span.To)
			// A bar has a minimum width, so that a short time is visible.
			fmt.Fprintf(s.out, `<rect x="%.1f" y="%.1f" width="%.1f" height="%d" fill="%s"><title>`,
				s.x(span.From), y, max(end-s.x(span.From), 0.5), svgBar, c.colour)
			_ = xml.EscapeText(s.out, fmt.Appendf(nil, "%s: %s for %s", row.ID, c.label, seconds(span.To-span.From)))
			fmt.Fprintln(s.out, "</title></rect>")
		}
	}
	if row.Up == 0 {
		s.text(end+6, y+12, "axis", string(row.State))
		return
	}
	x := s.x(row.Up)
	fmt.Fprintf(s.out, `<line x1="%.1f" x2="%.1f" y1="%.1f" y2="%.1f" class="up"/>`, x, x, y-1, y+svgBar+1)
	s.text(x+6, y+12, "axis", seconds(row.Up))
}

// path connects the critical services from the time that one was up to the next
// row, which waited for it.
func (s sketch) path() {
	var last *Row
	lastY := 0.0
	for i := range s.Rows {
		row := &s.Rows[i]
		if !row.Critical {
			continue
		}
		y := float64(svgTop + i*svgRow)
		if last != nil {
			fmt.Fprintf(s.out, `<path class="path" d="M%.1f %.1f V%.1f"/>`+"\n", s.x(last.Up), lastY+svgBar+1, y)
		}
		last, lastY = row, y
	}
}
