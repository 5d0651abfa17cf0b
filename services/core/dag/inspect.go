package dag

import (
	"bufio"
	"fmt"
	"io"
)

// DOT writes the dependencies in the language of Graphviz, which is also
// readable as text. The order is fixed.
func (g *Graph) DOT(w io.Writer) error {
	out := bufio.NewWriter(w)
	fmt.Fprintln(out, "digraph services {")
	fmt.Fprintln(out, "  rankdir=LR;")
	all := g.Statuses()
	for _, s := range all {
		fmt.Fprintf(out, "  %q [shape=box, label=%q];\n", s.ID, s.ID+"\n"+string(s.Kind))
	}
	for _, s := range all {
		for _, need := range s.DependsOn {
			fmt.Fprintf(out, "  %q -> %q;\n", s.ID, need)
		}
	}
	fmt.Fprintln(out, "}")
	return out.Flush()
}
