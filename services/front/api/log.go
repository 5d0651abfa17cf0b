package api

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/logs"
	"google.golang.org/protobuf/types/known/timestamppb"
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

// ndjson is LogService.Read for programs that use plain HTTP: one JSON object
// per line, {"line": …} or, where lines were lost, {"lost": n}.
func (s *Server) ndjson(logs *logService) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		req, err := logRequest(r)
		if err != nil {
			s.refuse(w, r, err)
			return
		}
		begun := false
		out := json.NewEncoder(w)
		out.SetEscapeHTML(false)
		err = logs.read(r.Context(), req, func(lines []string, lost uint64) error {
			if !begun {
				begun = true
				w.Header().Set("Content-Type", "application/x-ndjson")
				w.WriteHeader(http.StatusOK)
			}
			if lost > 0 {
				if err := out.Encode(map[string]uint64{"lost": lost}); err != nil {
					return err
				}
			}
			for _, line := range lines {
				if err := out.Encode(map[string]string{"line": line}); err != nil {
					return err
				}
			}
			return http.NewResponseController(w).Flush()
		})
		switch {
		case err == nil:
		case !begun:
			s.refuse(w, r, err)
		default:
			panic(http.ErrAbortHandler) // the caller must not take this for the end
		}
	}
}

// logRequest reads the URL: /v1/logs/ID?tail=N&follow=true&previous=true&boot=N.
func logRequest(r *http.Request) (*apiv1.ReadLogRequest, error) {
	req := &apiv1.ReadLogRequest{Id: r.PathValue("id")}
	req.Kubernetes = strings.Contains(req.GetId(), "/")
	query := r.URL.Query()
	for name, set := range map[string]func(int64){"tail": func(n int64) { req.Tail = int32(n) }, "boot": func(n int64) { req.Boot = n }} {
		text := query.Get(name)
		if text == "" {
			continue
		}
		n, err := strconv.ParseInt(text, 10, 32)
		if err != nil {
			return nil, failed(connect.CodeInvalidArgument, "%s=%q isn't a number", name, shortened(readable(text)))
		}
		set(n)
	}
	for name, set := range map[string]*bool{"follow": &req.Follow, "previous": &req.Previous} {
		if !query.Has(name) {
			continue
		}
		text := query.Get(name)
		yes, err := strconv.ParseBool(text)
		if err != nil && text != "" {
			return nil, failed(connect.CodeInvalidArgument, "%s=%q is neither true nor false", name, shortened(readable(text)))
		}
		*set = yes || text == ""
	}
	return req, nil
}
