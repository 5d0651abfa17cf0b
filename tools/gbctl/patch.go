package main

import (
	"context"
	"strings"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config/patch"
	"github.com/spf13/cobra"
)

func (a *app) patchCommand(use string, aliases ...string) *cobra.Command {
	change := &configChange{app: a, done: "patched"}
	var patches []string
	cmd := command(use+" -p PATCH", func(cmd *cobra.Command, _ []string) error {
		if len(patches) == 0 {
			return usagef("no patch given: use -p PATCH")
		}
		texts, err := patchTexts(patches, a.readInput)
		if err != nil {
			return err
		}
		return change.onEach(cmd, func(ctx context.Context, n *client.Client) (*apiv1.ApplyConfigResponse, error) {
			return a.patchNode(ctx, n, change, texts)
		})
	})
	cmd.Aliases = aliases
	// An array, not a slice: patches are full of commas.
	cmd.Flags().StringArrayVarP(&patches, "patch", "p", nil, "patch, or @FILE; repeatable, applied in the given order")
	change.add(cmd)
	return cmd
}

// patchNode patches the current configuration of a node. If somebody else changes it in
// between, it tries once more with the new configuration.
func (a *app) patchNode(ctx context.Context, n *client.Client, change *configChange, patches [][]byte) (*apiv1.ApplyConfigResponse, error) {
	for try := 1; ; try++ {
		current, err := a.current(ctx, n)
		if err != nil {
			return nil, err
		}
		text := current.Document
		for _, p := range patches {
			if text, err = patch.Apply(text, p); err != nil {
				return nil, &exitError{codeRefused, err}
			}
		}
		m, err := change.apply(ctx, n, text, current)
		if connect.CodeOf(err) != connect.CodeAborted || try > 1 {
			return m, err
		}
	}
}

// command makes a command. Its usage says which arguments it takes, and help.yaml has all other texts.
func command(use string, run func(cmd *cobra.Command, args []string) error) *cobra.Command {
	return &cobra.Command{Use: use, RunE: run}
}

// group makes a command that only has subcommands. Without a function, a misspelt subcommand
// would print the help and succeed.
func group(use string, inner ...*cobra.Command) *cobra.Command {
	cmd := command(use, func(cmd *cobra.Command, _ []string) error {
		return usagef("%s needs a subcommand: %s", cmd.CommandPath(), strings.Join(ofEach(cmd.Commands(), (*cobra.Command).Name), ", "))
	})
	cmd.AddCommand(inner...)
	return cmd
}
