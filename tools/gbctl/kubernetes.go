package main

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

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

const (
	readdress = "readdress" // the operation
	moveStep  = "move"      // from its beginning on, the node may have the new address
	// reachQuestion is answered where the node has its new address.
	reachQuestion = "reach"
)

func (a *app) readdressCommand() *cobra.Command {
	r := &apiv1.ReaddressRequest{}
	var patch string
	cmd := command("readdress ADDRESS", func(cmd *cobra.Command, args []string) (err error) {
		to, err := netip.ParseAddr(args[0])
		if err != nil {
			return usagef("%s: the new address of the node, without a prefix: %v", args[0], err)
		}
		r.Address = to.String()
		text, err := patchText(patch, a.readInput)
		if err != nil {
			return err
		}
		r.Patch = string(text)
		a.raiseTimeout(cmd, planTimeout)
		return a.onOne(cmd.Context(), readdress, func(node string) error { return a.readdress(cmd.Context(), node, r) })
	})
	cmd.Flags().StringVarP(&patch, "patch", "p", "", "patch of the configuration with all else that changes, or @FILE")
	cmd.Flags().BoolVar(&r.DryRun, "dry-run", false, "only check the node, and show the steps")
	return cmd
}

// readdress starts the operation, or follows one that runs: to the new address, where it answers that the node is
// reached.
func (a *app) readdress(ctx context.Context, node string, r *apiv1.ReaddressRequest) error {
	var id string
	err := a.withClient(ctx, node, func(ctx context.Context, c *client.Client) error {
		o, err := a.started(ctx, c, r.DryRun, a.unlessRunning(readdress, r.DryRun, starting(operationAPI.Readdress, r)))
		id = o.GetId()
		return err
	})
	if err != nil || r.DryRun {
		return err
	}
	f := a.follower(node, id, nil)
	f.stop = func(o *apiv1.Operation) bool {
		return f.node == node && node != r.Address && stepIs(o, moveStep, apiv1.OperationStep_STATE_RUNNING)
	}
	if err := f.run(ctx); err != nil || f.last.Ended != nil {
		return err
	}
	fmt.Fprintf(a.err, "%s: the node gets another address: this command goes on at %s\n", node, r.Address)
	f.ended, f.node, f.former, f.stop = false, r.Address, node, func(*apiv1.Operation) bool { return false }
	f.prepare = func(_ context.Context, o *apiv1.Operation) (answer string, err error) {
		if o.Question.GetId() == reachQuestion && f.node == r.Address {
			answer = "yes"
		}
		return answer, nil
	}
	if err := f.run(ctx); err != nil {
		return err
	}
	fmt.Fprintf(a.out, "%s is at %s now; if kubeconfigs have the former address: gbctl -n %s kubeconfig\n", node, r.Address, r.Address)
	return a.moveContext(node, r.Address)
}

// moveContext replaces an address in the context.
func (a *app) moveContext(from, to string) error {
	return a.changeContexts(func(config *client.Config) error {
		c, err := config.Current(a.contextName)
		if err != nil {
			return err
		}
		for _, list := range [][]string{c.Nodes, c.Endpoints} {
			if i := slices.Index(list, from); i >= 0 && !slices.Contains(list, to) {
				list[i] = to
			}
		}
		return nil
	})
}
