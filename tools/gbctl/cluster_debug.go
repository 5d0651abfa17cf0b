package main

import (
	"context"
	"fmt"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/network"
	"github.com/spf13/cobra"
)

const clusterDebugLong = `Cause faults of nodes of a development cluster, as they happen to real ones. NODE is the
name of a node, with or without the prefix of the cluster: worker-1 is NAME-worker-1.`

func (a *app) clusterDebugCommand() *cobra.Command {
	cmd := group(&cobra.Command{
		Use:   "debug",
		Short: "Cause faults: turn nodes off, freeze them, disturb network or clock",
		Long:  clusterDebugLong,
	})
	for _, verb := range []struct {
		name, short, done string
		do                func(*qemu.Cluster, context.Context, string) error
	}{
		{"on", "Turn a node on", "is on", (*qemu.Cluster).On},
		{"off", "Shut a node down with its power button, and wait until it is off", "is off", (*qemu.Cluster).Off},
		{"cut", "Cut the power of a node", "has no power", (*qemu.Cluster).Cut},
		{"freeze", "Freeze a node", "is frozen", (*qemu.Cluster).Freeze},
		{"thaw", "Continue a frozen node", "runs again", (*qemu.Cluster).Thaw},
	} {
		var name string
		cmd.AddCommand(nameFlag(&cobra.Command{
			Use:     verb.name + " NODE",
			Short:   verb.short,
			Example: fmt.Sprintf("  gbctl cluster debug %s worker-1", verb.name),
			Args:    cobra.ExactArgs(1),
			RunE: func(cmd *cobra.Command, args []string) error {
				c, node, err := openNode(name, args[0])
				if err != nil {
					return err
				}
				if err := verb.do(c, cmd.Context(), node.Name); err != nil {
					return err
				}
				_, err = fmt.Fprintf(a.out, "%s %s\n", node.Name, verb.done)
				return err
			},
		}, &name))
	}
	cmd.AddCommand(a.clusterNetworkCommand(), a.clusterClockCommand(), a.clusterEndpointCommand())
	return cmd
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

func openNode(cluster, node string) (*qemu.Cluster, qemu.Node, error) {
	c, err := openRunning(cluster)
	if err != nil {
		return nil, qemu.Node{}, err
	}
	n, err := c.Find(node)
	return c, n, err
}

func (a *app) clusterClockCommand() *cobra.Command {
	var name string
	var offset time.Duration
	cmd := nameFlag(&cobra.Command{
		Use:   "clock NODE",
		Short: "Set a wrong clock for a node in QEMU",
		Long: `Set a wrong hardware clock for a node in QEMU. It takes effect when the node starts the
next time, and lasts until the cluster stops. Containers use the clock of this machine.`,
		Example: `  gbctl cluster debug clock worker-1 --offset -8760h   a year behind
  gbctl cluster debug cut worker-1
  gbctl cluster debug on worker-1`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, node, err := openNode(name, args[0])
			if err != nil {
				return err
			}
			if err := c.SetClock(cmd.Context(), node.Name, offset); err != nil {
				return err
			}
			fmt.Fprintf(a.out, "clock of %s: %s off, from its next start\n", node.Name, offset)
			return nil
		},
	}, &name)
	cmd.Flags().DurationVar(&offset, "offset", 0, "how far the clock is ahead, or behind if negative, such as 90s or -8760h")
	return cmd
}

func (a *app) clusterEndpointCommand() *cobra.Command {
	var name string
	return nameFlag(&cobra.Command{
		Use:   "endpoint on|off",
		Short: "Turn the cluster endpoint of the nodes off or on",
		Long: `Turn the load balancer, which is the cluster endpoint of the nodes, off or on. kubectl
on this machine isn't affected.`,
		Example:   "  gbctl cluster debug endpoint off",
		ValidArgs: []string{"on", "off"},
		Args:      cobra.MatchAll(cobra.ExactArgs(1), cobra.OnlyValidArgs),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := openRunning(name)
			if err != nil {
				return err
			}
			if err := c.SetEndpoint(cmd.Context(), args[0] == "on"); err != nil {
				return err
			}
			_, err = fmt.Fprintf(a.out, "endpoint of %s: %s for its nodes\n", c.Name, args[0])
			return err
		},
	}, &name)
}

const clusterNetworkLong = `Set faults of the network of a node. Without flags, all faults are removed. They stay
when the node restarts. The network cable stays connected: the node doesn't notice.`

func (a *app) clusterNetworkCommand() *cobra.Command {
	var name string
	var to network.Conditions
	var percent float64
	cmd := nameFlag(&cobra.Command{
		Use:   "network NODE",
		Short: "Disconnect a node, or delay and drop its packets",
		Long:  clusterNetworkLong,
		Example: `  gbctl cluster debug network controlplane-1 --off
  gbctl cluster debug network worker-1 --cut-from controlplane-1,controlplane-2
  gbctl cluster debug network worker-1 --delay 100ms --jitter 20ms --loss 2.5
  gbctl cluster debug network worker-1                                          remove all faults`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, node, err := openNode(name, args[0])
			if err != nil {
				return err
			}
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
			if err := c.SetNetwork(cmd.Context(), node.Name, to); err != nil {
				return err
			}
			fmt.Fprintf(a.out, "network of %s: %s\n", node.Name, to)
			return nil
		},
	}, &name)
	f := cmd.Flags()
	f.BoolVar(&to.Off, "off", false, "disconnect it from all others")
	f.StringSliceVar(&to.CutFrom, "cut-from", nil, "disconnect it from these nodes, separated by commas")
	f.StringSliceVar(&to.DeafTo, "deaf-to", nil, "drop what these nodes send to it; it still reaches them")
	f.DurationVar(&to.Delay, "delay", 0, "delay in each direction, such as 100ms; at most "+network.MaxDelay.String())
	f.DurationVar(&to.Jitter, "jitter", 0, "maximum of the random additional delay; at most "+network.MaxDelay.String())
	f.Float64Var(&percent, "loss", 0, "percentage of lost frames in each direction, from 0 to 100")
	return cmd
}
