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

const patchLong = `Change single fields of the configuration of nodes, one node after another.

A patch is a JSON patch (a list of operations), or a piece of configuration as it
should be, that is merged into what is there. Both may be JSON or YAML, and
@FILE reads them from a file. Comments and the order of fields stay.
` + modesHelp

const patchExample = `  gbctl -n 10.5.0.2 patch mc -p '[{"op": "replace", "path": "/cluster/apiServer/image", "value": "registry.k8s.io/kube-apiserver:v1.36.3"}]'
  gbctl -n 10.5.0.2,10.5.0.3 patch mc -p 'machine: {sysctls: {net.core.somaxconn: "4096"}}'
  gbctl -n 10.5.0.2 patch mc -p @network.yaml --try`

func (a *app) patchCommand() *cobra.Command {
	parent := group(&cobra.Command{Use: "patch", Short: "Change fields of the configuration of nodes: patch machineconfig"})
	flags := &applyFlags{app: a}
	var patches []string
	mc := &cobra.Command{
		Use:     "machineconfig -p PATCH",
		Aliases: []string{"mc", "machineconfigs"},
		Short:   "Change fields of the configuration of nodes",
		Long:    patchLong,
		Example: patchExample,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			change, err := flags.change(cmd, "patched")
			if err != nil {
				return err
			}
			if len(patches) == 0 {
				return usagef("say what to change: -p PATCH")
			}
			texts := make([][]byte, len(patches))
			for i, p := range patches {
				texts[i] = []byte(p)
				if file, ok := strings.CutPrefix(p, "@"); ok {
					if texts[i], err = a.readInput(file); err != nil {
						return err
					}
				}
			}
			return change.onEach(cmd.Context(), func(ctx context.Context, n *client.Client) (*apiv1.ApplyConfigResponse, error) {
				return a.patchNode(ctx, n, change, texts)
			})
		},
	}
	// An array, not a slice: patches are full of commas.
	mc.Flags().StringArrayVarP(&patches, "patch", "p", nil, "the patch, or @FILE; several are applied in their order")
	flags.add(mc)
	parent.AddCommand(mc)
	return parent
}

// patchNode changes what the node has at that moment. Where somebody else has
// changed it in between, it is done once more with what they have made of it.
func (a *app) patchNode(ctx context.Context, n *client.Client, change configChange, patches [][]byte) (*apiv1.ApplyConfigResponse, error) {
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
		m, err := change.apply(ctx, n, text, current.Digest)
		if connect.CodeOf(err) != connect.CodeAborted || try > 1 {
			return m, err
		}
	}
}

// group is a command that only holds others. Without the two, a misspelt one of
// them would show the help and succeed.
func group(cmd *cobra.Command) *cobra.Command {
	cmd.Args = cobra.NoArgs
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return usagef("%s needs to know what: %s", cmd.CommandPath(), strings.Join(subcommands(cmd), ", "))
	}
	return cmd
}

func subcommands(cmd *cobra.Command) (names []string) {
	for _, c := range cmd.Commands() {
		names = append(names, c.Name())
	}
	return names
}
