package dag

import (
	"bytes"
	"fmt"
	"io"
)

// DOT writes the dependencies in the language of Graphviz, which is also
// readable as text. The order is fixed.
func (g *Graph) DOT(w io.Writer) error {
	var boxes, arrows bytes.Buffer
	for _, s := range g.Statuses() {
		fmt.Fprintf(&boxes, "  %q [shape=box, label=%q];\n", s.ID, fmt.Sprintf("%s\n%s", s.ID, s.Kind))
		for _, need := range s.DependsOn {
			fmt.Fprintf(&arrows, "  %q -> %q;\n", s.ID, need)
		}
	}
	_, err := fmt.Fprintf(w, "digraph services {\n  rankdir=LR;\n%s%s}\n", &boxes, &arrows)
	return err
}
