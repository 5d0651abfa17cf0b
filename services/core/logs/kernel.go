package logs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// maxKernelRecord is more than a record has: CONSOLE_EXT_LOG_MAX of the kernel.
const maxKernelRecord = 8 << 10

// KernelRecord is a message of the kernel's log.
type KernelRecord struct {
	Level     int  // as syslog(3) counts
	Program   bool // it is a message of a program, and not of the kernel
	Sequence  uint64
	SinceBoot time.Duration
	Message   string
}

// KernelReader reads the kernel's log, one record per read(2):
// Documentation/ABI/testing/dev-kmsg.
type KernelReader struct {
	file *os.File
	raw  syscall.RawConn
	buf  []byte
}

// ReadKernel begins with the oldest message that the kernel has.
func ReadKernel(path string) (*KernelReader, error) {
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
	return &KernelReader{file: file, raw: raw, buf: make([]byte, maxKernelRecord)}, nil
}

// Close ends the reading.
func (k *KernelReader) Close() { k.file.Close() }

// Next is the next message; without wait, nil at the end of what there is.
func (k *KernelReader) Next(ctx context.Context, wait bool) (*KernelRecord, error) {
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
			return nil, err
		}
		if m := parseKernel(record); m != nil {
			return m, nil
		}
	}
}

// read makes one read(2): of a record, or the error that says why there is none.
func (k *KernelReader) read(wait bool) ([]byte, error) {
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

// KernelID is the log with the kernel's messages of this boot.
const KernelID = "kernel"

// FollowKernel adds the kernel's messages, from the first one on, to the log KernelID, until
// ctx ends; since is the time since boot. Messages that programs write there aren't added: ours are in their own logs.
func (l *Logs) FollowKernel(ctx context.Context, path string, since func() time.Duration) error {
	k, err := ReadKernel(path)
	if err != nil {
		return err
	}
	defer k.Close()
	var next uint64
	for {
		m, err := k.Next(ctx, true)
		if err != nil {
			return err
		}
		at := l.now().Add(m.SinceBoot - since()) // by the clock of now: it may have been set
		if next != 0 && m.Sequence > next {
			l.addKernel(at, priority(slog.LevelWarn), fmt.Sprintf("%d messages of the kernel are missing here: they were too many at once", m.Sequence-next))
		}
		if next = m.Sequence + 1; !m.Program {
			l.addKernel(at, m.Level, m.Message)
		}
	}
}

func (l *Logs) addKernel(at time.Time, level int, text string) {
	// each has one, of 0 to 7
	shown := levels[slices.IndexFunc(levels, func(l levelText) bool { return level <= l.priority })]
	l.put(at.UTC().Format(timeLayout)+"  "+shown.prefix+text, Record{Time: at, Facility: FacilityKernel, Service: KernelID, Level: level, Message: text})
}

// parseKernel reads a record: "priority,sequence,microseconds,flags;text", and
// then lines that begin with a blank and aren't for people. nil for what is none.
func parseKernel(record []byte) *KernelRecord {
	head, text, ok := strings.Cut(string(record), ";")
	fields := strings.Split(head, ",")
	if !ok || len(fields) < 3 {
		return nil
	}
	var numbers [3]uint64
	for i, bits := range []int{32, 64, 53} { // of microseconds: as many as a Duration has
		n, err := strconv.ParseUint(fields[i], 10, bits)
		if err != nil {
			return nil
		}
		numbers[i] = n
	}
	text, _, _ = strings.Cut(text, "\n")
	const levels = 8 // below are the levels of syslog(3), above the facilities
	return &KernelRecord{
		Level: int(numbers[0] % levels), Program: numbers[0] >= levels, Sequence: numbers[1], SinceBoot: time.Duration(numbers[2]) * time.Microsecond,
		Message: unescape(text),
	}
}

// escaped is the kernel's \xNN for what isn't printable.
var escaped = regexp.MustCompile(`\\x[0-9A-Fa-f]{2}`)

func unescape(text string) string {
	return escaped.ReplaceAllStringFunc(text, func(code string) string {
		c, _ := strconv.ParseUint(code[2:], 16, 8) // it matches
		return string([]byte{byte(c)})
	})
}
