package dag

import (
	"context"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestServicesAsAGraph(t *testing.T) {
	run := func(context.Context, *Handle) error { return nil }
	g, err := New(Options{},
		Service{ID: "cellar", Run: run, Kind: Process},
		Service{ID: "attic", Run: run, DependsOn: []string{"stairs", "cellar"}},
		Service{ID: "stairs", Run: run, Kind: Container},
	)
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	if err := g.DOT(&b); err != nil {
		t.Fatal(err)
	}
	want := `digraph services {
  rankdir=LR;
  "attic" [shape=box, label="attic\ngoroutine of PID 1"];
  "cellar" [shape=box, label="cellar\nprocess"];
  "stairs" [shape=box, label="stairs\ncontainer"];
  "attic" -> "cellar";
  "attic" -> "stairs";
}
`
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Error(diff)
	}
}
