package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"
)

// printer writes lines of several nodes to one output, each line with the node as prefix.
type printer struct {
	mu    sync.Mutex // guards w
	w     io.Writer
	clean bool // the output is a terminal: remove control characters
}

func (a *app) printer() *printer { return &printer{w: a.out, clean: interactive(a.out)} }

func (p *printer) lines(node string, lines []string) error {
	var b bytes.Buffer
	for _, line := range lines {
		if p.clean {
			line = visible(line)
		}
		b.WriteString(node + ": " + line + "\n")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	_, err := p.w.Write(b.Bytes())
	return err
}

// visible removes control characters from a line.
func visible(line string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' && r != '\t' || r >= 0x7f && r < 0xa0 {
			return -1
		}
		return r
	}, line)
}

// stream reads a stream from each node: from all at the same time if they don't end by
// themselves, otherwise one after another in the given order.
func (a *app) stream(ctx context.Context, follow bool, read func(context.Context, *client.Client) error) error {
	if !follow {
		return a.sequential(ctx, read)
	}
	nodes, err := a.targets(ctx)
	if err != nil {
		return err
	}
	return a.each(ctx, nodes, func(ctx context.Context, _ int, c *client.Client) error {
		if err := read(ctx, c); err != nil || ctx.Err() != nil {
			return err
		}
		return errors.New("the node has ended the stream: it shuts down or restarts its API")
	})
}

// streamLines prints a stream of each node: a line for each message, or a JSON object.
func streamLines[S, Q, T any, M interface {
	*T
	proto.Message
}](ctx context.Context, a *app, follow bool, line func(M) string, service func(*client.Client) S, method func(S, context.Context, *connect.Request[Q]) (*connect.ServerStreamForClient[T], error), request *Q) error {
	p := a.printer()
	return a.stream(ctx, follow, func(ctx context.Context, c *client.Client) error {
		open := func(ctx context.Context, r *connect.Request[Q]) (*connect.ServerStreamForClient[T], error) {
			return method(service(c), ctx, r)
		}
		return client.Receive(ctx, open, request, func(m *T) error {
			if a.output == "json" {
				return writeLine(a, document(c.Name, M(m)))
			}
			return p.lines(c.Name, []string{line(m)})
		})
	})
}

func kernelLine(m *apiv1.KernelMessage) string {
	return fmt.Sprintf("[%12.6f] %s", (time.Duration(m.SinceBootUs) * time.Microsecond).Seconds(), m.Message)
}

func serviceLine(e *apiv1.ServiceEvent) string {
	return fmt.Sprintf("%s %s [%s]: %s", stampUTC(e.Time.AsTime()), e.Service, e.State, oneLine(e.Message))
}

// tail converts a number of lines for the API, where 0 means all.
func tail(lines int) int32 {
	if lines == 0 {
		return -1
	}
	return int32(max(lines, 0))
}

const tailHelp = "show only the last lines, this many (-1: all)"

func (a *app) logsCommand() *cobra.Command {
	r := &apiv1.ReadLogRequest{}
	var last int
	names := func(ctx context.Context, c *client.Client) (*apiv1.ListLogsResponse, error) {
		return client.Unary(ctx, c.Log.List, &apiv1.ListLogsRequest{Kubernetes: r.Kubernetes})
	}
	cmd := command("logs [SERVICE | -k NAMESPACE/POD:CONTAINER]", func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return list(cmd.Context(), a, []string{"ID"}, names, rowsOf((*apiv1.ListLogsResponse).GetIds, func(id string) []string { return []string{id} }))
		}
		if earlier := r.Previous || r.Boot != 0; earlier && (r.Follow || r.Kubernetes) || r.Previous && r.Boot != 0 {
			return usagef("--previous and --boot are for services, and exclude --follow, --kubernetes and each other")
		}
		r.Id, r.Tail = args[0], tail(last)
		p := a.printer()
		return a.stream(cmd.Context(), r.Follow, func(ctx context.Context, c *client.Client) error {
			return client.Receive(ctx, c.Log.Read, r, func(m *apiv1.LogChunk) error {
				if m.Lost > 0 {
					fmt.Fprintf(a.err, "%s: %d lines were lost: the log was written faster than it could be sent\n", c.Name, m.Lost)
				}
				if a.output != "json" {
					return p.lines(c.Name, m.Lines)
				}
				for _, line := range m.Lines {
					if err := writeLine(a, mapping("node", c.Name, "line", line)); err != nil {
						return err
					}
				}
				return nil
			})
		})
	})
	cmd.ValidArgsFunction = completing(a, names, (*apiv1.ListLogsResponse).GetIds)
	cmd.Flags().BoolVarP(&r.Kubernetes, "kubernetes", "k", false, "containers of Kubernetes instead of services")
	cmd.Flags().BoolVarP(&r.Follow, "follow", "f", false, "also print new lines, until Ctrl-C")
	cmd.Flags().BoolVar(&r.Previous, "previous", false, "show the lines in the rotated files of a service, also of earlier boots, oldest first")
	cmd.Flags().Int64Var(&r.Boot, "boot", 0, "show the lines of an earlier boot: -1 is the one before this one, 1 and up its number in 'gbctl reboots'")
	cmd.Flags().IntVar(&last, "tail", -1, tailHelp)
	return a.linesFlag(cmd)
}

func (a *app) dmesgCommand() *cobra.Command {
	r := &apiv1.DmesgRequest{}
	var last int
	cmd := command("dmesg", func(cmd *cobra.Command, _ []string) error {
		r.Tail = tail(last)
		return streamLines(cmd.Context(), a, r.Follow, kernelLine, ofLog, logAPI.Dmesg, r)
	})
	cmd.Flags().BoolVarP(&r.Follow, "follow", "f", false, "also print new messages, until Ctrl-C")
	cmd.Flags().IntVar(&last, "tail", -1, tailHelp)
	return a.linesFlag(cmd)
}

// linesFlag adds -o to a command that prints a stream of lines.
func (a *app) linesFlag(cmd *cobra.Command) *cobra.Command {
	choiceFlag(cmd, new(string), "output", "o", "text, or json (one object per line)", "text", "json")
	return cmd
}

func (a *app) eventsCommand() *cobra.Command {
	r := &apiv1.EventsRequest{}
	cmd := command("events", func(cmd *cobra.Command, _ []string) error {
		return streamLines(cmd.Context(), a, r.Follow, serviceLine, ofService, serviceAPI.Events, r)
	})
	cmd.Flags().BoolVarP(&r.Follow, "follow", "f", false, "also print new events, until Ctrl-C")
	cmd.Flags().Uint32Var(&r.Tail, "tail", 100, "number of past events to show first")
	cmd.Flags().StringVar(&r.Service, "service", "", "show only this service")
	return a.linesFlag(cmd)
}

// stampUTC formats a time of a log.
func stampUTC(t time.Time) string { return t.UTC().Format("2006-01-02T15:04:05.000Z") }
