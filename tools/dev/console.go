package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/garboard-os/garboard/api/client"
	"github.com/garboard-os/garboard/api/garboardv1"
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

func chartCommand() *cobra.Command {
	return clusterCommand("chart", "Show how the last boot went, as a chart", cobra.NoArgs, func(cmd *cobra.Command, c *qemu.Cluster, _ []string) error {
		return printChart(cmd.Context(), cmd.OutOrStdout(), c)
	})
}

// printChart shows the chart of the first node's boot, and where the picture is.
func printChart(ctx context.Context, out io.Writer, c *qemu.Cluster) error {
	node := c.Nodes[0]
	api, err := dial(c, node)
	if err != nil {
		return err
	}
	defer api.Close()
	got, err := client.Unary(ctx, api.Node.BootChart, &garboardv1.BootChartRequest{})
	if err != nil {
		return fmt.Errorf("ask %s for its boot chart: %w", node.Name, err)
	}
	if _, err := out.Write(got.GetChart()); err != nil {
		return err
	}
	fmt.Fprintf(out, "\nas a picture, once all services have been up: %s\n", c.Chart(node.Name))
	return nil
}

func dial(c *qemu.Cluster, node qemu.Node) (*client.Client, error) {
	file, err := client.Load(c.ClientConfig())
	if err != nil {
		return nil, err
	}
	who, err := file.Current("")
	if err != nil {
		return nil, err
	}
	return client.Dial(who, node.Address.String())
}
