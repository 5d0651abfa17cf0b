package resource

import (
	"bufio"
	"fmt"
	"io"
	"slices"
)

// Graph writes which controller reads and writes which types, in the DOT
// language of Graphviz, which is also readable as it is. The order is fixed.
func (rt *Runtime) Graph(w io.Writer) error {
	out := bufio.NewWriter(w)
	fmt.Fprintln(out, "digraph controllers {")
	fmt.Fprintln(out, "  rankdir=LR;")
	var types []string
	for _, c := range rt.controllers {
		fmt.Fprintf(out, "  %q [shape=box];\n", c.Name)
		for _, in := range c.Inputs {
			types = append(types, in.Type)
		}
		types = append(types, c.Outputs...)
	}
	slices.Sort(types)
	for _, typ := range slices.Compact(types) {
		fmt.Fprintf(out, "  %q [shape=note];\n", typ)
	}
	for _, c := range rt.controllers {
		for _, in := range c.Inputs {
			label := ""
			if in.ID != "" {
				label = fmt.Sprintf(" [label=%q]", in.ID)
			}
			fmt.Fprintf(out, "  %q -> %q%s;\n", in.Type, c.Name, label)
		}
		for _, typ := range c.Outputs {
			fmt.Fprintf(out, "  %q -> %q;\n", c.Name, typ)
		}
	}
	fmt.Fprintln(out, "}")
	return out.Flush()
}
