package resource

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"slices"
)

// Graph writes which controller reads and writes which types, in the DOT
// language of Graphviz, which is also readable as it is. The order is fixed.
func (rt *Runtime) Graph(w io.Writer) error {
	var boxes, notes, arrows bytes.Buffer
	types := map[string]bool{}
	for _, c := range rt.controllers {
		fmt.Fprintf(&boxes, "  %q [shape=box];\n", c.Name)
		for _, in := range c.Inputs {
			types[in.Type] = true
			label := ""
			if in.ID != "" {
				label = fmt.Sprintf(" [label=%q]", in.ID)
			}
			fmt.Fprintf(&arrows, "  %q -> %q%s;\n", in.Type, c.Name, label)
		}
		for _, out := range c.Outputs {
			types[out] = true
			fmt.Fprintf(&arrows, "  %q -> %q;\n", c.Name, out)
		}
	}
	for _, t := range slices.Sorted(maps.Keys(types)) {
		fmt.Fprintf(&notes, "  %q [shape=note];\n", t)
	}
	_, err := fmt.Fprintf(w, "digraph controllers {\n  rankdir=LR;\n%s%s%s}\n", &boxes, &notes, &arrows)
	return err
}
