package main

import (
	"context"

	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/spf13/cobra"
)

func (a *app) metricsCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "metrics",
		Short: "Show the metrics of a node, in the text format of Prometheus",
		Long: `Show the metrics of a node, in the text format of Prometheus. docs/metrics.md explains
each of them.

Prometheus reads the same text from https://NODE:50000/metrics, with a client certificate
of role os:reader ('gbctl gen' makes one).`,
		Example: `  gbctl -n 10.5.0.2 metrics`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.one(cmd.Context(), "metrics", func(ctx context.Context, c *client.Client) error {
				m, err := unary(ctx, c.Node.Metrics, &apiv1.MetricsRequest{})
				if err == nil {
					_, err = a.out.Write(m.GetText())
				}
				return err
			})
		},
	}
}
