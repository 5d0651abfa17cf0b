package main

import (
	"context"

	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/spf13/cobra"
)

func (a *app) inspectCommand() *cobra.Command {
	r := &apiv1.GraphRequest{}
	graph := textCommand(a, "graph", asking(ofResource, resourceAPI.Graph, r), (*apiv1.GraphResponse).GetDot)
	graph.Flags().BoolVar(&r.Services, "services", false, "draw services instead of controllers")
	return group("inspect", graph)
}

// one sends a request to one node, for output that can't be combined for several nodes.
func (a *app) one(ctx context.Context, what string, call func(context.Context, *client.Client) error) error {
	return a.untimed(ctx, what, a.limited(call))
}

// untimed is one without --timeout, for streams.
func (a *app) untimed(ctx context.Context, what string, call func(context.Context, *client.Client) error) error {
	return a.onOne(ctx, what, func(node string) error { return a.withClient(ctx, node, call) })
}

// onOne is for a command that works with exactly one node.
func (a *app) onOne(ctx context.Context, what string, do func(node string) error) error {
	node, err := a.single(ctx, what)
	if err != nil {
		return err
	}
	return collect([]string{node}, []error{do(node)})
}

func (a *app) bootChartCommand() *cobra.Command {
	r := &apiv1.BootChartRequest{}
	cmd := textCommand(a, "boot-chart", asking(ofNode, nodeAPI.BootChart, r), (*apiv1.BootChartResponse).GetChart)
	cmd.Flags().BoolVar(&r.Svg, "svg", false, "print an SVG image")
	return cmd
}

func (a *app) metricsCommand() *cobra.Command {
	return textCommand(a, "metrics", asking(ofNode, nodeAPI.Metrics, &apiv1.MetricsRequest{}), (*apiv1.MetricsResponse).GetText)
}
