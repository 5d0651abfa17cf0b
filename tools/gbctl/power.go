package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/spf13/cobra"
)

const (
	// restartBudget is how long a machine may take until it answers again. Servers
	// with much memory test it for minutes before they start anything.
	restartBudget = 15 * time.Minute
	// stopBudget is longer than a node takes to stop all services in order.
	stopBudget = 5 * time.Minute
	// probeTimeout bounds one look at a node that may be gone.
	probeTimeout = 3 * time.Second
)

func (a *app) rebootCommand() *cobra.Command {
	var wait bool
	cmd := &cobra.Command{
		Use:   "reboot",
		Short: "Restart machines",
		Long: `Stop all services of nodes in order, and restart the machines.

With --wait, a node is waited for until it has come back and is well before the
next one is asked: no two are down at the same time. Stop waiting with Ctrl-C.`,
		Example: `  gbctl -n 10.5.0.2 reboot
  gbctl -n 10.5.0.2,10.5.0.3 reboot --wait`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			call := func(ctx context.Context, n *client.Client) error { return a.reboot(ctx, n, wait) }
			return a.oneByOne(cmd.Context(), call)
		},
	}
	cmd.Flags().BoolVar(&wait, "wait", false, "wait for each node to be back and well")
	return cmd
}

func (a *app) reboot(ctx context.Context, n *client.Client, wait bool) error {
	before := ""
	if wait {
		s, err := a.probe(ctx, n.Name)
		if err != nil {
			return err
		}
		before = s.BootId
	}
	start := time.Now()
	if err := a.power(ctx, n.Name, func(ctx context.Context) error {
		_, err := n.Node.Reboot(ctx, connect.NewRequest(&apiv1.RebootRequest{}))
		return err
	}); err != nil {
		return err
	}
	fmt.Fprintf(a.out, "%s: reboots now\n", n.Name)
	if !wait {
		return nil
	}
	if err := a.until(ctx, restartBudget, func(ctx context.Context) error {
		s, err := a.probe(ctx, n.Name)
		switch {
		case err != nil:
			return err
		case s.BootId == before:
			return errors.New("goes down")
		case sick(s) != "":
			return errors.New(sick(s))
		}
		return nil
	}); err != nil {
		return err
	}
	fmt.Fprintf(a.out, "%s: is back and well after %s\n", n.Name, span(time.Since(start)))
	return nil
}

func (a *app) shutdownCommand() *cobra.Command {
	var wait bool
	cmd := &cobra.Command{
		Use:   "shutdown",
		Short: "Power machines off",
		Long: `Stop all services of nodes in order, and power the machines off.

With --wait, each is waited for until it doesn't answer any more.`,
		Example: `  gbctl -n 10.5.0.3 shutdown --wait`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			call := func(ctx context.Context, n *client.Client) error { return a.shutdown(ctx, n, wait) }
			return a.oneByOne(cmd.Context(), call)
		},
	}
	cmd.Flags().BoolVar(&wait, "wait", false, "wait for each node to be gone")
	return cmd
}

func (a *app) shutdown(ctx context.Context, n *client.Client, wait bool) error {
	if err := a.power(ctx, n.Name, func(ctx context.Context) error {
		_, err := n.Node.Shutdown(ctx, connect.NewRequest(&apiv1.ShutdownRequest{}))
		return err
	}); err != nil {
		return err
	}
	fmt.Fprintf(a.out, "%s: powers off now\n", n.Name)
	if !wait {
		return nil
	}
	if err := a.until(ctx, stopBudget, func(ctx context.Context) error {
		if _, err := a.probe(ctx, n.Name); exitCode(err) == codeUnreachable {
			return nil
		} else if err != nil {
			return err
		}
		return errors.New("still answers")
	}); err != nil {
		return err
	}
	fmt.Fprintf(a.out, "%s: is off\n", n.Name)
	return nil
}

func (a *app) power(ctx context.Context, node string, call func(context.Context) error) error {
	ctx, done := a.request(ctx, node)
	defer done()
	return call(ctx)
}

// probe looks at a node over a connection of its own: the one that there was may
// not have noticed that its other end is gone.
func (a *app) probe(ctx context.Context, node string) (s *apiv1.NodeStatusResponse, err error) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	err = a.with(ctx, node, func(ctx context.Context, n *client.Client) error {
		s, err = status(ctx, n)
		return err
	})
	return s, err
}

// until repeats a look until it finds nothing to wait for. Each new reason goes
// to a person on standard error.
func (a *app) until(ctx context.Context, budget time.Duration, look func(context.Context) error) error {
	deadline := time.Now().Add(budget)
	var tell retrying
	for {
		err := look(ctx)
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("not within %s: %w", budget, err)
		}
		tell.say(a.err, err)
		if err := pause(ctx, poll); err != nil {
			return err
		}
	}
}
