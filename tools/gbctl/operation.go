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
	cmd := group("operation",
		a.operationListCommand(), a.operationAttachCommand(), a.operationAnswerCommand(), a.operationAbortCommand(), a.operationTakeOverCommand())
	cmd.Aliases = []string{"operations"}
	return cmd
}

func (a *app) operationListCommand() *cobra.Command {
	return listCommand(a, "list", []string{"ID", "STATE", "STEP", "BEGAN", "TOOK", "BY", "MESSAGE"}, a.operationsOrWarning, rowsOf((*apiv1.ListOperationsResponse).GetOperations, operationRow))
}

// operationsOrWarning prints why a list is incomplete.
func (a *app) operationsOrWarning(ctx context.Context, c *client.Client) (*apiv1.ListOperationsResponse, error) {
	all, err := operations(ctx, c)
	if w := all.GetWarning(); w != "" {
		fmt.Fprintf(a.err, "%s: %s %s\n", c.Name, painted(a.err, "warning:"), visible(w))
	}
	return all, err
}

var operations = asking(ofOperation, operationAPI.List, &apiv1.ListOperationsRequest{})

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
		said = fmt.Sprintf("its node %s is gone: gbctl -n ADDRESS operation take-over %s", o.Coordinator, o.Id)
	case o.Elsewhere:
		said = "runs on node " + o.Coordinator
	}
	return []string{o.Id, operationState(o), step, stampUTC(o.Began.AsTime()), took, o.By, said}
}

func operationState(o *apiv1.Operation) string {
	return word(o.State, "STATE_")
}

// prompt formats a question with its possible answers.
func prompt(q *apiv1.OperationQuestion) string {
	if len(q.Options) == 0 {
		return q.Text
	}
	return q.Text + " [" + strings.Join(q.Options, "/") + "]"
}

func (a *app) operationAttachCommand() *cobra.Command {
	return a.linesFlag(command("attach ID", func(cmd *cobra.Command, args []string) error {
		return a.followOne(cmd.Context(), "operation attach", args[0])
	}))
}

// followOne follows an operation of the node of a command that works with one node.
func (a *app) followOne(ctx context.Context, what, id string) error {
	return a.onOne(ctx, what, func(node string) error {
		return a.follower(node, id, func(*apiv1.Operation) bool { return false }).run(ctx)
	})
}

func (a *app) operationAnswerCommand() *cobra.Command {
	return command("answer ID ANSWER", func(cmd *cobra.Command, args []string) error {
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
	})
}

func answerOperation(ctx context.Context, c *client.Client, o *apiv1.Operation, text string) error {
	_, err := c.Operation.Answer(ctx, connect.NewRequest(&apiv1.AnswerOperationRequest{Id: o.Id, Question: o.Question.Id, Answer: text}))
	return err
}

func (a *app) operationAbortCommand() *cobra.Command {
	r := &apiv1.AbortOperationRequest{}
	return messageCommand(a, "abort ID", &r.Id, asking(ofOperation, operationAPI.Abort, r))
}

func (a *app) operationTakeOverCommand() *cobra.Command {
	return command("take-over ID", func(cmd *cobra.Command, args []string) error {
		err := a.one(cmd.Context(), "operation take-over", func(ctx context.Context, c *client.Client) error {
			_, err := client.Unary(ctx, c.Operation.TakeOver, &apiv1.TakeOverOperationRequest{Id: args[0]})
			return err
		})
		if err != nil {
			return err
		}
		return a.followOne(cmd.Context(), "operation take-over", args[0])
	})
}
