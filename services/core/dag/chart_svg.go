package dag

import (
	"bytes"
	_ "embed"
	"fmt"
	"html"
	"io"
	"strings"
	"time"
)

//go:embed chart.css
var style string

// Sizes of the drawing, in pixels.
const (
	svgRow    = 22  // a service
	svgTop    = 74  // title, legend and axis above the rows
	svgFoot   = 38  // critical path below them
	svgPlot   = 820 // the time axis
	svgGlyph  = 7.3 // a character of the 12 px monospace font
	svgMargin = 16
	svgUpText = 64 // room for the time behind the last bar
	svgTicks  = 8  // about so many lines on the axis
)

// sketch is a drawing that is being made.
type sketch struct {
	Chart
	bytes.Buffer
	left float64 // start of the time axis
}

// SVG writes the chart as a self-contained drawing.
func (c Chart) SVG(w io.Writer) error {
	s := &sketch{Chart: c, left: svgMargin + float64(c.width())*svgGlyph + svgMargin}
	s.head()
	for i, row := range c.Rows {
		s.row(i, row)
	}
	s.path()
	s.add("</svg>")
	_, err := s.WriteTo(w)
	return err
}

// add adds a line.
func (s *sketch) add(line string, values ...any) { fmt.Fprintf(s, line+"\n", values...) }

func y(row int) int { return svgTop + row*svgRow }

// x is the place of a time.
func (s *sketch) x(at time.Duration) float64 {
	if s.To <= s.From {
		return s.left
	}
	return s.left + svgPlot*float64(at-s.From)/float64(s.To-s.From)
}

// head draws all but the rows.
func (s *sketch) head() {
	width, bottom := s.left+svgPlot+svgUpText+svgMargin, y(len(s.Rows))
	s.add(`<svg xmlns="http://www.w3.org/2000/svg" width="%.0f" height="%d" viewBox="0 0 %.0[1]f %[2]d">`, width, bottom+svgFoot)
	s.add("<style>\n%s</style>\n"+`<rect width="100%%" height="100%%" fill="#fff"/>`, style)
	s.add(`<text x="16" y="24" class="title">%s</text>`, s.title())
	legend := ""
	for _, b := range bars {
		legend += fmt.Sprintf(`<tspan fill="%s">■</tspan> %s   `, b.Colour, b.Label)
	}
	s.add(`<text x="%.1f" y="46" class="axis" xml:space="preserve">%s<tspan fill="#1c7a3f" font-weight="bold">|</tspan> up</text>`, s.left, legend)
	// The lines are at a round number of seconds each, counted from the kernel's start.
	step := tick(s.To - s.From)
	for at := (s.From + step - 1) / step * step; at <= s.To; at += step {
		s.add(`<line x1="%.1f" x2="%.1[1]f" y1="68" y2="%d" class="grid"/><text x="%.1[1]f" dx="-8" y="64" class="axis">%[3]s</text>`, s.x(at), bottom, at)
	}
}

func (s *sketch) title() string {
	up := 0
	for _, row := range s.Rows {
		if row.Up != 0 {
			up++
		}
	}
	if up == len(s.Rows) {
		return fmt.Sprintf("Boot: all services up %s after the kernel's start", seconds(s.To))
	}
	return fmt.Sprintf("Boot: %d of %d services up %s after the kernel's start", up, len(s.Rows), seconds(s.To))
}

func (s *sketch) row(i int, row Row) {
	class, end, id := "plain", s.left, html.EscapeString(row.ID)
	if row.Critical {
		class = "critical"
	}
	s.add(`<g transform="translate(0 %d)"><text x="16" y="12" class="%s">%s</text>`, y(i), class, id)
	for _, span := range row.Spans {
		for _, b := range bars {
			if b.State == span.State {
				begin := s.x(span.From)
				end = s.x(span.To) // a short time has a visible width
				s.add(`<rect x="%.1f" width="%.1f" height="14" fill="%s"><title>%s: %s for %s</title></rect>`,
					begin, max(end-begin, 0.5), b.Colour, id, b.Label, seconds(span.Took()))
			}
		}
	}
	text := html.EscapeString(string(row.State))
	if row.Up != 0 {
		end, text = s.x(row.Up), seconds(row.Up)
		s.add(`<line x1="%.1f" x2="%.1[1]f" y1="-1" y2="15" class="up"/>`, end)
	}
	s.add(`<text x="%.1f" dx="6" y="12" class="axis">%s</text></g>`, end, text)
}

// path draws from the time that one critical service was up to the next one, which waited for it.
func (s *sketch) path() {
	former := -1
	for i, row := range s.Rows {
		if row.Critical && former >= 0 {
			s.add(`<path class="path" d="M%.1f %d m0 15 V%d"/>`, s.x(s.Rows[former].Up), y(former), y(i))
		}
		if row.Critical {
			former = i
		}
	}
	if len(s.Critical) > 0 {
		s.add(`<text x="16" y="%d" dy="24" class="critical">critical path: %s</text>`, y(len(s.Rows)), html.EscapeString(strings.Join(s.Critical, " → ")))
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
