package main

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"
)

// wipedData describes the data on each partition that can be wiped.
var wipedData = map[string]string{
	boot.LabelState:     "its configuration, identity and keys",
	boot.LabelEphemeral: "its images, the data of pods on it, and its copy of the etcd data",
}

func (a *app) resetCommand() *cobra.Command {
	r := &apiv1.ResetRequest{}
	var graceful bool
	var timeout time.Duration
	cmd := command("reset", func(cmd *cobra.Command, _ []string) error {
		for _, label := range r.SystemLabelsToWipe {
			if !slices.Contains(boot.WipeLabels, label) {
				return usagef("--system-labels-to-wipe %s: must be %s", label, strings.Join(boot.WipeLabels, " or "))
			}
		}
		if r.WipeMode != "" && !slices.Contains(boot.WipeModes, r.WipeMode) {
			return usagef("--wipe-mode %s: must be %s", r.WipeMode, strings.Join(boot.WipeModes, ", "))
		}
		if slices.ContainsFunc(r.UserDisksToWipe, func(disk string) bool { return !path.IsAbs(disk) }) {
			return usagef("--user-disks-to-wipe %s: must be paths of devices, such as /dev/sdb", strings.Join(r.UserDisksToWipe, ","))
		}
		if err := a.named(cmd.Context(), cmd.CommandPath(), r.DryRun, true); err != nil {
			return err
		}
		if len(r.UserDisksToWipe) > 0 { // disks of different nodes have the same names
			if _, err := a.single(cmd.Context(), "--user-disks-to-wipe"); err != nil {
				return err
			}
		}
		a.raiseTimeout(cmd, planTimeout)
		r.Force, r.DrainTimeout = !graceful, durationpb.New(timeout)
		if !a.yes && !r.DryRun {
			if err := a.confirmReset(cmd.Context(), r); err != nil {
				return err
			}
		}
		return a.rolling(cmd.Context(), r.DryRun, func(ctx context.Context, n *client.Client) error { return a.reset(ctx, n, r) })
	})
	f := cmd.Flags()
	f.BoolVar(&graceful, "graceful", true, "cordon and drain the node, and remove its etcd member")
	f.BoolVar(&r.Reboot, "reboot", false, "reboot the node after the reset instead of powering it off")
	f.StringSliceVar(&r.SystemLabelsToWipe, "system-labels-to-wipe", nil, "wipe only this partition: "+strings.Join(boot.WipeLabels, " or ")+"; repeatable (default all)")
	f.StringSliceVar(&r.UserDisksToWipe, "user-disks-to-wipe", nil, "also wipe this disk, such as /dev/sdb; repeatable")
	f.StringVar(&r.WipeMode, "wipe-mode", "", "how: "+strings.Join(boot.WipeModes, ", ")+" (default: what the disk does in a short time)")
	f.DurationVar(&timeout, "drain-timeout", drainTimeout, "how long the eviction of pods may take; pods that remain stop with the node")
	f.BoolVar(&r.DryRun, "dry-run", false, "only show the steps")
	a.stopFlags(cmd)
	_ = cmd.RegisterFlagCompletionFunc("system-labels-to-wipe", cobra.FixedCompletions(boot.WipeLabels, cobra.ShellCompDirectiveNoFileComp))
	_ = cmd.RegisterFlagCompletionFunc("wipe-mode", cobra.FixedCompletions(boot.WipeModes, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func (a *app) reset(ctx context.Context, n *client.Client, r *apiv1.ResetRequest) error {
	_, err := a.begin(ctx, n, r.DryRun, starting(operationAPI.Reset, r))
	if err != nil || r.DryRun {
		return err
	}
	then := "powers off"
	if r.Reboot {
		then = "reboots"
	}
	fmt.Fprintf(a.out, "%s: shuts down and is wiped, then %s\n", n.Name, then)
	return nil
}

// confirmReset asks for confirmation. Data that is lost for good isn't lost unasked.
func (a *app) confirmReset(ctx context.Context, r *apiv1.ResetRequest) error {
	if !interactive(a.in) || !interactive(a.err) {
		return usagef("nothing was done: reset asks for confirmation, and standard input or standard error isn't a terminal; use --yes to reset without a question")
	}
	nodes, err := a.targets(ctx)
	if err != nil {
		return err
	}
	return a.ask(ctx, resetQuestion(nodes, r)+"\nreset?")
}

// resetQuestion describes the data that is lost.
func resetQuestion(nodes []string, r *apiv1.ResetRequest) string {
	var lost []string
	for _, label := range boot.WipeLabels {
		if len(r.SystemLabelsToWipe) == 0 || slices.Contains(r.SystemLabelsToWipe, label) {
			lost = append(lost, wipedData[label])
		}
	}
	if len(r.UserDisksToWipe) > 0 {
		lost = append(lost, "all data on "+strings.Join(r.UserDisksToWipe, ", "))
	}
	subject := "Node " + nodes[0] + " loses"
	if len(nodes) > 1 {
		subject = "Nodes " + strings.Join(nodes, ", ") + " lose, each,"
	}
	question := fmt.Sprintf("%s for good: %s.", subject, strings.Join(lost, "; "))
	if slices.Equal(r.SystemLabelsToWipe, []string{boot.LabelState}) {
		question += " An EPHEMERAL that the TPM opens needs its recovery key then."
	}
	return question
}
