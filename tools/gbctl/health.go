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
	"gopkg.in/yaml.v3"
)

// pollInterval is how often a node is asked that a person waits for: often enough to be
// believed, and seldom enough to be nothing for the node.
const pollInterval = time.Second

func (a *app) healthCommand() *cobra.Command {
	var wait time.Duration
	cmd := &cobra.Command{
		Use:   "health",
		Short: "Show whether all services are up, and what they wait for",
		Long: `Show whether all services of nodes are up, and what they wait for.

Exit code 7 says that a node answered and isn't well. With --wait, it is asked
until it is, nodes that can't be reached yet too. 'gbctl doctor' explains what is
wrong.`,
		Example: `  gbctl -n 10.5.0.2,10.5.0.3 health
  gbctl -n 10.5.0.2 health --wait 5m`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.health(cmd.Context(), wait) },
	}
	cmd.Flags().DurationVar(&wait, "wait", 0, "wait so long for the nodes to be well")
	return a.insecureFlags(a.outputFlag(cmd))
}

func status(ctx context.Context, c *client.Client) (*apiv1.NodeStatusResponse, error) {
	return message(c.Node.Status(ctx, connect.NewRequest(&apiv1.NodeStatusRequest{})))
}

// unhealthyReason says why a node isn't well, or nothing.
func unhealthyReason(s *apiv1.NodeStatusResponse) string {
	switch {
	case s.Stage == "maintenance":
		return "waits for a configuration ('gbctl apply-config --insecure')"
	case s.WaitingFor != "":
		return s.WaitingFor
	case s.ServicesUp < s.Services:
		return fmt.Sprintf("%d of %d services aren't up", s.Services-s.ServicesUp, s.Services)
	}
	return ""
}

func (a *app) health(ctx context.Context, wait time.Duration) error {
	deadline := time.Now().Add(wait)
	var retries retryLog
	for {
		answers, failed := gather(ctx, a, status)
		cause := failed
		for _, n := range answers {
			if why := unhealthyReason(n.value); why != "" {
				cause = errors.Join(cause, fmt.Errorf("%s: %s", n.node, why))
			}
		}
		if cause == nil || time.Until(deadline) < pollInterval {
			return a.showHealth(answers, failed)
		}
		retries.print(a.err, cause)
		if err := pause(ctx, pollInterval); err != nil {
			return err
		}
	}
}

func (a *app) showHealth(answers []answer[*apiv1.NodeStatusResponse], failed error) error {
	head := []string{"NODE", "HOSTNAME", "TYPE", "STAGE", "SERVICES UP", "LOAD", "MEMORY FREE", "UPTIME", "WAITS FOR"}
	var rows [][]string
	var documents []*yaml.Node
	well := true
	for _, n := range answers {
		s := n.value
		well = well && unhealthyReason(s) == ""
		rows = append(rows, []string{n.node, s.Hostname, s.MachineType, s.Stage, fmt.Sprintf("%d/%d", s.ServicesUp, s.Services),
			fmt.Sprintf("%.2f", s.Load1), size(s.MemoryAvailable), span(s.Uptime.AsDuration()), unhealthyReason(s)})
		documents = append(documents, document(n.node, s))
	}
	err := a.show(documents, true, func() error {
		if len(rows) == 0 {
			return nil
		}
		return table(a.out, head, rows)
	})
	if err = errors.Join(err, failed); err == nil && !well {
		return &exitError{codeUnhealthy, nil}
	}
	return err
}

// pause waits, unless somebody presses Ctrl-C.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
