package main

import (
	"context"

	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/spf13/cobra"
)

func (a *app) upgradeK8sCommand() *cobra.Command {
	r := &apiv1.UpgradeKubernetesRequest{}
	cmd := &cobra.Command{
		Use: "upgrade-k8s",
		RunE: func(cmd *cobra.Command, _ []string) error {
			a.raiseTimeout(cmd, planTimeout)
			return a.untimed(cmd.Context(), "upgrade-k8s", func(ctx context.Context, c *client.Client) error {
				_, err := a.begin(ctx, c, r.DryRun, func(ctx context.Context) (*apiv1.Operation, error) {
					m, err := unary(ctx, c.Node.UpgradeKubernetes, r)
					return m.GetOperation(), err
				})
				return err
			})
		},
	}
	f := cmd.Flags()
	f.StringVar(&r.From, "from", "", "the present version, such as 1.35.4 (default: the version of the cluster)")
	f.StringVar(&r.To, "to", "", "the new version, such as 1.36.3; required")
	f.BoolVar(&r.NoKubelet, "no-kubelet", false, "don't change the kubelets")
	f.BoolVarP(&r.Yes, "yes", "y", false, "apply changed bootstrap manifests without a question")
	f.BoolVar(&r.DryRun, "dry-run", false, "only check the cluster, and show the steps")
	_ = cmd.MarkFlagRequired("to")
	return cmd
}
