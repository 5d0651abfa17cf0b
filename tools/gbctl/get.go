package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// query is what 'get' requests.
type query struct {
	kind, namespace, id string
	watch               bool
}

func (a *app) getCommand() *cobra.Command {
	var q query
	cmd := command("get [TYPE [ID]]", func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return a.types(cmd.Context())
		}
		q.kind = args[0]
		if err := a.habit(cmd, fmt.Sprintf("no resource type %q", q.kind), q.kind); err != nil {
			return err
		}
		if len(args) > 1 {
			q.id = args[1]
		}
		definitions := slices.Contains([]string{"rd", "resourcedefinition", "resourcedefinitions"}, strings.ToLower(q.kind))
		switch {
		case definitions && q.watch:
			return usagef("the types don't change while a node runs: --watch isn't possible")
		case definitions:
			return a.definitions(cmd.Context(), q)
		case q.watch:
			return a.watch(cmd.Context(), q)
		}
		return a.get(cmd.Context(), q)
	})
	cmd.ValidArgsFunction = completing(a, definitions, func(m *apiv1.ListDefinitionsResponse) (names []string) {
		for _, d := range m.Definitions {
			names = append(names, append(d.Aliases, strings.ToLower(pluralOf(d)))...)
		}
		return names
	})
	cmd.Flags().StringVar(&q.namespace, "namespace", "", "show only this namespace")
	cmd.Flags().BoolVarP(&q.watch, "watch", "w", false, "also print changes, until Ctrl-C")
	return a.outputFlag(cmd)
}

// rebootsCommand shows the resources that 'get' calls boots.
func (a *app) rebootsCommand() *cobra.Command {
	return a.outputFlag(command("reboots", func(cmd *cobra.Command, _ []string) error { return a.get(cmd.Context(), query{kind: "boots"}) }))
}

// getHead starts every table of resources.
var getHead = []string{"NODE", "NAMESPACE", "TYPE", "ID", "VERSION"}

func (a *app) get(ctx context.Context, q query) error {
	answers, failed := gather(ctx, a, func(ctx context.Context, c *client.Client) (*apiv1.ListResourcesResponse, error) {
		list, err := client.Unary(ctx, c.Resource.List, q.request())
		if err == nil && q.id != "" && len(list.Items) == 0 {
			err = fmt.Errorf("no %s %q%s", list.GetDefinition().GetKind(), q.id, q.where())
		}
		return list, err
	})
	head := getHead
	var rows [][]string
	var documents []*yaml.Node
	for _, n := range answers {
		if len(head) == len(getHead) {
			head = slices.Concat(getHead, n.value.GetDefinition().GetColumns())
		}
		for _, r := range n.value.Items {
			rows = append(rows, row(n.node, r))
			d, err := envelope(n.node, r)
			if err != nil {
				return err
			}
			documents = append(documents, d)
		}
	}
	if len(rows) == 0 && len(answers) > 0 && a.output == "table" {
		fmt.Fprintf(a.notes(), "no %s%s\n", answers[0].value.GetDefinition().GetType(), q.where())
	}
	err := a.showTable(documents, q.id != "", head, rows, len(rows) > 0 || a.output != "table" && len(answers) > 0)
	return errors.Join(err, failed)
}

func (q query) request() *apiv1.ListResourcesRequest {
	return &apiv1.ListResourcesRequest{Type: q.kind, Namespace: q.namespace, Id: q.id}
}

func (q query) where() string {
	if q.namespace == "" {
		return ""
	}
	return " in namespace " + q.namespace
}

// row is a resource in a table, with the short name of its type.
func row(node string, r *apiv1.Resource) []string {
	return slices.Concat([]string{node, r.Namespace, r.Kind, r.Id, strconv.FormatUint(r.Version, 10)}, r.Columns)
}

// envelope is a resource as a document.
func envelope(node string, r *apiv1.Resource) (*yaml.Node, error) {
	n := mapping("node", node, "metadata", mapping(
		"namespace", r.Namespace, "type", r.Type, "id", r.Id, "version", r.Version, "phase", r.Phase))
	metadata := n.Content[3]
	if len(r.Finalizers) > 0 {
		metadata.Content = append(metadata.Content, scalar("finalizers"), sequence(r.Finalizers))
	}
	if r.Owner != "" {
		metadata.Content = append(metadata.Content, scalar("owner"), scalar(r.Owner))
	}
	for _, since := range []struct {
		key string
		at  *timestamppb.Timestamp
	}{{"created", r.Created}, {"problemsSince", r.ProblemsSince}} {
		if since.at != nil {
			metadata.Content = append(metadata.Content, scalar(since.key), scalar(since.at.AsTime().Format(time.RFC3339)))
		}
	}
	var spec yaml.Node
	if err := yaml.Unmarshal([]byte(r.Spec), &spec); err != nil {
		return nil, fmt.Errorf("%s: %s %s: %w", node, r.Kind, r.Id, err)
	}
	body := mapping()
	if len(spec.Content) > 0 {
		body = spec.Content[0]
	}
	n.Content = append(n.Content, scalar("spec"), body)
	return n, nil
}

// definitions prints the types as if they were resources.
func (a *app) definitions(ctx context.Context, q query) error {
	answers, failed := gather(ctx, a, definitions)
	var rows [][]string
	var documents []*yaml.Node
	for _, n := range answers {
		for _, d := range n.value.Definitions {
			if q.id != "" && !called(d, q.id) {
				continue
			}
			rows = append(rows, []string{n.node, "meta", "ResourceDefinition", d.Type, "1", d.Kind, d.DefaultNamespace, strings.Join(d.Aliases, ",")})
			documents = append(documents, mapping("node", n.node,
				"metadata", mapping("namespace", "meta", "type", "ResourceDefinitions.meta.garboard.dev", "id", d.Type, "version", 1, "phase", "running"),
				"spec", fields(d.ProtoReflect())))
		}
	}
	if len(rows) == 0 && q.id != "" && failed == nil {
		return fmt.Errorf("no type %q; 'gbctl get rd' lists the types", q.id)
	}
	head := slices.Concat(getHead, []string{"KIND", "DEFAULT NAMESPACE", "ALIASES"})
	return errors.Join(a.showTable(documents, q.id != "", head, rows, len(answers) > 0), failed)
}

// types prints the short names of the types of one node.
func (a *app) types(ctx context.Context) error {
	nodes, err := a.targets(ctx)
	if err != nil {
		return err
	}
	a.nodes = nodes[:1]
	return list(ctx, a, []string{"TYPE", "ALSO CALLED"}, definitions, rowsOf((*apiv1.ListDefinitionsResponse).GetDefinitions, func(d *apiv1.ResourceDefinition) []string {
		return []string{strings.ToLower(pluralOf(d)), strings.Join(d.Aliases, ", ")}
	}))
}

var definitions = asking(ofResource, resourceAPI.Definitions, &apiv1.ListDefinitionsRequest{})

func called(d *apiv1.ResourceDefinition, name string) bool {
	return slices.ContainsFunc(append([]string{d.Type, pluralOf(d), d.Kind}, d.Aliases...), func(n string) bool { return strings.EqualFold(n, name) })
}

// pluralOf returns the short name of a type.
func pluralOf(d *apiv1.ResourceDefinition) string {
	name, _, _ := strings.Cut(d.Type, ".")
	return name
}

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
