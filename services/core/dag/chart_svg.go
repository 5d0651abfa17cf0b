package dag

import (
	_ "embed"
	"fmt"
	"io"
	"strings"
	"text/template"
	"time"
	"unicode/utf8"
)

//go:embed chart.svg
var svg string

var drawing = template.Must(template.New("").Funcs(template.FuncMap{"join": strings.Join, "seconds": seconds}).Parse(svg))

// Sizes of the drawing, in pixels. The template has those of the parts of a row.
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

// sketch is what the template draws.
type sketch struct {
	Chart
	left float64 // start of the time axis
}

// SVG writes the chart as a self-contained drawing.
func (c Chart) SVG(w io.Writer) error {
	label := len("SERVICE")
	for _, row := range c.Rows {
		label = max(label, utf8.RuneCountInString(row.ID))
	}
	return drawing.Execute(w, sketch{c, svgMargin + float64(label)*svgGlyph + svgMargin})
}

func (s sketch) Width() float64 { return s.left + svgPlot + svgUpText + svgMargin }
func (s sketch) Height() int    { return s.Y(len(s.Rows)) + svgFoot }
func (s sketch) Y(row int) int  { return svgTop + row*svgRow }
func (s sketch) Bars() []bar    { return bars }

// X is the place of a time.
func (s sketch) X(at time.Duration) string { return fmt.Sprintf("%.1f", s.x(at)) }

func (s sketch) x(at time.Duration) float64 {
	if s.To <= s.From {
		return s.left
	}
	return s.left + svgPlot*float64(at-s.From)/float64(s.To-s.From)
}

// Wide is the width of a bar. It has a minimum, so that a short time is visible.
func (s sketch) Wide(b Span) string { return fmt.Sprintf("%.1f", max(s.x(b.To)-s.x(b.From), 0.5)) }

func (s sketch) Title() string {
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

// Ticks are the times with a line: a round number of seconds each, counted from the kernel's start.
func (s sketch) Ticks() (all []time.Duration) {
	step := tick(s.To - s.From)
	for at := (s.From + step - 1) / step * step; at <= s.To; at += step {
		all = append(all, at)
	}
	return all
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
