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
	send := func(m *apiv1.KernelMessage) error {
		m.Time = timestamppb.New(booted.Add(time.Duration(m.GetSinceBootUs()) * time.Microsecond))
		return stream.Send(m)
	}
	most := min(int(req.Msg.GetTail()), maxTail) // 0: all, negative: none
	var last []*apiv1.KernelMessage              // held back until it is known which are the last
	for {
		m, err := nextMessage(ctx, k, false)
		if err != nil {
			return err
		}
		if m == nil {
			break
		}
		switch {
		case most == 0:
			if err := send(m); err != nil {
				return err
			}
		case most > 0:
			last = append(last, m)
			last = last[max(len(last)-most, 0):]
		}
	}
	for _, m := range last {
		if err := send(m); err != nil {
			return err
		}
	}
	if !req.Msg.GetFollow() {
		return nil
	}
	if err := stream.Send(nil); err != nil {
		return err
	}
	for {
		m, err := nextMessage(ctx, k, true)
		if err != nil {
			return err
		}
		if err := send(m); err != nil {
			return err
		}
	}
}

// nextMessage is the next message of the kernel; without wait, nil at the end of what there is.
func nextMessage(ctx context.Context, k *logs.KernelReader, wait bool) (*apiv1.KernelMessage, error) {
	r, err := k.Next(ctx, wait)
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case err != nil:
		return nil, failed(connect.CodeUnavailable, "the kernel's log can't be read: %w", err)
	case r == nil:
		return nil, nil
	}
	return &apiv1.KernelMessage{Level: uint32(r.Level), SinceBootUs: uint64(r.SinceBoot.Microseconds()), Message: config.RedactText(readable(r.Message))}, nil
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
