package logship

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

	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/services/core/background"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/sleep"
)

const (
	// auditEvery is how often the audit log is looked at.
	auditEvery = time.Second
	// maxAuditLine bounds a line; with a policy that logs objects they may be long.
	maxAuditLine = 64 << 10
	// maxAuditLook bounds what is read at once, and maxAuditBehind what is read at all: the API
	// server begins another file long before. A pod may have made one that has no end.
	maxAuditLook   = 16 << 20
	maxAuditBehind = 512 << 20
	auditService   = "kube-apiserver"
	info           = 6 // of syslog(3)
)

// startSources starts what isn't in the feed anyway: the audit log.
func (f *Forwarder) startSources() (stop func()) {
	return background.Start(context.Background(), func(ctx context.Context) {
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
	// reported is why it wasn't read, as the log servers know.
	reported string
}

// poll adds the lines that have come since the last call.
func (a *auditLog) poll(ctx context.Context) {
	file, err := untrusted.OpenLog(a.path)
	if err != nil {
		a.refused(err)
		return // the next call tries again
	}
	defer file.Close()
	a.reported = ""
	info, err := file.Stat()
	if err != nil {
		return
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
	a.read(ctx, file)
}

// refused notes that there is no log yet, or says once why what is in its place isn't read.
func (a *auditLog) refused(err error) {
	if errors.Is(err, fs.ErrNotExist) {
		a.seen = a.seen || untrusted.Exists(filepath.Dir(a.path))
		return
	}
	if why := err.Error(); why != a.reported {
		a.reported = why
		a.add(warning, "the audit log isn't read: "+why)
	}
}

// rest reads the end of a file that was renamed since: kube-apiserver-TIME.log. A few
// seconds later the API server compresses it.
func (a *auditLog) rest(ctx context.Context) {
	// a line is added below
	old, _ := untrusted.Glob(filepath.Dir(a.path), strings.TrimSuffix(filepath.Base(a.path), ".log")+"-*.log")
	for _, path := range old {
		if a.readIf(ctx, path) {
			return
		}
	}
	a.add(warning, "lines are missing here: the audit log was rotated twice within a second, or its former file is gone")
}

func (a *auditLog) add(level int, text string) {
	a.feed.Add(logs.Record{Time: time.Now(), Facility: logs.FacilityAudit, Service: auditService, Level: level, Message: text})
}

// readIf reads the file that was read last, if it is this one.
func (a *auditLog) readIf(ctx context.Context, path string) bool {
	file, err := untrusted.OpenLog(path)
	if err != nil {
		return false
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil || !os.SameFile(info, a.file) {
		return false
	}
	a.read(ctx, file)
	return true
}

// read adds the lines from the offset on. The end of a line may come later.
func (a *auditLog) read(ctx context.Context, file *os.File) {
	if info, err := file.Stat(); err == nil && info.Size()-a.offset > maxAuditBehind {
		a.offset = info.Size()
		a.add(warning, "lines are missing here: the audit log has grown by more than it can")
		return
	}
	r := bufio.NewReaderSize(io.NewSectionReader(file, a.offset, maxAuditLook), maxAuditLine)
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
