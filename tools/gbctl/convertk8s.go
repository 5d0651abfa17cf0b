package main

import (
	"context"

	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/spf13/cobra"
)

func (a *app) convertK8sCommand() *cobra.Command {
	r := &apiv1.ConvertKubernetesRequest{}
	cmd := &cobra.Command{
		Use: "convert-k8s",
		RunE: func(cmd *cobra.Command, _ []string) error {
			a.raiseTimeout(cmd, planTimeout)
			return a.untimed(cmd.Context(), "convert-k8s", func(ctx context.Context, c *client.Client) error {
				_, err := a.begin(ctx, c, r.DryRun, func(ctx context.Context) (*apiv1.Operation, error) {
					m, err := unary(ctx, c.Node.ConvertKubernetes, r)
					return m.GetOperation(), err
				})
				return err
			})
		},
	}
	f := cmd.Flags()
	f.BoolVarP(&r.Yes, "yes", "y", false, "answer all questions with yes")
	f.BoolVar(&r.RemoveCheckpoints, "remove-checkpoints", false, "don't wait 5 minutes for pod-checkpointer to remove its checkpoints: the nodes remove them")
	f.BoolVar(&r.RemoveInitializedKey, "remove-initialized-key", false, "only remove the key of a self-hosted control plane from etcd, after the other steps by hand")
	f.BoolVar(&r.DryRun, "dry-run", false, "only check the cluster, and show the steps and the differences")
	return cmd
}
