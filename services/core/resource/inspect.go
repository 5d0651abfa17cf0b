package resource

import (
	_ "embed"
	"io"
	"slices"
	"text/template"
)

//go:embed graph.dot
var dot string

var graph = template.Must(template.New("").Parse(dot))

// Graph writes which controller reads and writes which types, in the DOT
// language of Graphviz, which is also readable as it is. The order is fixed.
func (rt *Runtime) Graph(w io.Writer) error {
	var types []string
	for _, c := range rt.controllers {
		for _, in := range c.Inputs {
			types = append(types, in.Type)
		}
		types = append(types, c.Outputs...)
	}
	slices.Sort(types)
	return graph.Execute(w, struct {
		Controllers []Controller
		Types       []string
	}{rt.controllers, slices.Compact(types)})
}
