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
		Use:   "upgrade-k8s",
		Short: "Change the Kubernetes version of a cluster",
		Long: `Change the Kubernetes version of a running cluster, by at most one minor version, up or
down. This is an operation on the control plane that --node names: it continues after
Ctrl-C, and 'gbctl operation attach' follows it again. If that node fails, 'gbctl operation
take-over' continues it on another control plane.

Before anything changes, the operation checks all nodes, and pulls all images to all nodes.
Then it updates kube-apiserver, kube-controller-manager and kube-scheduler, each on one
control plane after another, kube-proxy, and the kubelets on one node after another. Each
node must be healthy before the next one is changed; the first node of each component is
watched for 30 s. A node is drained if the minor version of its kubelet changes and another
node can run its pods. Downwards the order is the reverse.

If a component fails on a node, all nodes get its former version back, and the operation
ends. Components that were updated before keep their new version: the same command
continues from there. 'gbctl operation abort' does the same.

Bootstrap manifests (CoreDNS, flannel, RBAC) may differ from the cluster's objects. The
operation shows the differences, and asks whether to apply them.`,
		Example: `  gbctl -n 10.5.0.2 upgrade-k8s --to 1.36.3 --dry-run
  gbctl -n 10.5.0.2 upgrade-k8s --from 1.35.4 --to 1.36.3
  gbctl -n 10.5.0.2 upgrade-k8s --to 1.36.3 --no-kubelet --yes`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			a.raiseTimeout(cmd, planTimeout)
			node, err := a.single(cmd.Context(), "upgrade-k8s")
			if err != nil {
				return err
			}
			id := ""
			err = a.one(cmd.Context(), "upgrade-k8s", func(ctx context.Context, c *client.Client) (err error) {
				id, err = a.begin(ctx, c, r.DryRun, func(ctx context.Context) (*apiv1.Operation, error) {
					m, err := unary(ctx, c.Node.UpgradeKubernetes, r)
					return m.GetOperation(), err
				})
				return err
			})
			if err != nil || r.DryRun {
				return err
			}
			return collect([]string{node}, []error{a.follow(cmd.Context(), node, id)})
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
