package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"charm.land/lipgloss/v2"
	"github.com/garboard-os/garboard/api/client"
	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
)

// yamlIndent is the indentation of all YAML output.
const yamlIndent = 4

// table prints rows below a heading. Lines have no trailing blanks.
func table(w io.Writer, head []string, rows [][]string) error {
	var widths columns
	rows = append([][]string{head}, rows...)
	for _, row := range rows {
		widths.fit(row)
	}
	for _, row := range rows {
		if err := widths.print(w, head, row); err != nil {
			return err
		}
	}
	return nil
}

// columns are the widths of the columns of a table.
type columns []int

// fit makes the columns wide enough for a row.
func (c *columns) fit(row []string) {
	for i, cell := range row {
		if i == len(*c) {
			*c = append(*c, 0)
		}
		(*c)[i] = max((*c)[i], utf8.RuneCountInString(oneLine(cell)))
	}
}

// print prints a row of a table with a head. The widths of cells are those without colours.
func (c columns) print(w io.Writer, head, row []string) error {
	line := ""
	for i, cell := range row {
		cell = oneLine(cell)
		gap := strings.Repeat(" ", c[i]+columnGap-utf8.RuneCountInString(cell))
		if i < len(head) {
			cell = paintedIn(w, head[i], cell)
		}
		line += cell + gap
	}
	_, err := fmt.Fprintln(w, strings.TrimRight(line, " "))
	return err
}

const columnGap = 3

// oneLine removes line breaks and control characters, which would break the table or the
// terminal.
func oneLine(text string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\n' || r == '\t':
			return ' '
		case r < ' ' || r >= 0x7f && r < 0xa0:
			return -1
		}
		return r
	}, text)
}

// show prints answers in the format of -o: a table, or YAML documents or JSON, which have
// more fields than the table. one: exactly one object was requested, so that JSON is an
// object and not an array with one object.
func (a *app) show(documents []*yaml.Node, one bool, rows func() error) error {
	switch a.output {
	case "yaml":
		return writeYAML(a.out, documents)
	case "json":
		return writeJSON(a.out, documents, one && len(documents) == 1)
	}
	return rows()
}

// showTable is show for one table. Nothing is printed if no node answered: stderr has the errors.
func (a *app) showTable(documents []*yaml.Node, one bool, head []string, rows [][]string, answered bool) error {
	if !answered {
		return nil
	}
	return a.show(documents, one, func() error { return table(a.out, head, rows) })
}

// showLines is show for one list of words, one in each line.
func (a *app) showLines(name string, items []string) error {
	return a.show([]*yaml.Node{mapping(name, sequence(items))}, true, func() error {
		for _, item := range items {
			if _, err := fmt.Fprintln(a.out, item); err != nil {
				return err
			}
		}
		return nil
	})
}

func writeYAML(w io.Writer, documents []*yaml.Node) error {
	enc := yaml.NewEncoder(w)
	enc.SetIndent(yamlIndent)
	for _, d := range documents {
		if err := enc.Encode(d); err != nil {
			return fmt.Errorf("write YAML: %w", err)
		}
	}
	if len(documents) == 0 {
		return nil // Close would write an empty document
	}
	return enc.Close()
}

func writeJSON(w io.Writer, documents []*yaml.Node, one bool) error {
	var b bytes.Buffer
	root := sequence(documents)
	if one {
		root = documents[0]
	}
	if err := appendJSON(&b, root); err != nil {
		return fmt.Errorf("write JSON: %w", err)
	}
	text, err := json.MarshalIndent(json.RawMessage(b.Bytes()), "", "  ")
	if err != nil {
		return fmt.Errorf("write JSON: %w", err)
	}
	_, err = fmt.Fprintf(w, "%s\n", text)
	return err
}

// appendJSON writes a node as JSON, with the keys in their order.
func appendJSON(b *bytes.Buffer, n *yaml.Node) error {
	switch n.Kind {
	case yaml.MappingNode, yaml.SequenceNode:
		return appendItems(b, n)
	case yaml.ScalarNode:
		var value any = n.Value
		switch n.ShortTag() {
		case "!!int", "!!float", "!!bool", "!!null":
			if err := n.Decode(&value); err != nil {
				return err
			}
		}
		text, err := json.Marshal(value)
		b.Write(text)
		return err
	}
	return errors.New("the node sent YAML with aliases")
}

// appendItems writes a list or a mapping, whose items are keys and values in turn.
func appendItems(b *bytes.Buffer, n *yaml.Node) error {
	brackets, separators := "[]", ",,"
	if n.Kind == yaml.MappingNode {
		brackets, separators = "{}", ",:"
	}
	b.WriteByte(brackets[0])
	for i, item := range n.Content {
		if i > 0 {
			b.WriteByte(separators[i%2])
		}
		if n.Kind == yaml.MappingNode && i%2 == 0 {
			item = scalar(item.Value) // also a number is text as a key
		}
		if err := appendJSON(b, item); err != nil {
			return err
		}
	}
	b.WriteByte(brackets[1])
	return nil
}

// The following functions build YAML nodes, because the order of the keys is part of the
// output format.

func mapping(pairs ...any) *yaml.Node {
	n := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map"}
	for i := 0; i+1 < len(pairs); i += 2 {
		n.Content = append(n.Content, scalar(pairs[i]), scalar(pairs[i+1]))
	}
	return n
}

func sequence[T any](items []T) *yaml.Node {
	n := &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq"}
	for _, item := range items {
		n.Content = append(n.Content, scalar(item))
	}
	return n
}

// scalar makes a node of a plain value. It returns a node unchanged.
func scalar(value any) *yaml.Node {
	if n, ok := value.(*yaml.Node); ok {
		return n
	}
	n := &yaml.Node{}
	if err := n.Encode(value); err != nil {
		n.SetString(fmt.Sprint(value))
	}
	return n
}

// list calls all nodes and prints their answers: a table with the rows of all answers, or
// a document for each answer.
func list[M proto.Message](ctx context.Context, a *app, head []string, ask func(context.Context, *client.Client) (M, error), rows func(M) [][]string) error {
	answers, failed := gather(ctx, a, ask)
	return errors.Join(showRows(a, answers, head, rows), failed)
}

// showRows prints answers as list does.
func showRows[M proto.Message](a *app, answers []answer[M], head []string, rows func(M) [][]string) error {
	var all [][]string
	for _, n := range answers {
		for _, row := range rows(n.value) {
			all = append(all, append([]string{n.node}, ofEach(row, func(cell string) string { return here(n.node, cell) })...))
		}
	}
	return a.showTable(documents(answers), true, append([]string{"NODE"}, head...), all, len(answers) > 0)
}

// showItems prints answers with several items each, of which each is a row, or a document.
func showItems[M proto.Message](a *app, answers []answer[[]M], head []string, row func(node string, item M) []string) error {
	var rows [][]string
	var documents []*yaml.Node
	for _, n := range answers {
		for _, item := range n.value {
			rows, documents = append(rows, row(n.node, item)), append(documents, document(n.node, item))
		}
	}
	return a.showTable(documents, false, head, rows, len(answers) > 0)
}

// showBlocks prints answers as blocks of lines, with an empty line between, or as documents.
func showBlocks[M proto.Message](a *app, answers []answer[M], failed error, block func(node string, m M) error) error {
	if len(answers) == 0 {
		return failed
	}
	return errors.Join(a.show(documents(answers), true, func() error {
		for i, n := range answers {
			if i > 0 {
				fmt.Fprintln(a.out)
			}
			if err := block(n.node, n.value); err != nil {
				return err
			}
		}
		return nil
	}), failed)
}

// documents returns a document for each answer.
func documents[M proto.Message](answers []answer[M]) []*yaml.Node {
	return ofEach(answers, func(n answer[M]) *yaml.Node { return document(n.node, n.value) })
}

// listCommand makes a command that calls all nodes and prints a table of the answers.
func listCommand[M proto.Message](a *app, use string, head []string, ask func(context.Context, *client.Client) (M, error), rows func(M) [][]string) *cobra.Command {
	return a.outputFlag(command(use, func(cmd *cobra.Command, _ []string) error { return list(cmd.Context(), a, head, ask, rows) }))
}

// rowsOf makes the rows of a table, one for each item of an answer.
func rowsOf[M, T any](items func(M) []T, row func(T) []string) func(M) [][]string {
	return func(m M) [][]string { return ofEach(items(m), row) }
}

// ofEach is what a function makes of each item.
func ofEach[T, R any](items []T, of func(T) R) []R {
	var all []R
	for _, item := range items {
		all = append(all, of(item))
	}
	return all
}

// once are the items without those that came before.
func once[T comparable](items []T) []T {
	seen := map[T]bool{}
	return slices.DeleteFunc(items, func(item T) bool {
		before := seen[item]
		seen[item] = true
		return before
	})
}

// size formats a number of bytes.
func size(bytes uint64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB", "PiB"}
	value, unit := float64(bytes), 0
	for value >= 1024 && unit < len(units)-1 {
		value, unit = value/1024, unit+1
	}
	if unit == 0 {
		return fmt.Sprintf("%d B", bytes)
	}
	return fmt.Sprintf("%.1f %s", value, units[unit])
}

// span formats a duration, rounded to seconds.
func span(d time.Duration) string { return d.Round(time.Second).String() }

// ago formats how long then was before now, both since the boot of the node. The time of
// an event may be slightly later than now.
func ago(now, then *durationpb.Duration) string {
	return span(max(now.AsDuration()-then.AsDuration(), 0)) + " ago"
}

// plural formats a number of things.
func plural(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return ""
}

// wordStyles are for words that say how something is, in lower case. The dashboard has the same colours.
var wordStyles = map[string]lipgloss.Style{
	"error": bad, "failed": bad, "fail": bad, "doesn't serve": bad, "can't be had": bad,
	"warning": wait, "waiting": wait, "maintenance": wait, "locked": wait, "undone": wait,
	"ok": good, "done": good, "serves": good,
}

// stateColumns are the columns of tables that have such words.
var stateColumns = []string{"STATE", "HEALTH", "STAGE", "KUBERNETES"}

// painted is a word in its colour, if it has one and goes to a terminal with colours (https://no-color.org). Old
// consoles of Windows have no TERM.
func painted(w io.Writer, word string) string {
	style, known := wordStyles[strings.ToLower(strings.TrimSuffix(word, ":"))]
	if !known || !interactive(w) || os.Getenv("NO_COLOR") != "" || slices.Contains([]string{"", "dumb"}, os.Getenv("TERM")) {
		return word
	}
	return style.Render(word)
}

// paintedIn is a cell of a table.
func paintedIn(w io.Writer, column, cell string) string {
	if slices.Contains(stateColumns, column) {
		return painted(w, cell)
	}
	return cell
}
