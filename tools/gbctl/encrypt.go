package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"
	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
)

// encryption makes EPHEMERAL anew, in which nothing is encrypted or decrypted.
var encryption = restart{
	use: "encrypt", now: "wipes EPHEMERAL and restarts", back: "is back and healthy, and EPHEMERAL is as its configuration says", budget: proveBudget,
	start: func(f powerFlags) question[*apiv1.Operation] {
		return starting(nodeAPI.Reset, &apiv1.ResetRequest{
			SystemLabelsToWipe: []string{boot.LabelEphemeral}, Reboot: true, DrainTimeout: durationpb.New(f.drainTimeout), DryRun: f.dryRun,
		})
	},
}

func (a *app) encryptCommand() *cobra.Command {
	f := powerFlags{wait: encryption.budget}
	cmd := command(encryption.use, func(cmd *cobra.Command, _ []string) error {
		a.raiseTimeout(cmd, planTimeout)
		if err := a.named(cmd.Context(), cmd.CommandPath(), f.dryRun, true); err != nil {
			return err
		}
		if !a.yes && !f.dryRun {
			if err := a.confirmReset(cmd.Context(), &apiv1.ResetRequest{SystemLabelsToWipe: []string{boot.LabelEphemeral}}); err != nil {
				return err
			}
		}
		return a.rolling(cmd.Context(), f.dryRun, func(ctx context.Context, n *client.Client) error {
			v, err := ephemeral(ctx, n)
			if err != nil {
				return err
			}
			if !v.Unlike {
				fmt.Fprintf(a.out, "%s: nothing to do, EPHEMERAL is as its configuration says: %s\n", n.Name, visible(v.Layers))
				return nil
			}
			return a.restart(ctx, n, encryption, f)
		})
	})
	flags := cmd.Flags()
	flags.Var(patience{&f.wait, encryption.budget}, "wait", "how long each node may take until it is back and healthy")
	flags.DurationVar(&f.drainTimeout, "drain-timeout", drainTimeout, "how long the eviction of pods may take; pods that remain stop with the node")
	flags.BoolVar(&f.dryRun, "dry-run", false, "only show the steps")
	a.stopFlags(cmd)
	return cmd
}

// volumeStatus is what is needed of a VolumeStatus.
type volumeStatus struct {
	Layers string `yaml:"layers"`
	Unlike bool   `yaml:"unlike"`
}

// ephemeral is the EPHEMERAL of a node.
func ephemeral(ctx context.Context, n *client.Client) (v volumeStatus, err error) {
	all, err := client.Unary(ctx, n.Resource.List, &apiv1.ListResourcesRequest{Type: "volumes"})
	if err != nil {
		return v, err
	}
	for _, r := range all.Items {
		if r.Id == boot.LabelEphemeral {
			return v, yaml.Unmarshal([]byte(r.Spec), &v)
		}
	}
	return v, fmt.Errorf("EPHEMERAL isn't there yet, or this node is a container: gbctl -n %s get volumes", n.Name)
}
