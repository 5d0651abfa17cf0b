package dag

import (
	_ "embed"
	"io"
	"text/template"
)

//go:embed graph.dot
var dot string

var graph = template.Must(template.New("").Parse(dot))

// DOT writes the dependencies in the language of Graphviz, which is also
// readable as text. The order is fixed.
func (g *Graph) DOT(w io.Writer) error { return graph.Execute(w, g.Statuses()) }
