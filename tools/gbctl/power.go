package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"
)

const (
	// restartBudget is the time that a machine may take until it answers again. Servers
	// with much memory test it for minutes before they boot.
	restartBudget = 15 * time.Minute
	// proveBudget is longer than a system whose data is wiped has to become healthy (30 minutes), with the restart
	// before, and the one to the former system after it.
	proveBudget = 30*time.Minute + 2*restartBudget
	// stopBudget is longer than a node needs to stop all services in order.
	stopBudget = 5 * time.Minute
	// probeTimeout limits a status request to a node that may be off.
	probeTimeout = 3 * time.Second
	// offProbes is the number of failed probes in a row after which a node counts as off.
	offProbes = 2
	// planTimeout is longer than a node needs to check with the cluster whether the
	// operation is safe.
	planTimeout = 2 * time.Minute
	// drainTimeout is the default of the nodes for the eviction of pods.
	drainTimeout = 5 * time.Minute
)

// powerFlags are the flags of reboot and shutdown.
type powerFlags struct {
	force, drain, dryRun, stage, preserve, older bool
	wait, drainTimeout                           time.Duration // wait is 0 without --wait
	image                                        string
}

func (f *powerFlags) add(cmd *cobra.Command, wait string, usual time.Duration) {
	flags := cmd.Flags()
	flags.Var(patience{&f.wait, usual}, "wait", wait+", at most this long")
	flags.Lookup("wait").NoOptDefVal = usual.String()
	flags.BoolVar(&f.drain, "drain", true, "evict the pods first, if other nodes can run them")
	flags.DurationVar(&f.drainTimeout, "drain-timeout", drainTimeout, "how long the eviction of pods may take; pods that remain stop with the node")
	flags.BoolVar(&f.force, "force", false, "don't evict pods, and don't check the other nodes")
	flags.BoolVar(&f.dryRun, "dry-run", false, "only show the steps")
}

// A restart is a command that restarts nodes, or turns them off.
type restart struct {
	use, now, back string
	budget         time.Duration // of --wait
	wait           bool          // by default
	off            bool          // the nodes stay off
	image          bool          // it takes the system of an image
	stage          bool          // it can leave the restart to others
	proves         bool          // the operation itself sees that the node is as healthy as before
	start          func(f powerFlags) question[*apiv1.Operation]
}

var restarts = []restart{
	{use: "reboot", now: "reboots now", back: "is back and healthy", budget: restartBudget, start: func(f powerFlags) question[*apiv1.Operation] {
		return starting(operationAPI.Reboot, &apiv1.RebootRequest{
			Force: f.force, KeepPods: !f.drain, DrainTimeout: durationpb.New(f.drainTimeout), DryRun: f.dryRun,
		})
	}},
	{use: "upgrade", now: "restarts with the new system", back: "is back and healthy with the new system", budget: proveBudget, wait: true, image: true, stage: true, proves: true, start: func(f powerFlags) question[*apiv1.Operation] {
		return starting(operationAPI.UpgradeSystem, &apiv1.UpgradeSystemRequest{
			Force: f.force, KeepPods: !f.drain, DrainTimeout: durationpb.New(f.drainTimeout), DryRun: f.dryRun, Image: f.image, Stage: f.stage, Wipe: !f.preserve, AllowOlder: f.older,
		})
	}},
	{use: "rollback", now: "restarts with the other system", back: "is back and healthy with the other system", budget: proveBudget, wait: true, proves: true, start: func(f powerFlags) question[*apiv1.Operation] {
		return starting(operationAPI.RollbackSystem, &apiv1.RollbackSystemRequest{
			Force: f.force, KeepPods: !f.drain, DrainTimeout: durationpb.New(f.drainTimeout), DryRun: f.dryRun,
		})
	}},
	{use: "install", now: "restarts from its disk", back: "is back and healthy, and runs from its disk", budget: proveBudget, wait: true, image: true, proves: true, start: func(f powerFlags) question[*apiv1.Operation] {
		return starting(operationAPI.InstallSystem, &apiv1.InstallSystemRequest{
			Force: f.force, KeepPods: !f.drain, DrainTimeout: durationpb.New(f.drainTimeout), DryRun: f.dryRun, Image: f.image, AllowOlder: f.older,
		})
	}},
	{use: "shutdown", now: "powers off now", budget: stopBudget, off: true, start: func(f powerFlags) question[*apiv1.Operation] {
		return starting(operationAPI.Shutdown, &apiv1.ShutdownRequest{
			Force: f.force, KeepPods: !f.drain, DrainTimeout: durationpb.New(f.drainTimeout), DryRun: f.dryRun,
		})
	}},
}

func (a *app) restartCommand(r restart) *cobra.Command {
	var f powerFlags
	if r.wait {
		f.wait = r.budget
	}
	cmd := command(r.use, func(cmd *cobra.Command, _ []string) error {
		a.raiseTimeout(cmd, planTimeout)
		if err := a.named(cmd.Context(), cmd.CommandPath(), f.dryRun, false); err != nil {
			return err
		}
		nodes, err := a.targets(cmd.Context())
		if err != nil {
			return err
		}
		if f.wait <= 0 && len(nodes) > 1 && !f.force && !r.off {
			f.wait = r.budget
		}
		return a.rolling(cmd.Context(), f.dryRun, func(ctx context.Context, n *client.Client) error { return a.restart(ctx, n, r, f) })
	})
	until := "back and healthy"
	if r.off {
		until = "off"
	}
	f.add(cmd, "wait until each node is "+until, r.budget)
	a.stopFlags(cmd)
	if r.image {
		cmd.Flags().StringVar(&f.image, "image", "", "installer image with the system, such as registry.example/garboard-os/installer:v1.2.0 (default: the medium in the machine)")
		cmd.Flags().BoolVar(&f.older, "allow-older", false, "take a release that is older than one that was healthy on the machine")
	}
	if r.stage {
		cmd.Flags().BoolVar(&f.preserve, "preserve", true, "keep images, pods' data and etcd's; with --preserve=false, the node leaves etcd, wipes them, and joins the cluster again")
		cmd.Flags().BoolVar(&f.stage, "stage", false, "don't restart the nodes: the new system starts at their next restart, whatever its reason")
	}
	return cmd
}

func (a *app) restart(ctx context.Context, n *client.Client, r restart, f powerFlags) error {
	var before *apiv1.NodeStatusResponse
	if f.wait > 0 && !f.dryRun && !r.off {
		var err error
		if before, err = asked(ctx, a, n, status); err != nil {
			return err
		}
	}
	start := time.Now()
	id, err := a.begin(ctx, n, f.dryRun, r.start(f))
	if err != nil || f.dryRun {
		return err
	}
	if f.stage {
		fmt.Fprintf(a.out, "%s: the new system starts at the next restart\n", n.Name)
		return nil
	}
	fmt.Fprintf(a.out, "%s: %s\n", n.Name, r.now)
	switch {
	case f.wait <= 0:
		return nil
	case r.off:
		return a.waitOff(ctx, n.Name, f.wait)
	}
	if err := a.waitBack(ctx, n.Name, before.BootId, f.wait, func(ctx context.Context, s *apiv1.NodeStatusResponse) error {
		known, err := a.operationEnded(ctx, n.Name, id)
		if known && err == nil && r.proves || errors.As(err, new(endedBadly)) {
			return err
		}
		return cmp.Or(healthyAs(before, s), err)
	}); errors.As(err, new(notHealthy)) {
		return fmt.Errorf("%w; gbctl -n %s doctor tells the cause, and once it is mended, the same command goes on", err, n.Name)
	} else if err != nil {
		return err
	}
	fmt.Fprintf(a.out, "%s: %s after %s\n", n.Name, r.back, span(time.Since(start)))
	return nil
}

// waitBack waits until a node has another boot ID than before, and check returns no error. If before is empty, the node
// needn't restart.
func (a *app) waitBack(ctx context.Context, node, before string, budget time.Duration, check func(context.Context, *apiv1.NodeStatusResponse) error) error {
	return a.retryUntil(ctx, node, budget, func(ctx context.Context) error {
		s, err := a.probe(ctx, node)
		switch {
		case err != nil:
			return err
		case before != "" && s.BootId == before:
			return errors.New("shuts down")
		}
		return check(ctx, s)
	})
}

// endedBadly is the error of an operation that has failed: waiting doesn't change it.
type endedBadly struct{ error }

// operationEnded returns no error when an operation is done on a node that has restarted, or isn't known there any
// more. A node whose etcd doesn't run lists its operations only after it has waited for etcd's.
func (a *app) operationEnded(ctx context.Context, node, id string) (known bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, a.timeout)
	defer cancel()
	err = a.withClient(ctx, node, func(ctx context.Context, n *client.Client) error {
		all, err := operations(ctx, n)
		if err != nil {
			return err
		}
		for _, o := range all.Operations {
			switch {
			case o.Id != id:
				continue
			case o.Ended == nil:
				return fmt.Errorf("%s hasn't ended yet", id)
			case o.State != apiv1.Operation_STATE_DONE:
				return endedBadly{fmt.Errorf("%s has failed: %s", id, here(node, visible(o.Error)))}
			}
			known = true
		}
		return nil
	})
	return known, err
}

// waitOff waits until a node doesn't answer any more. A busy node may miss one probe.
func (a *app) waitOff(ctx context.Context, node string, budget time.Duration) error {
	missed := 0
	if err := a.retryUntil(ctx, node, budget, func(ctx context.Context) error {
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

// stepIs reports whether a step of an operation is in a state.
func stepIs(o *apiv1.Operation, step string, state apiv1.OperationStep_State) bool {
	return slices.ContainsFunc(o.Steps, func(s *apiv1.OperationStep) bool { return s.Id == step && s.State == state })
}

// atLastStep reports whether an operation has reached the step that stops the node.
func atLastStep(o *apiv1.Operation) bool { return stepIs(o, "end", apiv1.OperationStep_STATE_DONE) }

// begin starts an operation on a node, and follows it to its end, or to the step that stops
// the node. In a dry run it only prints the plan.
func (a *app) begin(ctx context.Context, n *client.Client, dryRun bool, start question[*apiv1.Operation]) (id string, err error) {
	o, err := a.started(ctx, n, dryRun, start)
	if o == nil {
		return "", err
	}
	return o.Id, a.follower(n.Name, o.Id, atLastStep).run(ctx)
}

// started is the operation that a question starts on a node. In a dry run it prints the plan, and is nil.
func (a *app) started(ctx context.Context, n *client.Client, dryRun bool, start question[*apiv1.Operation]) (*apiv1.Operation, error) {
	o, err := asked(ctx, a, n, start)
	if err != nil || !dryRun {
		return o, err
	}
	fmt.Fprint(a.out, plan(n.Name, o))
	return nil, nil
}

// plan formats the steps of a dry run.
func plan(node string, o *apiv1.Operation) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: the steps of %s would be:\n", node, visible(o.Name))
	width := 9
	for _, s := range o.Steps {
		width = max(width, len(s.Id)+1)
	}
	for _, s := range o.Steps {
		fmt.Fprintf(&b, "  %-*s%s", width, visible(s.Id), visible(s.What))
		if d := s.Deadline.AsDuration(); s.Optional {
			fmt.Fprintf(&b, " (at most %s, then skipped)\n", d)
		} else {
			fmt.Fprintf(&b, " (at most %s)\n", d)
		}
	}
	for _, w := range o.Warnings {
		fmt.Fprintf(&b, "  note: %s\n", here(node, visible(w)))
	}
	return b.String()
}

// probe gets the status of a node over a new connection: an existing one may not notice
// that the node is off.
func (a *app) probe(ctx context.Context, node string) (s *apiv1.NodeStatusResponse, err error) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	err = a.withClient(ctx, node, func(ctx context.Context, n *client.Client) error {
		s, err = status(ctx, n)
		return err
	})
	return s, err
}

// retryUntil repeats a check of a node until it returns nil. It prints each new error to
// standard error.
func (a *app) retryUntil(ctx context.Context, node string, budget time.Duration, check func(context.Context) error) error {
	deadline := time.Now().Add(budget)
	var retries retryLog
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if errors.As(err, new(endedBadly)) {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("not within %s: %w", budget, err)
		}
		retries.print(a.notes(), fmt.Errorf("%s: %w", node, err))
		if err := pause(ctx, pollInterval); err != nil {
			return err
		}
	}
}
