package main

import (
	"context"

	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/spf13/cobra"
)

func (a *app) metricsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "metrics",
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
