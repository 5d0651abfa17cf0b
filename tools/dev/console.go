package main

import (
	"cmp"
	"context"
	"io"
	"os"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/spf13/cobra"
	"golang.org/x/term"
)

const followPoll = 200 * time.Millisecond

func consoleCommand() *cobra.Command {
	var node string
	cmd := clusterCommand("console", "Show a node's console; on a terminal, follow it until Ctrl-C", cobra.NoArgs, func(cmd *cobra.Command, c *qemu.Cluster, _ []string) error {
		of, err := c.Find(cmp.Or(node, c.Nodes[0].Name))
		if err != nil {
			return err
		}
		follow := term.IsTerminal(int(os.Stdout.Fd()))
		return showConsole(cmd.Context(), cmd.OutOrStdout(), c.Console(of.Name), follow)
	})
	cmd.Flags().StringVar(&node, "node", "", "name of the node (default the first control plane)")
	return cmd
}

func showConsole(ctx context.Context, out io.Writer, path string, follow bool) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	for {
		if _, err := io.Copy(out, f); err != nil {
			return err
		}
		if !follow {
			return nil
		}
		if pause(ctx, followPoll) != nil {
			return nil // Ctrl-C is how one ends it
		}
	}
}

// pause waits. It ends early, with an error, if ctx does.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
