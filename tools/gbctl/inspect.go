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
		Use: "graph",
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
	return group(&cobra.Command{Use: "inspect"}, graph)
}

// one sends a request to one node, for output that can't be combined for several nodes.
func (a *app) one(ctx context.Context, what string, call func(context.Context, *client.Client) error) error {
	return a.untimed(ctx, what, func(ctx context.Context, c *client.Client) error {
		ctx, done := a.request(ctx, c.Name)
		defer done()
		return call(ctx, c)
	})
}

// untimed is one without --timeout, for streams.
func (a *app) untimed(ctx context.Context, what string, call func(context.Context, *client.Client) error) error {
	node, err := a.single(ctx, what)
	if err != nil {
		return err
	}
	return collect([]string{node}, []error{a.withClient(ctx, node, call)})
}

func (a *app) bootChartCommand() *cobra.Command {
	r := &apiv1.BootChartRequest{}
	cmd := &cobra.Command{
		Use: "boot-chart",
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
