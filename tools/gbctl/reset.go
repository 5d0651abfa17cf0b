package main

import (
	"context"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/spf13/cobra"
	"golang.org/x/term"
	"google.golang.org/protobuf/types/known/durationpb"
)

// wipedData is what goes with each of the partitions that can be wiped.
var wipedData = map[string]string{
	boot.LabelState:     "its configuration, its identity and its keys",
	boot.LabelEphemeral: "its images, the data that pods keep on it, and its copy of etcd's data",
}

func (a *app) resetCommand() *cobra.Command {
	r := &apiv1.ResetRequest{}
	var graceful, yes bool
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "reset",
		Short: "Take nodes out of their cluster, and wipe them",
		Long: `Take nodes out of their cluster, and wipe them. There is no way back.

A graceful reset cordons and drains the node, removes it from Kubernetes, and leaves
etcd if it is a control plane; then its disk is wiped, and it powers off. What doesn't
answer is skipped when its time is up, and that is said. Wiping is the last thing that
the node does: if it can't, its console says so, and its next boot wipes.

A reset is refused where etcd can't do without the node's member, as without the last
one. --graceful=false asks nobody, and leaves nothing in order: 'kubectl delete node'
and 'gbctl etcd remove-member' do that from elsewhere.

Other disks than the system's are left alone, unless --user-disks-to-wipe names them,
as 'gbctl disks' shows them or by a link to them: then all that is on them is lost. A
disk that something else than a pod uses is refused. One without a serial number is
left as it is if the node's power goes first: nothing tells the next boot which it was.

Without STATE, a node waits in maintenance mode for a configuration, unless it finds
one where it found the first. With only EPHEMERAL wiped, it keeps its configuration,
and joins its cluster anew.

Several nodes are reset one after another; after one that fails, nothing is done to
the next. A person at a terminal is asked first.`,
		Example: `  gbctl -n 10.5.0.4 reset --dry-run
  gbctl -n 10.5.0.4 reset
  gbctl -n 10.5.0.4 reset --system-labels-to-wipe EPHEMERAL --reboot
  gbctl -n 10.5.0.4 reset --user-disks-to-wipe /dev/sdb,/dev/sdc
  gbctl -n 10.5.0.4 reset --graceful=false --yes`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			for _, label := range r.SystemLabelsToWipe {
				if !slices.Contains(boot.WipeLabels, label) {
					return usagef("--system-labels-to-wipe %s: must be %s", label, strings.Join(boot.WipeLabels, " or "))
				}
			}
			if slices.ContainsFunc(r.UserDisksToWipe, func(disk string) bool { return !path.IsAbs(disk) }) {
				return usagef("--user-disks-to-wipe %s: must be devices, such as /dev/sdb", strings.Join(r.UserDisksToWipe, ","))
			}
			if len(r.UserDisksToWipe) > 0 { // another node's disks have the same names
				if _, err := a.single(cmd.Context(), "--user-disks-to-wipe"); err != nil {
					return err
				}
			}
			a.raiseTimeout(cmd, planTimeout)
			r.Force, r.DrainTimeout = !graceful, durationpb.New(timeout)
			if !yes && !r.DryRun {
				if err := a.confirmReset(cmd.Context(), r); err != nil {
					return err
				}
			}
			return a.rolling(cmd.Context(), r.DryRun, func(ctx context.Context, n *client.Client) error { return a.reset(ctx, n, r) })
		},
	}
	f := cmd.Flags()
	f.BoolVar(&graceful, "graceful", true, "cordon and drain the node, and leave etcd (if applicable)")
	f.BoolVar(&r.Reboot, "reboot", false, "reboot the node after the reset, instead of powering it off")
	f.StringSliceVar(&r.SystemLabelsToWipe, "system-labels-to-wipe", nil, "wipe only this partition: "+strings.Join(boot.WipeLabels, " or ")+"; repeatable (default all)")
	f.StringSliceVar(&r.UserDisksToWipe, "user-disks-to-wipe", nil, "wipe this disk besides the system's, such as /dev/sdb; repeatable")
	f.DurationVar(&timeout, "drain-timeout", drainTimeout, "how long pods may take to end; what is left then ends with the node")
	f.BoolVar(&r.DryRun, "dry-run", false, "only show what would be done")
	f.BoolVarP(&yes, "yes", "y", false, "don't ask")
	_ = cmd.RegisterFlagCompletionFunc("system-labels-to-wipe", cobra.FixedCompletions(boot.WipeLabels, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func (a *app) reset(ctx context.Context, n *client.Client, r *apiv1.ResetRequest) error {
	id, err := a.begin(ctx, n, r.DryRun, func(ctx context.Context) (*apiv1.Operation, error) {
		m, err := message(n.Node.Reset(ctx, connect.NewRequest(r)))
		return m.GetOperation(), err
	})
	if err != nil || r.DryRun {
		return err
	}
	if err := a.followTo(ctx, n.Name, id, atLastStep); err != nil {
		return err
	}
	then := "powers off"
	if r.Reboot {
		then = "reboots"
	}
	fmt.Fprintf(a.out, "%s: goes down to be wiped, and then %s\n", n.Name, then)
	return nil
}

// confirmReset asks a person who is there to be asked.
func (a *app) confirmReset(ctx context.Context, r *apiv1.ResetRequest) error {
	in, ok := a.in.(*os.File)
	if !ok || !term.IsTerminal(int(in.Fd())) {
		return nil
	}
	if !interactive(a.err) {
		return usagef("nothing was done: the question whether to reset can't be asked, because standard error isn't a terminal; --yes says that it needn't be")
	}
	nodes, err := a.targets(ctx)
	if err != nil {
		return err
	}
	return a.confirm(ctx, resetQuestion(nodes, r)+"\nReset?")
}

// confirm is nil if a person says yes.
func (a *app) confirm(ctx context.Context, question string) error {
	_, lines := a.userInput()
	fmt.Fprintf(a.err, "%s [y/N] ", question)
	select {
	case <-ctx.Done():
		return ctx.Err()
	case line := <-lines:
		switch strings.ToLower(strings.TrimSpace(line)) {
		case "y", "yes":
			return nil
		}
		return usagef("nothing was done: the answer isn't yes")
	}
}

// resetQuestion is what a person is asked.
func resetQuestion(nodes []string, r *apiv1.ResetRequest) string {
	var lost []string
	for _, label := range boot.WipeLabels {
		if len(r.SystemLabelsToWipe) == 0 || slices.Contains(r.SystemLabelsToWipe, label) {
			lost = append(lost, wipedData[label])
		}
	}
	if len(r.UserDisksToWipe) > 0 {
		lost = append(lost, "all that is on "+strings.Join(r.UserDisksToWipe, ", "))
	}
	subject := "Node " + nodes[0] + " loses"
	if len(nodes) > 1 {
		subject = "Nodes " + strings.Join(nodes, ", ") + " lose, each,"
	}
	return fmt.Sprintf("%s for good: %s.", subject, strings.Join(lost, "; "))
}
