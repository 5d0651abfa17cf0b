package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/garboard-os/garboard/api/client"
	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
)

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
