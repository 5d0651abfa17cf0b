package main

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"go.yaml.in/yaml/v3"
)

// watch prints the current resources as one table, and each change as an additional row.
// The kind of change is the last column, so that the first columns are the same as in
// other tables.
func (a *app) watch(ctx context.Context, q query) error {
	nodes, err := a.targets(ctx)
	if err != nil {
		return err
	}
	w := &watcher{app: a, missing: len(nodes)}
	return a.each(ctx, nodes, func(ctx context.Context, i int, c *client.Client) error {
		first := sync.OnceFunc(w.synced)
		defer first() // a node that fails doesn't delay the others
		err := client.Receive(ctx, c.Resource.Watch, q.request(), func(e *apiv1.ResourceEvent) error {
			if e.Kind == apiv1.ResourceEvent_KIND_SYNCED {
				first()
				return nil
			}
			return w.event(nodes[i], e)
		})
		if err != nil || ctx.Err() != nil {
			return err
		}
		return fmt.Errorf("the node has ended the watch: it shuts down or restarts its API")
	})
}

// watcher merges the streams of all nodes.
type watcher struct {
	app *app

	mu      sync.Mutex // guards what follows, and the output
	head    []string
	early   [][]string // rows that arrive before all nodes are synced
	missing int        // nodes that haven't sent all current resources yet
	widths  columns
	printed bool
}

func eventKind(e *apiv1.ResourceEvent) string { return word(e.Kind, "KIND_") }

func (w *watcher) event(node string, e *apiv1.ResourceEvent) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if e.Definition != nil && w.head == nil {
		w.head = slices.Concat(getHead, e.Definition.Columns, []string{"EVENT"})
	}
	if e.Resource == nil {
		return nil
	}
	if w.app.output == "yaml" || w.app.output == "json" {
		return w.document(node, e)
	}
	cells := append(row(node, e.Resource), strings.TrimPrefix(eventKind(e), "present")) // only changes have a word
	if w.missing > 0 {
		w.early = append(w.early, cells)
		return nil
	}
	return w.row(cells)
}

// document prints one event: a YAML document, or one line of JSON.
func (w *watcher) document(node string, e *apiv1.ResourceEvent) error {
	n, err := envelope(node, e.Resource)
	if err != nil {
		return err
	}
	n.Content = slices.Insert(n.Content, 2, scalar("event"), scalar(eventKind(e)))
	if w.app.output == "json" {
		return writeLine(w.app, n)
	}
	if w.printed {
		fmt.Fprintln(w.app.out, "---")
	}
	w.printed = true
	return writeYAML(w.app.out, []*yaml.Node{n})
}

// writeLine prints a document as one line of JSON.
func writeLine(a *app, n *yaml.Node) error {
	var b bytes.Buffer
	if err := appendJSON(&b, n); err != nil {
		return err
	}
	_, err := fmt.Fprintln(a.out, &b)
	return err
}

// synced is called once for each node. The last call starts the table: only then are the
// widths of the columns known.
func (w *watcher) synced() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.missing--; w.missing > 0 {
		return
	}
	rows := w.early
	w.early = nil
	for _, cells := range append([][]string{w.head}, rows...) {
		w.widths.fit(cells)
	}
	if w.head != nil && w.app.output == "table" {
		_ = w.row(w.head)
	}
	for _, cells := range rows {
		_ = w.row(cells) // a closed output ends the next event
	}
}

// row prints one row. A column gets wider if needed.
func (w *watcher) row(cells []string) error {
	w.widths.fit(cells)
	return w.widths.print(w.app.out, w.head, cells)
}
