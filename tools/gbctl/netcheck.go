package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/spf13/cobra"
)

func (a *app) netcheckCommand() *cobra.Command {
	cmd := command("netcheck HOST[:PORT]", func(cmd *cobra.Command, args []string) error {
		r, err := checkedHost(args[0])
		if err != nil {
			return err
		}
		p := a.printer()
		return a.sequential(cmd.Context(), func(ctx context.Context, c *client.Client) error {
			end := ""
			err := client.Receive(ctx, c.Node.CheckNetwork, r, func(s *apiv1.NetworkStep) error {
				if s.Error != "" {
					end = fmt.Sprintf("the way to %s ends at %s: %s", args[0], s.Layer, s.Error)
				}
				if a.output == "json" {
					return writeLine(a, document(c.Name, s))
				}
				return p.lines(c.Name, []string{stepLine(s)})
			})
			if err == nil && end != "" {
				err = errors.New(end)
			}
			return err
		})
	})
	return a.linesFlag(cmd)
}

// checkedHost is HOST, HOST:PORT, ADDRESS or [ADDRESS]:PORT.
func checkedHost(text string) (*apiv1.CheckNetworkRequest, error) {
	if bare := strings.Trim(text, "[]"); net.ParseIP(bare) != nil || !strings.Contains(text, ":") {
		return &apiv1.CheckNetworkRequest{Host: bare}, nil
	}
	host, port, err := net.SplitHostPort(text)
	n, errPort := strconv.ParseUint(port, 10, 16)
	if err != nil || errPort != nil || n == 0 {
		return nil, usagef("%q: must be HOST, HOST:PORT or [ADDRESS]:PORT", text)
	}
	return &apiv1.CheckNetworkRequest{Host: host, Port: uint32(n)}, nil
}

func stepLine(s *apiv1.NetworkStep) string {
	state, text := "ok", s.Result
	if s.Error != "" {
		state, text = "ENDS", strings.TrimPrefix(s.Result+": "+s.Error, ": ")
	}
	return oneLine(fmt.Sprintf("%-9s %-4s %5d ms  %s", s.Layer, state, s.Took.AsDuration().Milliseconds(), text))
}
