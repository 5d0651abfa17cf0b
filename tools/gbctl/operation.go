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
		Short:   "Look at what runs on nodes, answer it, or abort it",
		Long: `Look at operations, answer their questions, or abort them. Whatever changes a node
for good, such as a reboot, is an operation: it runs on the node, step by step, and
goes on when gbctl has gone and when the node has restarted.`,
	}
	cmd.AddCommand(a.operationListCommand(), a.operationAttachCommand(), a.operationAnswerCommand(), a.operationAbortCommand())
	return cmd
}

func (a *app) operationListCommand() *cobra.Command {
	return a.outputFlag(&cobra.Command{
		Use:     "list",
		Short:   "Show the operations that run, and the last ones that ran",
		Example: `  gbctl -n 10.5.0.2 operation list`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return list(cmd.Context(), a, []string{"ID", "STATE", "STEP", "BEGAN", "TOOK", "BY", "MESSAGE"}, operations, func(m *apiv1.ListOperationsResponse) (rows [][]string) {
				for _, o := range m.Operations {
					rows = append(rows, operationRow(o))
				}
				return rows
			})
		},
	})
}

func operations(ctx context.Context, c *client.Client) (*apiv1.ListOperationsResponse, error) {
	return message(c.Operation.List(ctx, connect.NewRequest(&apiv1.ListOperationsRequest{})))
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
	if q := o.Question; q != nil {
		said = "asks: " + prompt(q)
	}
	return []string{o.Id, operationState(o), step, stampUTC(o.Began.AsTime()), took, o.By, said}
}

func operationState(o *apiv1.Operation) string {
	return strings.ToLower(strings.TrimPrefix(o.State.String(), "STATE_"))
}

// prompt is a question with its answers.
func prompt(q *apiv1.OperationQuestion) string {
	if len(q.Options) == 0 {
		return q.Text
	}
	return q.Text + " [" + strings.Join(q.Options, "/") + "]"
}

func (a *app) operationAttachCommand() *cobra.Command {
	return a.linesFlag(&cobra.Command{
		Use:   "attach ID",
		Short: "Follow an operation from its beginning to its end",
		Long: `Follow an operation from its beginning to its end, also over restarts of the node,
and answer its questions. Ctrl-C leaves it to itself: it goes on. The exit code is 0
only if the operation has done what it was to do.`,
		Example: `  gbctl -n 10.5.0.2 operation attach reset-4kfz2mqa`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			node, err := a.single(cmd.Context(), "an operation")
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
		Short: "Answer the question that an operation waits with",
		Example: `  gbctl -n 10.5.0.2 operation list                       what is asked
  gbctl -n 10.5.0.2 operation answer reset-4kfz2mqa yes`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.one(cmd.Context(), "an answer", func(ctx context.Context, c *client.Client) error {
				all, err := operations(ctx, c)
				if err != nil {
					return err
				}
				for _, o := range all.Operations {
					if o.Id == args[0] && o.Question != nil {
						if err := answerOperation(ctx, c, o, args[1]); err != nil {
							return err
						}
						fmt.Fprintf(a.out, "%s: %s: %q is answered with %q\n", c.Name, o.Id, visible(o.Question.Text), visible(args[1]))
						return nil
					}
				}
				return fmt.Errorf("operation %q asks nothing: 'gbctl operation list' shows what is asked", args[0])
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
		Short: "End an operation, and have undone what it did",
		Long: `End an operation, and have undone what it did. It is refused once something has
begun from which there is no way back: such an operation must come to its end. One
whose node is back, and that only waits for the cluster, can be ended again.`,
		Example: `  gbctl -n 10.5.0.2 operation abort reboot-4kfz2mqa`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.said(cmd.Context(), "aborting", func(ctx context.Context, c *client.Client) (interface{ GetMessage() string }, error) {
				return message(c.Operation.Abort(ctx, connect.NewRequest(&apiv1.AbortOperationRequest{Id: args[0]})))
			})
		},
	}
}
