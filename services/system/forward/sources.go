package forward

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/sleep"
)

const (
	// auditEvery is how often the audit log is looked at.
	auditEvery = time.Second
	// maxAuditLine bounds a line; with a policy that logs objects they may be long.
	maxAuditLine = 64 << 10
	auditService = "kube-apiserver"
	info         = 6 // of syslog(3)
)

// startSources starts what isn't in the feed anyway: the kernel's log and the audit log.
func (f *Forwarder) startSources() (stop func()) {
	late := f.late
	return owned(func(ctx context.Context) {
		var wg sync.WaitGroup
		defer wg.Wait()
		audit := &auditLog{path: f.o.AuditLog, feed: f.o.Logs.Feed()}
		audit.poll(ctx)               // to see what is there before
		if f.o.Mode == boot.Machine { // a container's kernel is its host's
			wg.Go(func() {
				if err := f.followKernel(ctx, late); err != nil && ctx.Err() == nil {
					f.log.Warn("the kernel's log isn't sent any more", "err", err.Error())
				}
			})
		}
		wg.Go(func() {
			for sleep.For(ctx, auditEvery) {
				audit.poll(ctx)
			}
		})
	})
}

// followKernel adds the kernel's messages to the feed: those since boot, or, if late, new
// ones.
func (f *Forwarder) followKernel(ctx context.Context, late bool) error {
	k, err := logs.ReadKernel(f.o.kmsg)
	if err != nil {
		return err
	}
	defer k.Close()
	if late {
		if err := k.End(); err != nil {
			return err
		}
	}
	booted := time.Now().Add(-f.o.Since())
	var next uint64
	for {
		m, err := k.Next(ctx, true)
		if err != nil {
			return err
		}
		r := logs.Record{Time: booted.Add(m.SinceBoot), Facility: logs.FacilityKernel, Service: "kernel", Level: m.Level, Message: m.Message}
		if next != 0 && m.Sequence > next {
			lost := r
			lost.Level, lost.Message = warning, fmt.Sprintf("%d messages of the kernel are missing here: they were too many at once", m.Sequence-next)
			f.o.Logs.Feed().Add(lost)
		}
		next = m.Sequence + 1
		f.o.Logs.Feed().Add(r)
	}
}

// auditLog reads the API server's audit log as it grows. It keeps no file open, because
// EPHEMERAL couldn't be unmounted otherwise.
type auditLog struct {
	path string
	feed *logs.Feed
	// seen: the directory was there before: a file that appears then is new.
	seen   bool
	file   fs.FileInfo // the file that was read last; nil: none
	offset int64
}

// poll adds the lines that have come since the last call.
func (a *auditLog) poll(ctx context.Context) {
	info, err := os.Stat(a.path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if _, err := os.Stat(filepath.Dir(a.path)); err == nil {
			a.seen = true
		}
		return
	case err != nil:
		return // the next call tries again
	}
	switch {
	case a.file == nil && !a.seen:
		a.offset = info.Size() // of an earlier boot
	case a.file == nil:
	case !os.SameFile(a.file, info):
		a.rest(ctx)
		a.offset = 0
	case info.Size() < a.offset:
		a.offset = 0
	}
	a.file, a.seen = info, true
	a.read(ctx, a.path)
}

// rest reads the end of a file that was renamed since: kube-apiserver-TIME.log. A few
// seconds later the API server compresses it.
func (a *auditLog) rest(ctx context.Context) {
	old, _ := filepath.Glob(strings.TrimSuffix(a.path, ".log") + "-*.log") // the pattern is well-formed
	for _, path := range old {
		if info, err := os.Stat(path); err == nil && os.SameFile(info, a.file) {
			a.read(ctx, path)
			return
		}
	}
	a.add(warning, "lines are missing here: the audit log was rotated twice within a second, or its former file is gone")
}

func (a *auditLog) add(level int, text string) {
	a.feed.Add(logs.Record{Time: time.Now(), Facility: logs.FacilityAudit, Service: auditService, Level: level, Message: text})
}

// read adds the lines from the offset on. The end of a line may come later.
func (a *auditLog) read(ctx context.Context, path string) {
	file, err := os.Open(path)
	if err != nil {
		return
	}
	defer file.Close()
	r := bufio.NewReaderSize(io.NewSectionReader(file, a.offset, 1<<62), maxAuditLine)
	for ctx.Err() == nil {
		line, err := r.ReadSlice('\n')
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return
		}
		a.offset += int64(len(line))
		if text := strings.TrimRight(string(line), "\n"); text != "" {
			a.add(info, text)
		}
	}
}
