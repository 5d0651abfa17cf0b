package main

import (
	"context"
	"fmt"

	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/spf13/cobra"
)

func (a *app) inspectCommand() *cobra.Command {
	r := &apiv1.GraphRequest{}
	graph := &cobra.Command{
		Use:   "graph",
		Short: "Draw which controllers read and write which resources",
		Long: `Draw which controllers read and write which resources, or with --services which
services depend on each other, in the DOT language of Graphviz.`,
		Example: `  gbctl -n 10.5.0.2 inspect graph | dot -Tsvg > controllers.svg
  gbctl -n 10.5.0.2 inspect graph --services | dot -Tsvg > services.svg`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.one(cmd.Context(), "inspect graph", func(ctx context.Context, c *client.Client) error {
				m, err := unary(ctx, c.Resource.Graph, r)
				if err == nil {
					fmt.Fprint(a.out, m.Dot)
				}
				return err
			})
		},
	}
	graph.Flags().BoolVar(&r.Services, "services", false, "draw services instead of controllers")
	return group(&cobra.Command{Use: "inspect", Short: "Show the internal structure of a node: inspect graph"}, graph)
}

// one sends a request to one node, for output that can't be combined for several nodes.
func (a *app) one(ctx context.Context, what string, call func(context.Context, *client.Client) error) error {
	node, err := a.single(ctx, what)
	if err != nil {
		return err
	}
	ctx, done := a.request(ctx, node)
	defer done()
	return collect([]string{node}, []error{a.withClient(ctx, node, call)})
}

func (a *app) bootChartCommand() *cobra.Command {
	r := &apiv1.BootChartRequest{}
	cmd := &cobra.Command{
		Use:   "boot-chart",
		Short: "Draw a chart of the last boot",
		Example: `  gbctl -n 10.5.0.2 boot-chart
  gbctl -n 10.5.0.2 boot-chart --svg > boot.svg`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.one(cmd.Context(), "boot-chart", func(ctx context.Context, c *client.Client) error {
				m, err := unary(ctx, c.Node.BootChart, r)
				if err != nil {
					return err
				}
				_, err = a.out.Write(m.Chart)
				return err
			})
		},
	}
	cmd.Flags().BoolVar(&r.Svg, "svg", false, "print an SVG image")
	return cmd
}
