package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
)

// encryptions are how volumes become as their configuration says: EPHEMERAL is made anew, in which nothing is encrypted
// or decrypted, and STATE is encrypted with what is on it.
var encryptions = []struct {
	label string
	restart
}{
	{boot.LabelEphemeral, restart{
		use: "encrypt", now: "wipes EPHEMERAL and restarts", back: "is back and healthy", budget: proveBudget,
		start: func(f powerFlags) question[*apiv1.Operation] {
			return starting(operationAPI.Reset, &apiv1.ResetRequest{
				SystemLabelsToWipe: []string{boot.LabelEphemeral}, Reboot: true, DrainTimeout: durationpb.New(f.drainTimeout), DryRun: f.dryRun,
			})
		},
	}},
	{boot.LabelState, restart{
		use: "encrypt", now: "restarts, and encrypts STATE", back: "is back and healthy", budget: restartBudget,
		start: func(f powerFlags) question[*apiv1.Operation] {
			return starting(operationAPI.Reboot, &apiv1.RebootRequest{EncryptState: true, DrainTimeout: durationpb.New(f.drainTimeout), DryRun: f.dryRun})
		},
	}},
}

func (a *app) encryptCommand() *cobra.Command {
	f := powerFlags{wait: proveBudget}
	cmd := command("encrypt", func(cmd *cobra.Command, _ []string) error {
		a.raiseTimeout(cmd, planTimeout)
		if err := a.named(cmd.Context(), cmd.CommandPath(), f.dryRun, true); err != nil {
			return err
		}
		if !a.yes && !f.dryRun {
			if err := a.confirmReset(cmd.Context(), &apiv1.ResetRequest{SystemLabelsToWipe: []string{boot.LabelEphemeral}}); err != nil {
				return err
			}
		}
		return a.rolling(cmd.Context(), f.dryRun, func(ctx context.Context, n *client.Client) error { return a.encrypt(ctx, n, f) })
	})
	flags := cmd.Flags()
	flags.Var(patience{&f.wait, proveBudget}, "wait", "how long each node may take until it is back and healthy")
	flags.DurationVar(&f.drainTimeout, "drain-timeout", drainTimeout, "how long the eviction of pods may take; pods that remain stop with the node")
	flags.BoolVar(&f.dryRun, "dry-run", false, "only show the steps")
	a.stopFlags(cmd)
	return cmd
}

func (a *app) encrypt(ctx context.Context, n *client.Client, f powerFlags) error {
	for _, e := range encryptions {
		v, err := volumeOf(ctx, n, e.label)
		if err == nil && v.Unlike {
			if err = a.restart(ctx, n, e.restart, f); err == nil && !f.dryRun {
				v, err = volumeOf(ctx, n, e.label)
			}
		}
		switch {
		case err != nil:
			return err
		case v.Unlike && !f.dryRun:
			return fmt.Errorf("%s %s (gbctl logs disks)", e.label, visible(v.Problem))
		case !v.Unlike:
			fmt.Fprintf(a.out, "%s: %s is as its configuration says: %s\n", n.Name, e.label, visible(v.Layers))
		}
	}
	return nil
}

// volumeStatus is what is needed of a VolumeStatus.
type volumeStatus struct {
	Layers, Problem string
	Unlike          bool
}

func volumeOf(ctx context.Context, n *client.Client, label string) (v volumeStatus, err error) {
	all, err := client.Unary(ctx, n.Resource.List, &apiv1.ListResourcesRequest{Type: "volumes"})
	if err != nil {
		return v, err
	}
	for _, r := range all.Items {
		if r.Id == label {
			return v, yaml.Unmarshal([]byte(r.Spec), &v)
		}
	}
	return v, fmt.Errorf("%s isn't there yet, or this node is a container: gbctl -n %s get volumes", label, n.Name)
}
