//go:build linux

package main

import (
	"context"
	"fmt"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/network"
	"github.com/spf13/cobra"
)

func (a *app) clusterDebugCommand() *cobra.Command {
	cmd := group("debug")
	for _, verb := range []struct {
		name, done string
		do         func(*qemu.Cluster, context.Context, string) error
	}{
		{"on", "is on", (*qemu.Cluster).On},
		{"off", "is off", (*qemu.Cluster).Off},
		{"cut", "has no power", (*qemu.Cluster).Cut},
		{"freeze", "is frozen", (*qemu.Cluster).Freeze},
		{"thaw", "runs again", (*qemu.Cluster).Thaw},
		{"nmi", "got a nonmaskable interrupt", (*qemu.Cluster).Interrupt},
	} {
		cmd.AddCommand(nodeCommand(verb.name, func(ctx context.Context, c *qemu.Cluster, node string) error {
			if err := verb.do(c, ctx, node); err != nil {
				return err
			}
			_, err := fmt.Fprintf(a.out, "%s %s\n", node, verb.done)
			return err
		}))
	}
	cmd.AddCommand(a.clusterNetworkCommand(), a.clusterClockCommand(), a.clusterEndpointCommand())
	return cmd
}

// nodeCommand makes a command for a node of a cluster that runs.
func nodeCommand(use string, do func(ctx context.Context, c *qemu.Cluster, node string) error) *cobra.Command {
	var name string
	return nameFlag(command(use+" NODE", func(cmd *cobra.Command, args []string) error {
		c, err := openRunning(name)
		if err != nil {
			return err
		}
		node, err := c.Find(args[0])
		if err != nil {
			return err
		}
		return do(cmd.Context(), c, node.Name)
	}), &name)
}

// openRunning opens a cluster that runs.
func openRunning(name string) (*qemu.Cluster, error) {
	c, err := openCluster(name)
	if err != nil {
		return nil, err
	}
	pid, err := c.HostPID()
	if err == nil && pid == 0 {
		err = fmt.Errorf("cluster %s is off; 'gbctl cluster create --name %s' starts it", name, name)
	}
	return c, err
}

func (a *app) clusterClockCommand() *cobra.Command {
	var offset time.Duration
	cmd := nodeCommand("clock", func(ctx context.Context, c *qemu.Cluster, node string) error {
		if err := c.SetClock(ctx, node, offset); err != nil {
			return err
		}
		fmt.Fprintf(a.out, "clock of %s: %s off, from its next start\n", node, offset)
		return nil
	})
	cmd.Flags().DurationVar(&offset, "offset", 0, "how far the clock is ahead, or behind if negative, such as 90s or -8760h")
	return cmd
}

func (a *app) clusterEndpointCommand() *cobra.Command {
	var name string
	cmd := command("endpoint on|off", func(cmd *cobra.Command, args []string) error {
		c, err := openRunning(name)
		if err != nil {
			return err
		}
		if err := c.SetEndpoint(cmd.Context(), args[0] == "on"); err != nil {
			return err
		}
		_, err = fmt.Fprintf(a.out, "endpoint of %s: %s for its nodes\n", c.Name, args[0])
		return err
	})
	cmd.ValidArgs, cmd.Args = []string{"on", "off"}, cobra.MatchAll(cobra.ExactArgs(1), cobra.OnlyValidArgs)
	return nameFlag(cmd, &name)
}

func (a *app) clusterNetworkCommand() *cobra.Command {
	var to network.Conditions
	var percent float64
	cmd := nodeCommand("network", func(ctx context.Context, c *qemu.Cluster, node string) error {
		if percent < 0 || percent > 100 {
			return usagef("--loss %g: must be a percentage from 0 to 100", percent)
		}
		to.Loss = percent / 100
		for _, names := range [][]string{to.CutFrom, to.DeafTo} {
			for i, name := range names {
				other, err := c.Find(name)
				if err != nil {
					return err
				}
				names[i] = other.Name
			}
		}
		if err := c.SetNetwork(ctx, node, to); err != nil {
			return err
		}
		fmt.Fprintf(a.out, "network of %s: %s\n", node, to)
		return nil
	})
	f := cmd.Flags()
	f.BoolVar(&to.Off, "off", false, "disconnect it from all others")
	f.StringSliceVar(&to.CutFrom, "cut-from", nil, "disconnect it from these nodes, separated by commas")
	f.StringSliceVar(&to.DeafTo, "deaf-to", nil, "drop what these nodes send to it; it still reaches them")
	f.DurationVar(&to.Delay, "delay", 0, "delay in each direction, such as 100ms; at most "+network.MaxDelay.String())
	f.DurationVar(&to.Jitter, "jitter", 0, "maximum of the random additional delay; at most "+network.MaxDelay.String())
	f.Float64Var(&percent, "loss", 0, "percentage of lost frames in each direction, from 0 to 100")
	return cmd
}
