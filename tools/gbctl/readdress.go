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
