package main

import (
	"context"
	"fmt"

	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/spf13/cobra"
)

// clusterOperation makes a command that starts an operation for the cluster on one node, and follows it.
func (a *app) clusterOperation(use string, dryRun *bool, start question[*apiv1.Operation]) *cobra.Command {
	return command(use, func(cmd *cobra.Command, _ []string) error {
		a.raiseTimeout(cmd, planTimeout)
		return a.untimed(cmd.Context(), use, func(ctx context.Context, c *client.Client) error {
			_, err := a.begin(ctx, c, *dryRun, a.unlessRunning(use, *dryRun, start))
			return err
		})
	})
}

// unlessRunning starts an operation, or returns the one of this name that runs on the node, so
// that a user who was interrupted only repeats the command.
func (a *app) unlessRunning(name string, dryRun bool, start question[*apiv1.Operation]) question[*apiv1.Operation] {
	if dryRun {
		return start
	}
	return func(ctx context.Context, c *client.Client) (*apiv1.Operation, error) {
		all, err := operations(ctx, c)
		if err != nil {
			return nil, err
		}
		for _, o := range all.Operations {
			if o.Name == name && o.Ended == nil && !o.Elsewhere {
				fmt.Fprintf(a.err, "%s: %s already runs, as %s started it: this command follows it\n", c.Name, o.Id, visible(o.By))
				return o, nil
			}
		}
		return start(ctx, c)
	}
}

func (a *app) upgradeK8sCommand() *cobra.Command {
	r := &apiv1.UpgradeKubernetesRequest{}
	cmd := a.clusterOperation("upgrade-k8s", &r.DryRun, starting(operationAPI.UpgradeKubernetes, r))
	f := cmd.Flags()
	f.StringVar(&r.From, "from", "", "the present version, such as 1.36.3 (default: the version of the cluster)")
	f.StringVar(&r.To, "to", "", "the new version, such as 1.37.2; required")
	f.BoolVar(&r.NoKubelet, "no-kubelet", false, "don't change the kubelets")
	f.BoolVarP(&r.Yes, "yes", "y", false, "apply changed bootstrap manifests without a question")
	f.BoolVar(&r.DryRun, "dry-run", false, "only check the cluster, and show the steps")
	_ = cmd.MarkFlagRequired("to")
	return cmd
}

func (a *app) convertK8sCommand() *cobra.Command {
	r := &apiv1.ConvertKubernetesRequest{}
	cmd := a.clusterOperation("convert-k8s", &r.DryRun, starting(operationAPI.ConvertKubernetes, r))
	f := cmd.Flags()
	f.BoolVarP(&r.Yes, "yes", "y", false, "answer all questions with yes")
	f.BoolVar(&r.RemoveCheckpoints, "remove-checkpoints", false, "don't wait 5 minutes for pod-checkpointer to remove its checkpoints: the nodes remove them")
	f.BoolVar(&r.RemoveInitializedKey, "remove-initialized-key", false, "only remove the key of a self-hosted control plane from etcd, after the other steps by hand")
	f.BoolVar(&r.DryRun, "dry-run", false, "only check the cluster, and show the steps and the differences")
	return cmd
}

func (a *app) setEndpointCommand() *cobra.Command {
	r := &apiv1.SetEndpointRequest{}
	cmd := a.clusterOperation("set-endpoint", &r.DryRun, starting(operationAPI.SetEndpoint, r))
	change := cmd.RunE
	cmd.Use, cmd.RunE = "set-endpoint URL", func(cmd *cobra.Command, args []string) error {
		r.Endpoint = args[0]
		err := change(cmd, args)
		if err == nil && !r.DryRun {
			fmt.Fprintln(a.out, "All nodes have the endpoint "+r.Endpoint+". For a kubeconfig with it: gbctl kubeconfig")
		}
		return err
	}
	cmd.Flags().BoolVar(&r.DryRun, "dry-run", false, "only check the cluster, and show the steps")
	return cmd
}
