package main

import (
	"context"
	"fmt"
	"strings"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/spf13/cobra"
)

func (a *app) operationCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "operation",
		Aliases: []string{"operations"},
		Short:   "Show, follow, answer, abort or take over operations",
		Long: `Show operations, answer their questions, abort them, or take them over. Everything that
changes the state of a node, such as a reboot, is an operation. It runs on the node, step
by step, and continues if gbctl exits and after the node has restarted.`,
	}
	cmd.AddCommand(a.operationListCommand(), a.operationAttachCommand(), a.operationAnswerCommand(), a.operationAbortCommand(), a.operationTakeOverCommand())
	return cmd
}

func (a *app) operationListCommand() *cobra.Command {
	return listCommand(a, &cobra.Command{
		Use:   "list",
		Short: "List the running operations and the last finished ones",
		Long: `List the running operations and the last finished ones. A control plane also lists the
operations of other nodes that it can take over if their node is gone.`,
		Example: `  gbctl -n 10.5.0.2 operation list`,
	}, []string{"ID", "STATE", "STEP", "BEGAN", "TOOK", "BY", "MESSAGE"}, a.operationsOrWarning, rowsOf((*apiv1.ListOperationsResponse).GetOperations, operationRow))
}

// operationsOrWarning prints why a list is incomplete.
func (a *app) operationsOrWarning(ctx context.Context, c *client.Client) (*apiv1.ListOperationsResponse, error) {
	all, err := operations(ctx, c)
	if w := all.GetWarning(); w != "" {
		fmt.Fprintf(a.err, "%s: warning: %s\n", c.Name, visible(w))
	}
	return all, err
}

func operations(ctx context.Context, c *client.Client) (*apiv1.ListOperationsResponse, error) {
	return unary(ctx, c.Operation.List, &apiv1.ListOperationsRequest{})
}

func operationRow(o *apiv1.Operation) []string {
	took, step, said := "", "", o.Error
	if o.Ended != nil {
		took = span(o.Ended.AsTime().Sub(o.Began.AsTime()))
	}
	for _, s := range o.Steps {
		if s.State == apiv1.OperationStep_STATE_RUNNING || s.State == apiv1.OperationStep_STATE_UNDOING {
			step = s.Id
		}
	}
	switch q := o.Question; {
	case q != nil:
		said = "asks: " + prompt(q)
	case o.Orphaned:
		said = fmt.Sprintf("its node %s is gone: gbctl operation take-over %s", o.Coordinator, o.Id)
	case o.Elsewhere:
		said = "runs on node " + o.Coordinator
	}
	return []string{o.Id, operationState(o), step, stampUTC(o.Began.AsTime()), took, o.By, said}
}

func operationState(o *apiv1.Operation) string {
	return strings.ToLower(strings.TrimPrefix(o.State.String(), "STATE_"))
}

// prompt formats a question with its possible answers.
func prompt(q *apiv1.OperationQuestion) string {
	if len(q.Options) == 0 {
		return q.Text
	}
	return q.Text + " [" + strings.Join(q.Options, "/") + "]"
}

func (a *app) operationAttachCommand() *cobra.Command {
	return a.linesFlag(&cobra.Command{
		Use:   "attach ID",
		Short: "Follow an operation from its start to its end",
		Long: `Follow an operation from its start to its end, also over restarts of the node, and
answer its questions. After Ctrl-C the operation continues. The exit code is 0 only if
the operation succeeded.`,
		Example: `  gbctl -n 10.5.0.2 operation attach reset-4kfz2mqa`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			node, err := a.single(cmd.Context(), "operation attach")
			if err != nil {
				return err
			}
			return collect([]string{node}, []error{a.follow(cmd.Context(), node, args[0])})
		},
	})
}

func (a *app) operationAnswerCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "answer ID ANSWER",
		Short: "Answer the question of an operation",
		Example: `  gbctl -n 10.5.0.2 operation list                       show the questions
  gbctl -n 10.5.0.2 operation answer reset-4kfz2mqa yes`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.one(cmd.Context(), "operation answer", func(ctx context.Context, c *client.Client) error {
				all, err := operations(ctx, c)
				if err != nil {
					return err
				}
				for _, o := range all.Operations {
					if o.Id == args[0] && o.Question != nil {
						if err := answerOperation(ctx, c, o, args[1]); err != nil {
							return err
						}
						fmt.Fprintf(a.out, "%s: %s: answered %q with %q\n", c.Name, o.Id, visible(o.Question.Text), visible(args[1]))
						return nil
					}
				}
				return fmt.Errorf("operation %q has no question: 'gbctl operation list' shows the questions", args[0])
			})
		},
	}
}

func answerOperation(ctx context.Context, c *client.Client, o *apiv1.Operation, text string) error {
	_, err := c.Operation.Answer(ctx, connect.NewRequest(&apiv1.AnswerOperationRequest{Id: o.Id, Question: o.Question.Id, Answer: text}))
	return err
}

func (a *app) operationAbortCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "abort ID",
		Short: "Abort an operation and undo its steps",
		Long: `Abort an operation and undo its steps. It is refused after a step that can't be undone:
such an operation must finish. After the node is back, an operation that only waits for
the cluster can be aborted again.`,
		Example: `  gbctl -n 10.5.0.2 operation abort reboot-4kfz2mqa`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.printMessage(cmd.Context(), "operation abort", func(ctx context.Context, c *client.Client) (interface{ GetMessage() string }, error) {
				return unary(ctx, c.Operation.Abort, &apiv1.AbortOperationRequest{Id: args[0]})
			})
		},
	}
}

func (a *app) operationTakeOverCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "take-over ID",
		Short: "Continue an operation whose node is gone, on another control plane",
		Long: `Continue an operation whose node is gone, on another control plane. It continues with the
step that ran. Its record is in etcd, so etcd needs a quorum. While the operation's own
node is alive, this is refused; a node that is gone is known to be gone within a minute.
'gbctl operation list' on a control plane shows such operations.`,
		Example: `  gbctl -n 10.5.0.3 operation take-over upgrade-k8s-4kfz2mqa`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			node, err := a.single(cmd.Context(), "operation take-over")
			if err != nil {
				return err
			}
			err = a.one(cmd.Context(), "operation take-over", func(ctx context.Context, c *client.Client) error {
				_, err := unary(ctx, c.Operation.TakeOver, &apiv1.TakeOverOperationRequest{Id: args[0]})
				return err
			})
			if err != nil {
				return err
			}
			return collect([]string{node}, []error{a.follow(cmd.Context(), node, args[0])})
		},
	}
}
