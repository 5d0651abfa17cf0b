package forward

import (
	"bufio"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

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

// startSources starts what isn't in the feed anyway: the audit log.
func (f *Forwarder) startSources() (stop func()) {
	return owned(func(ctx context.Context) {
		audit := &auditLog{path: f.o.AuditLog, feed: f.o.Logs.Feed()}
		audit.poll(ctx) // to see what is there before
		for sleep.For(ctx, auditEvery) {
			audit.poll(ctx)
		}
	})
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
