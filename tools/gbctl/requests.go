package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/spf13/cobra"
)

// The services of the machine API. Their methods are arguments of asking and streamLines, together with the function
// below that returns the service of a client.
type (
	accessAPI    = garboardv1connect.AccessServiceClient
	configAPI    = garboardv1connect.ConfigServiceClient
	etcdAPI      = garboardv1connect.EtcdServiceClient
	imageAPI     = garboardv1connect.ImageServiceClient
	logAPI       = garboardv1connect.LogServiceClient
	nodeAPI      = garboardv1connect.NodeServiceClient
	operationAPI = garboardv1connect.OperationServiceClient
	resourceAPI  = garboardv1connect.ResourceServiceClient
	serviceAPI   = garboardv1connect.ServiceServiceClient
)

func ofAccess(c *client.Client) accessAPI       { return c.Access }
func ofConfig(c *client.Client) configAPI       { return c.Config }
func ofEtcd(c *client.Client) etcdAPI           { return c.Etcd }
func ofImage(c *client.Client) imageAPI         { return c.Image }
func ofLog(c *client.Client) logAPI             { return c.Log }
func ofNode(c *client.Client) nodeAPI           { return c.Node }
func ofOperation(c *client.Client) operationAPI { return c.Operation }
func ofResource(c *client.Client) resourceAPI   { return c.Resource }
func ofService(c *client.Client) serviceAPI     { return c.Service }

// question asks a node, for an answer of type A.
type question[A any] = func(context.Context, *client.Client) (A, error)

// asking makes the question of a request to a service.
func asking[S, Q, A any](service func(*client.Client) S, method func(S, context.Context, *connect.Request[Q]) (*connect.Response[A], error), request *Q) question[*A] {
	return func(ctx context.Context, c *client.Client) (*A, error) {
		return client.Unary(ctx, func(ctx context.Context, r *connect.Request[Q]) (*connect.Response[A], error) {
			return method(service(c), ctx, r)
		}, request)
	}
}

// receiveAll collects all messages of a stream.
func receiveAll[Q, T any](ctx context.Context, open func(context.Context, *connect.Request[Q]) (*connect.ServerStreamForClient[T], error), request *Q) (all []*T, err error) {
	err = client.Receive(ctx, open, request, func(m *T) error {
		all = append(all, m)
		return nil
	})
	return all, err
}

// starting makes the question of a request that starts an operation.
func starting[Q, A any, P interface {
	*A
	GetOperation() *apiv1.Operation
}](method func(operationAPI, context.Context, *connect.Request[Q]) (*connect.Response[A], error), request *Q) question[*apiv1.Operation] {
	return func(ctx context.Context, c *client.Client) (*apiv1.Operation, error) {
		answer, err := asking(ofOperation, method, request)(ctx, c)
		return P(answer).GetOperation(), err
	}
}

// printMessage asks one node, and prints the message in its answer.
func printMessage[A interface{ GetMessage() string }](ctx context.Context, a *app, what string, ask question[A]) error {
	return a.one(ctx, what, func(ctx context.Context, c *client.Client) error {
		m, err := ask(ctx, c)
		if err != nil {
			return err
		}
		fmt.Fprintf(a.out, "%s: %s\n", c.Name, here(c.Name, visible(m.GetMessage())))
		return nil
	})
}

// printEach asks one node after another, and prints lines about each answer: Ctrl-C can limit a wrong command to the
// first node.
func printEach[A any](ctx context.Context, a *app, ask question[A], lines func(A) []string) error {
	return a.sequential(ctx, a.limited(func(ctx context.Context, c *client.Client) error {
		m, err := ask(ctx, c)
		if err != nil {
			return err
		}
		for _, line := range lines(m) {
			fmt.Fprintf(a.out, "%s: %s\n", c.Name, here(c.Name, strings.TrimSpace(oneLine(line))))
		}
		return nil
	}))
}

// messageCommand makes a command that asks one node, and prints the message in its answer. If the command has an
// argument, that is written to id, which is in the request.
func messageCommand[A interface{ GetMessage() string }](a *app, use string, id *string, ask question[A]) *cobra.Command {
	return command(use, func(cmd *cobra.Command, args []string) error {
		if id != nil {
			*id = args[0]
		}
		return printMessage(cmd.Context(), a, pathOf(cmd), ask)
	})
}

// textCommand makes a command that asks one node, and prints a text in its answer.
func textCommand[A any, T string | []byte](a *app, use string, ask question[A], text func(A) T) *cobra.Command {
	return command(use, func(cmd *cobra.Command, _ []string) error {
		return a.one(cmd.Context(), pathOf(cmd), func(ctx context.Context, c *client.Client) error { return writeText(ctx, c, a.out, ask, text) })
	})
}

// writeText asks a node, and writes a text in its answer.
func writeText[A any, T string | []byte](ctx context.Context, c *client.Client, w io.Writer, ask question[A], text func(A) T) error {
	m, err := ask(ctx, c)
	if err == nil {
		_, err = w.Write([]byte(text(m)))
	}
	return err
}

func (a *app) inspectCommand() *cobra.Command {
	r := &apiv1.GraphRequest{}
	graph := textCommand(a, "graph", asking(ofResource, resourceAPI.Graph, r), (*apiv1.GraphResponse).GetDot)
	graph.Flags().BoolVar(&r.Services, "services", false, "draw services instead of controllers")
	return group("inspect", graph)
}

// one sends a request to one node, for output that can't be combined for several nodes.
func (a *app) one(ctx context.Context, what string, call func(context.Context, *client.Client) error) error {
	return a.untimed(ctx, what, a.limited(call))
}

// untimed is one without --timeout, for streams.
func (a *app) untimed(ctx context.Context, what string, call func(context.Context, *client.Client) error) error {
	return a.onOne(ctx, what, func(node string) error { return a.withClient(ctx, node, call) })
}

// onOne is for a command that works with exactly one node.
func (a *app) onOne(ctx context.Context, what string, do func(node string) error) error {
	node, err := a.single(ctx, what)
	if err != nil {
		return err
	}
	return collect([]string{node}, []error{do(node)})
}

func (a *app) bootChartCommand() *cobra.Command {
	r := &apiv1.BootChartRequest{}
	cmd := textCommand(a, "boot-chart", asking(ofNode, nodeAPI.BootChart, r), (*apiv1.BootChartResponse).GetChart)
	cmd.Flags().BoolVar(&r.Svg, "svg", false, "print an SVG image")
	return cmd
}

func (a *app) metricsCommand() *cobra.Command {
	return textCommand(a, "metrics", asking(ofNode, nodeAPI.Metrics, &apiv1.MetricsRequest{}), (*apiv1.MetricsResponse).GetText)
}
