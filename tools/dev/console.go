package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/spf13/cobra"
	"golang.org/x/term"
)

const followPoll = 200 * time.Millisecond

func consoleCommand() *cobra.Command {
	var name, node string
	cmd := clusterFlag(&cobra.Command{
		Use:   "console",
		Short: "Show a node's console; on a terminal, follow it until Ctrl-C",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := qemu.Open(name)
			if err != nil {
				return hint(err, name)
			}
			of, err := c.Find(cmp.Or(node, c.Nodes[0].Name))
			if err != nil {
				return err
			}
			follow := term.IsTerminal(int(os.Stdout.Fd()))
			return showConsole(cmd.Context(), cmd.OutOrStdout(), c.Console(of.Name), follow)
		},
	}, &name)
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
		select {
		case <-ctx.Done():
			return nil // Ctrl-C is how one ends it
		case <-time.After(followPoll):
		}
	}
}

// said is a line of Garboard on a console, after the kernel's timestamp.
var said = regexp.MustCompile(`\[garboard\] (.*)`)

func chartCommand() *cobra.Command {
	var name string
	return clusterFlag(&cobra.Command{
		Use:   "chart",
		Short: "Show how the last boot went, as a chart",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := qemu.Open(name)
			if err != nil {
				return hint(err, name)
			}
			return printChart(cmd.OutOrStdout(), c)
		},
	}, &name)
}

// printChart shows the chart that the node drew on its console when all its
// services were up, and where the picture is.
func printChart(out io.Writer, c *qemu.Cluster) error {
	node := c.Nodes[0].Name
	lines, err := lastChart(c.Console(node))
	if err != nil {
		return err
	}
	if len(lines) == 0 {
		return errors.New("the node hasn't drawn its boot chart yet: it does once all its services are up")
	}
	for _, line := range lines {
		fmt.Fprintln(out, line)
	}
	fmt.Fprintf(out, "\nas a picture: %s\n", c.Chart(node))
	return nil
}

// The node marks where its chart begins and ends.
const (
	chartBegin = "boot chart:"
	chartEnd   = "boot chart ends"
)

func lastChart(console string) ([]string, error) {
	f, err := os.Open(console)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var chart, current []string
	open := false
	for s := bufio.NewScanner(f); s.Scan(); {
		m := said.FindStringSubmatch(s.Text())
		switch {
		case m == nil:
		case m[1] == chartBegin:
			open, current = true, nil
		case m[1] == chartEnd && open:
			open, chart = false, current
		case open:
			current = append(current, m[1])
		}
	}
	return chart, nil
}
