package main

import (
	"context"
	"fmt"
	"strconv"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/spf13/cobra"
)

func (a *app) confirmCommand() *cobra.Command {
	return command("confirm", func(cmd *cobra.Command, _ []string) error {
		return a.sequential(cmd.Context(), a.limited(func(ctx context.Context, n *client.Client) error {
			_, err := n.Config.Confirm(ctx, connect.NewRequest(&apiv1.ConfirmConfigRequest{}))
			if err == nil {
				fmt.Fprintf(a.out, "confirmed mc at the node %s\n", n.Name)
			}
			return err
		}))
	})
}

func (a *app) historyCommand() *cobra.Command {
	head := []string{"VERSION", "CURRENT", "TIME", "BY", "MODE", "CHANGED"}
	return listCommand(a, "history", head, history, rowsOf((*apiv1.ConfigHistoryResponse).GetVersions, func(v *apiv1.ConfigVersion) []string {
		return []string{strconv.FormatUint(v.Version, 10), yes(v.Current), v.Time.AsTime().UTC().Format("2006-01-02T15:04:05Z"), v.By, word(v.Mode, modePrefix), v.Summary}
	}))
}

var history = asking(ofConfig, configAPI.History, &apiv1.ConfigHistoryRequest{})

// version parses the optional argument VERSION; 0 means none.
func version(args []string) (uint64, error) {
	if len(args) == 0 {
		return 0, nil
	}
	n, err := strconv.ParseUint(args[0], 10, 64)
	if err != nil || n == 0 {
		return 0, usagef("%q isn't a version; 'gbctl config history' lists them", args[0])
	}
	return n, nil
}

func (a *app) showCommand() *cobra.Command {
	r := &apiv1.GetConfigRequest{}
	cmd := command("show [VERSION]", func(cmd *cobra.Command, args []string) (err error) {
		if r.Version, err = version(args); err != nil {
			return err
		}
		return a.one(cmd.Context(), "config show", func(ctx context.Context, n *client.Client) error {
			m, err := client.Unary(ctx, n.Config.Get, r)
			if err != nil {
				return err
			}
			if m.TryUntil != nil {
				fmt.Fprintf(a.err, "%s: note: a change is being tried; it is undone at %s, unless confirmed with 'gbctl -n %s config confirm'\n", n.Name, stamp(m.TryUntil.AsTime()), n.Name)
			}
			if m.Staged {
				fmt.Fprintf(a.err, "%s: note: another configuration is staged for the next reboot\n", n.Name)
			}
			_, err = a.out.Write(m.Document)
			return err
		})
	})
	cmd.Flags().BoolVar(&r.Redact, "redact", false, "redact secrets")
	return cmd
}

func (a *app) rollbackCommand() *cobra.Command {
	change := &configChange{app: a, done: "rolled back"}
	cmd := command("rollback [VERSION]", func(cmd *cobra.Command, args []string) error {
		v, err := version(args)
		if err != nil {
			return err
		}
		return change.onEach(cmd, func(ctx context.Context, n *client.Client) (*apiv1.ApplyConfigResponse, error) {
			return asked(ctx, a, n, asking(ofConfig, configAPI.Rollback, &apiv1.RollbackConfigRequest{
				Version: v, Mode: change.mode, TryTimeout: change.tryTimeout(), DryRun: change.dryRun,
			}))
		})
	})
	change.add(cmd)
	return cmd
}
