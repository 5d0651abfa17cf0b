package api

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/logs"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const (
	// defaultKmsg is the kernel's log, one record per read(2):
	// Documentation/ABI/testing/dev-kmsg.
	defaultKmsg = logs.KmsgDevice
	// maxRecord is more than a record has: CONSOLE_EXT_LOG_MAX of the kernel.
	maxRecord = 8 << 10
	// maxTail bounds what a tail keeps; the kernel's buffer has fewer.
	maxTail = 1 << 16
)

// Dmesg streams the kernel's log. A node in a container shares its host's
// kernel, which is none of its callers' business: it has what it said itself.
func (s *logService) Dmesg(ctx context.Context, req *connect.Request[apiv1.DmesgRequest], stream *connect.ServerStream[apiv1.KernelMessage]) error {
	if s.opts.Mode == boot.Container {
		return s.console(ctx, req.Msg, stream)
	}
	k, err := openKmsg(s.opts.Kmsg)
	if err != nil {
		return failed(connect.CodeUnavailable, "the kernel's log can't be read: %w", err)
	}
	defer k.close()
	booted := time.Now().Add(-s.opts.Since())
	send := func(m *apiv1.KernelMessage) error {
		m.Time = timestamppb.New(booted.Add(time.Duration(m.GetSinceBootUs()) * time.Microsecond))
		return stream.Send(m)
	}
	tail := newTail(int(req.Msg.GetTail()))
	for {
		m, err := k.next(ctx, false)
		if err != nil {
			return err
		}
		if m == nil {
			break
		}
		if m = tail.push(m); m != nil {
			if err := send(m); err != nil {
				return err
			}
		}
	}
	for _, m := range tail.lines {
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
		m, err := k.next(ctx, true)
		if err != nil {
			return err
		}
		if err := send(m); err != nil {
			return err
		}
	}
}

// tail holds messages back until it is known which are the last.
type tail struct {
	most  int // 0: all, negative: none
	lines []*apiv1.KernelMessage
}

func newTail(most int) *tail { return &tail{most: min(most, maxTail)} }

// push returns a message that needn't be held back, or nil.
func (t *tail) push(m *apiv1.KernelMessage) *apiv1.KernelMessage {
	switch {
	case t.most == 0:
		return m
	case t.most > 0:
		if t.lines = append(t.lines, m); len(t.lines) > t.most {
			t.lines[0] = nil
			t.lines = t.lines[1:]
		}
	}
	return nil
}

// kmsg is the kernel's log, open.
type kmsg struct {
	file *os.File
	raw  interface {
		Read(func(fd uintptr) bool) error
	}
	buf []byte
}

func openKmsg(path string) (*kmsg, error) {
	// Without O_NONBLOCK a reader would wait in the kernel, where nobody ends it.
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	raw, err := file.SyscallConn()
	if err != nil {
		file.Close()
		return nil, err
	}
	return &kmsg{file: file, raw: raw, buf: make([]byte, maxRecord)}, nil
}

func (k *kmsg) close() { k.file.Close() }

// next is the next message; without wait, nil at the end of what there is.
func (k *kmsg) next(ctx context.Context, wait bool) (*apiv1.KernelMessage, error) {
	stop := context.AfterFunc(ctx, func() { _ = k.file.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	for {
		record, err := k.read(wait)
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case errors.Is(err, unix.EPIPE):
			// The kernel needed the room: reading goes on with what is there.
			continue
		case errors.Is(err, unix.EAGAIN), err == io.EOF && !wait:
			return nil, nil
		case err != nil:
			return nil, failed(connect.CodeUnavailable, "the kernel's log can't be read: %w", err)
		}
		if m := parseKmsg(record); m != nil {
			return m, nil
		}
	}
}

// read makes one read(2): of a record, or the error that says why there is none.
func (k *kmsg) read(wait bool) ([]byte, error) {
	var n int
	var err error
	if failed := k.raw.Read(func(fd uintptr) bool {
		n, err = unix.Read(int(fd), k.buf)
		return err != unix.EAGAIN || !wait
	}); failed != nil {
		return nil, failed
	}
	switch {
	case err != nil:
		return nil, err
	case n == 0:
		return nil, io.EOF
	}
	return k.buf[:n], nil
}

// parseKmsg reads a record: "priority,sequence,microseconds,flags;text", and
// then lines that begin with a blank and aren't for people. nil for what is none.
func parseKmsg(record []byte) *apiv1.KernelMessage {
	head, text, ok := strings.Cut(string(record), ";")
	fields := strings.Split(head, ",")
	if !ok || len(fields) < 3 {
		return nil
	}
	priority, err := strconv.ParseUint(fields[0], 10, 32)
	if err != nil {
		return nil
	}
	since, err := strconv.ParseUint(fields[2], 10, 63)
	if err != nil {
		return nil
	}
	text, _, _ = strings.Cut(text, "\n")
	const levels = 8 // below are the levels of syslog(3), above the facilities
	return &apiv1.KernelMessage{Level: uint32(priority % levels), SinceBootUs: since, Message: readable(unescape(text))}
}

// unescape undoes the kernel's \xNN for what isn't printable.
func unescape(text string) string {
	if !strings.Contains(text, `\x`) {
		return text
	}
	var b bytes.Buffer
	for rest := text; rest != ""; {
		before, after, found := strings.Cut(rest, `\x`)
		b.WriteString(before)
		rest = after
		if !found {
			break
		}
		if len(after) >= 2 {
			if c, err := strconv.ParseUint(after[:2], 16, 8); err == nil {
				b.WriteByte(byte(c))
				rest = after[2:]
				continue
			}
		}
		b.WriteString(`\x`)
	}
	return b.String()
}

// console is what the node has said on the console, for nodes in containers.
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
