package api

import (
	"context"
	"errors"
	"math"
	"slices"
	"strings"

	"connectrpc.com/connect"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/logs"
)

const (
	// maxLine bounds a line of a log: the kubelet splits longer ones at 16 KiB, and
	// puts its own fields in front.
	maxLine = 64 << 10
	// maxChunk bounds the lines of one message, so that neither side holds more
	// than that for a reader, and each message has its own time to be read.
	maxChunk = 64 << 10
)

// logService is the logs of services, of containers of Kubernetes and of the
// kernel.
type logService struct{ opts Options }

func (s *logService) List(_ context.Context, req *connect.Request[apiv1.ListLogsRequest]) (*connect.Response[apiv1.ListLogsResponse], error) {
	if !req.Msg.GetKubernetes() {
		return connect.NewResponse(&apiv1.ListLogsResponse{Ids: s.ids()}), nil
	}
	ids, err := pods(s.opts.PodLogs).list()
	return connect.NewResponse(&apiv1.ListLogsResponse{Ids: ids}), err
}

// ids are the existing logs, and those of services without any line.
func (s *logService) ids() []string {
	ids := append(s.opts.Logs.IDs(), s.opts.services()...)
	slices.Sort(ids)
	return slices.Compact(ids)
}

func (s *logService) Read(ctx context.Context, req *connect.Request[apiv1.ReadLogRequest], stream *connect.ServerStream[apiv1.LogChunk]) error {
	return s.read(ctx, req.Msg, func(lines []string, lost uint64) error {
		if lines == nil && lost == 0 {
			return stream.Send(nil)
		}
		return stream.Send(&apiv1.LogChunk{Lines: lines, Lost: lost})
	})
}

// read passes a log to send in chunks. The first chunk may be empty: it shows that the
// log exists.
func (s *logService) read(ctx context.Context, req *apiv1.ReadLogRequest, send func(lines []string, lost uint64) error) error {
	kubernetes := req.GetKubernetes() || strings.Contains(req.GetId(), "/")
	earlier := req.GetPrevious() || req.GetBoot() != 0
	switch {
	case earlier && req.GetFollow() || req.GetPrevious() && req.GetBoot() != 0:
		return failed(connect.CodeInvalidArgument, "previous, boot and follow exclude each other: earlier lines don't change")
	case earlier && kubernetes:
		return failed(connect.CodeInvalidArgument, "previous and boot: each is for the logs of services; files of containers are in %s: see gbctl ls and gbctl read", defaultPodLogs)
	case kubernetes:
		return s.readContainer(ctx, req, send)
	}
	id := serviceID(req.GetId())
	if ids := s.ids(); !slices.Contains(ids, id) {
		return failed(connect.CodeNotFound, "there is no log %q; there are %s; logs of containers are namespace/pod:container", shortened(readable(id)), strings.Join(ids, ", "))
	}
	if earlier {
		return s.readEarlier(id, req, send)
	}
	reader := s.opts.Logs.Read(id, int(req.GetTail()))
	for first := true; ; first = false {
		lines, lost := reader.Next(math.MaxInt)
		if first || len(lines) > 0 || lost > 0 {
			if err := sendChunks(lines, lost, send); err != nil {
				return err
			}
		}
		if !req.GetFollow() {
			return nil
		}
		if err := reader.Wait(ctx, nil); err != nil {
			return err
		}
	}
}

// readEarlier hands lines of the files of a log to send.
func (s *logService) readEarlier(id string, req *apiv1.ReadLogRequest, send func(lines []string, lost uint64) error) error {
	var lines []string
	size := 0
	all := s.opts.Logs.Previous(id, int(req.GetTail()))
	if boot := req.GetBoot(); boot != 0 {
		all = s.opts.Logs.OfBoot(id, boot, int(req.GetTail()))
	}
	for line, err := range all {
		if errors.Is(err, logs.ErrNotPersisted) {
			return connect.NewError(connect.CodeUnavailable, err)
		}
		if errors.Is(err, logs.ErrNoBoot) {
			return connect.NewError(connect.CodeNotFound, err)
		}
		if err != nil {
			return err
		}
		lines, size = append(lines, line), size+len(line)
		if size < maxChunk {
			continue
		}
		if err := sendChunks(lines, 0, send); err != nil {
			return err
		}
		lines, size = lines[:0], 0
	}
	return sendChunks(lines, 0, send)
}

// sendChunks sends lines in pieces of maxChunk, at least one.
func sendChunks(lines []string, lost uint64, send func([]string, uint64) error) error {
	for {
		n, size := 0, 0
		for n < len(lines) && (n == 0 || size+len(lines[n]) <= maxChunk) {
			size += len(lines[n])
			n++
		}
		chunk := make([]string, n)
		for i, line := range lines[:n] {
			chunk[i] = config.RedactText(readable(line))
		}
		if n == 0 {
			chunk = nil
		}
		if err := send(chunk, lost); err != nil {
			return err
		}
		if lines, lost = lines[n:], 0; len(lines) == 0 {
			return nil
		}
	}
}
