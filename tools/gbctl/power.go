package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"
)

const (
	// restartBudget is how long a machine may take until it answers again. Servers
	// with much memory test it for minutes before they start anything.
	restartBudget = 15 * time.Minute
	// stopBudget is longer than a node takes to stop all services in order.
	stopBudget = 5 * time.Minute
	// probeTimeout bounds one look at a node that may be gone.
	probeTimeout = 3 * time.Second
	// offProbes in a row without an answer are a node that is off.
	offProbes = 2
	// planTimeout is longer than a node takes to ask the cluster what speaks against it.
	planTimeout = 2 * time.Minute
	// drainTimeout is what nodes themselves give pods to end.
	drainTimeout = 5 * time.Minute
)

// powerFlags are how a node goes, for reboot and shutdown.
type powerFlags struct {
	wait, force, drain, dryRun bool
	drainTimeout               time.Duration
}

func (f *powerFlags) add(cmd *cobra.Command, wait string) {
	flags := cmd.Flags()
	flags.BoolVar(&f.wait, "wait", false, wait)
	flags.BoolVar(&f.drain, "drain", true, "first evict the pods, if other nodes can take them")
	flags.DurationVar(&f.drainTimeout, "drain-timeout", drainTimeout, "how long pods may take to end; what is left then ends with the node")
	flags.BoolVar(&f.force, "force", false, "at once, without regard to pods or to other nodes")
	flags.BoolVar(&f.dryRun, "dry-run", false, "only show what would be done")
}

const drainHelp = `The node is emptied first: no new pods come, and those that others would run in its
place are evicted within their disruption budgets, for as long as --drain-timeout.
Pods that belong to nobody, and those of DaemonSets, stay until the node ends. Where
no other node takes pods, none is evicted. It is an operation on the node: Ctrl-C
leaves it to itself, 'gbctl operation attach' follows it again. Only one control plane
of a cluster goes at a time, and none without which its etcd would have no quorum;
workers go when they are told to. --force waits for nobody.
`

func (a *app) rebootCommand() *cobra.Command {
	var f powerFlags
	cmd := &cobra.Command{
		Use:   "reboot",
		Short: "Restart machines",
		Long: `Stop all services of nodes in order, and restart the machines.

` + drainHelp + `
Several nodes are restarted one after another: each is waited for until it has come
back and is well, as with --wait. After one that fails, nothing is done to the next.
Stop waiting with Ctrl-C.`,
		Example: `  gbctl -n 10.5.0.2 reboot
  gbctl -n 10.5.0.2,10.5.0.3 reboot --wait
  gbctl -n 10.5.0.2 reboot --dry-run`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			a.raiseTimeout(cmd, planTimeout)
			nodes, err := a.targets(cmd.Context())
			if err != nil {
				return err
			}
			f.wait = f.wait || len(nodes) > 1 && !f.force
			return a.rolling(cmd.Context(), f.dryRun, func(ctx context.Context, n *client.Client) error { return a.reboot(ctx, n, f) })
		},
	}
	f.add(cmd, "wait for each node to be back and well")
	return cmd
}

func (a *app) reboot(ctx context.Context, n *client.Client, f powerFlags) error {
	before := ""
	if f.wait && !f.dryRun {
		rctx, done := a.request(ctx, n.Name)
		s, err := status(rctx, n)
		done()
		if err != nil {
			return err
		}
		before = s.BootId
	}
	start := time.Now()
	id, err := a.begin(ctx, n, f.dryRun, func(ctx context.Context) (*apiv1.Operation, error) {
		m, err := message(n.Node.Reboot(ctx, connect.NewRequest(&apiv1.RebootRequest{
			Force: f.force, KeepPods: !f.drain, DrainTimeout: durationpb.New(f.drainTimeout), DryRun: f.dryRun,
		})))
		return m.GetOperation(), err
	})
	if err != nil || f.dryRun {
		return err
	}
	if err := a.followTo(ctx, n.Name, id, atLastStep); err != nil {
		return err
	}
	fmt.Fprintf(a.out, "%s: reboots now\n", n.Name)
	if !f.wait {
		return nil
	}
	if err := a.waitBack(ctx, n.Name, before, func(ctx context.Context) error { return a.operationEnded(ctx, n.Name, id) }); err != nil {
		return err
	}
	fmt.Fprintf(a.out, "%s: is back and well after %s\n", n.Name, span(time.Since(start)))
	return nil
}

// waitBack waits until a node has another boot than before, is well, and the last look
// finds nothing to wait for either.
func (a *app) waitBack(ctx context.Context, node, before string, last func(context.Context) error) error {
	return a.retryUntil(ctx, node, restartBudget, func(ctx context.Context) error {
		s, err := a.probe(ctx, node)
		switch {
		case err != nil:
			return err
		case s.BootId == before:
			return errors.New("goes down")
		case unhealthyReason(s) != "":
			return errors.New(unhealthyReason(s))
		}
		return last(ctx)
	})
}

// operationEnded is nil once an operation has ended on a node that has restarted.
func (a *app) operationEnded(ctx context.Context, node, id string) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	return a.withClient(ctx, node, func(ctx context.Context, n *client.Client) error {
		all, err := operations(ctx, n)
		if err != nil {
			return err
		}
		for _, o := range all.Operations {
			if o.Id == id && o.Ended == nil {
				return fmt.Errorf("%s isn't at its end", id)
			}
		}
		return nil
	})
}

func (a *app) shutdownCommand() *cobra.Command {
	var f powerFlags
	cmd := &cobra.Command{
		Use:   "shutdown",
		Short: "Power machines off",
		Long: `Stop all services of nodes in order, and power the machines off.

` + drainHelp + `
With --wait, each is waited for until it doesn't answer any more. After one that
fails, nothing is done to the next. Pods come again once a node is on again.`,
		Example: `  gbctl -n 10.5.0.3 shutdown --wait
  gbctl -n 10.5.0.3 shutdown --force`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			a.raiseTimeout(cmd, planTimeout)
			return a.rolling(cmd.Context(), f.dryRun, func(ctx context.Context, n *client.Client) error { return a.shutdown(ctx, n, f) })
		},
	}
	f.add(cmd, "wait for each node to be gone")
	return cmd
}

func (a *app) shutdown(ctx context.Context, n *client.Client, f powerFlags) error {
	id, err := a.begin(ctx, n, f.dryRun, func(ctx context.Context) (*apiv1.Operation, error) {
		m, err := message(n.Node.Shutdown(ctx, connect.NewRequest(&apiv1.ShutdownRequest{
			Force: f.force, KeepPods: !f.drain, DrainTimeout: durationpb.New(f.drainTimeout), DryRun: f.dryRun,
		})))
		return m.GetOperation(), err
	})
	if err != nil || f.dryRun {
		return err
	}
	if err := a.followTo(ctx, n.Name, id, atLastStep); err != nil {
		return err
	}
	fmt.Fprintf(a.out, "%s: powers off now\n", n.Name)
	if !f.wait {
		return nil
	}
	return a.waitOff(ctx, n.Name)
}

// waitOff waits until a node doesn't answer any more: a busy one may miss a probe.
func (a *app) waitOff(ctx context.Context, node string) error {
	missed := 0
	if err := a.retryUntil(ctx, node, stopBudget, func(ctx context.Context) error {
		_, err := a.probe(ctx, node)
		if exitCode(err) != codeUnreachable {
			missed = 0
			return cmp.Or(err, errors.New("still answers"))
		}
		if missed++; missed < offProbes {
			return errors.New("doesn't answer")
		}
		return nil
	}); err != nil {
		return err
	}
	fmt.Fprintf(a.out, "%s: is off\n", node)
	return nil
}

// atLastStep tells whether an operation is at the step that ends its node.
func atLastStep(o *apiv1.Operation) bool {
	return slices.ContainsFunc(o.Steps, func(s *apiv1.OperationStep) bool {
		return s.Id == "end" && s.State == apiv1.OperationStep_STATE_DONE
	})
}

// begin asks a node for an operation, and returns its ID; or shows its plan, of one
// that hasn't begun.
func (a *app) begin(ctx context.Context, n *client.Client, dryRun bool, ask func(context.Context) (*apiv1.Operation, error)) (id string, err error) {
	rctx, done := a.request(ctx, n.Name)
	defer done()
	o, err := ask(rctx)
	if err != nil {
		return "", err
	}
	if dryRun {
		fmt.Fprint(a.out, plan(n.Name, o))
	}
	return o.GetId(), nil
}

// plan is an operation that hasn't begun, in words.
func plan(node string, o *apiv1.Operation) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s would, step by step:\n", node, visible(o.Name))
	for _, s := range o.Steps {
		fmt.Fprintf(&b, "  %-9s%s", visible(s.Id), visible(s.What))
		if d := s.Deadline.AsDuration(); s.Optional {
			fmt.Fprintf(&b, " (at most %s, then skipped)\n", d)
		} else {
			fmt.Fprintf(&b, " (at most %s)\n", d)
		}
	}
	for _, w := range o.Warnings {
		fmt.Fprintf(&b, "  note: %s\n", visible(w))
	}
	return b.String()
}

// probe looks at a node over a connection of its own: the one that there was may
// not have noticed that its other end is gone.
func (a *app) probe(ctx context.Context, node string) (s *apiv1.NodeStatusResponse, err error) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	err = a.withClient(ctx, node, func(ctx context.Context, n *client.Client) error {
		s, err = status(ctx, n)
		return err
	})
	return s, err
}

// retryUntil repeats a look at a node until it finds nothing to wait for. Each new reason goes
// to a person on standard error.
func (a *app) retryUntil(ctx context.Context, node string, budget time.Duration, look func(context.Context) error) error {
	deadline := time.Now().Add(budget)
	var retries retryLog
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
		retries.print(a.err, fmt.Errorf("%s: %w", node, err))
		if err := pause(ctx, pollInterval); err != nil {
			return err
		}
	}
}
