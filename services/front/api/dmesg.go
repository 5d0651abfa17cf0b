package api

import (
	"context"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/logs"
)

const (
	// defaultKmsg is the kernel's log.
	defaultKmsg = logs.KmsgDevice
	// maxTail bounds what a tail keeps; the kernel's buffer has fewer.
	maxTail = 1 << 16
)

// Dmesg streams the kernel's log. A node in a container shares its host's
// kernel, and callers must not see the host's log: there it is the node's own console.
func (s *logService) Dmesg(ctx context.Context, req *connect.Request[apiv1.DmesgRequest], stream *connect.ServerStream[apiv1.KernelMessage]) error {
	if s.opts.Mode == boot.Container {
		return s.console(ctx, req.Msg, stream)
	}
	k, err := logs.ReadKernel(s.opts.Kmsg)
	if err != nil {
		return failed(connect.CodeUnavailable, "the kernel's log can't be read: %w", err)
	}
	defer k.Close()
	booted := time.Now().Add(-s.opts.Since())
	most, wait := min(int(req.Msg.GetTail()), maxTail), false // 0: all, negative: none
	var last []*apiv1.KernelMessage                           // held back until it is known which are the last
	for {
		r, err := k.Next(ctx, wait)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			return failed(connect.CodeUnavailable, "the kernel's log can't be read: %w", err)
		case r == nil: // all that there was
			for _, m := range last {
				if err := stream.Send(m); err != nil {
					return err
				}
			}
			if !req.Msg.GetFollow() {
				return nil
			}
			if err := stream.Send(nil); err != nil {
				return err
			}
			most, wait = 0, true
			continue
		}
		m := &apiv1.KernelMessage{
			Level: uint32(r.Level), SinceBootUs: uint64(r.SinceBoot.Microseconds()), Time: timestamppb.New(booted.Add(r.SinceBoot)),
			Message: config.RedactText(readable(r.Message)),
		}
		if most != 0 {
			last = append(last, m)
			last = last[max(len(last)-max(most, 0), 0):]
		} else if err := stream.Send(m); err != nil {
			return err
		}
	}
}

// console is the text of the node's console, for nodes in containers.
func (s *logService) console(ctx context.Context, req *apiv1.DmesgRequest, stream *connect.ServerStream[apiv1.KernelMessage]) error {
	booted := time.Now().Add(-s.opts.Since())
	return s.read(ctx, &apiv1.ReadLogRequest{Id: logs.ConsoleID, Tail: req.GetTail(), Follow: req.GetFollow()}, func(lines []string, _ uint64) error {
		if lines == nil {
			return stream.Send(nil)
		}
		for _, line := range lines {
			level, at, text := logs.Parse(line)
			m := &apiv1.KernelMessage{Level: uint32(level), Message: text}
			if !at.IsZero() {
				m.Time, m.SinceBootUs = timestamppb.New(at), uint64(max(at.Sub(booted), 0).Microseconds())
			}
			if err := stream.Send(m); err != nil {
				return err
			}
		}
		return nil
	})
}
