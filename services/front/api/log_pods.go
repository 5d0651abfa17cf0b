package api

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/services/core/sleep"
)

const (
	// defaultPodLogs is where the kubelet has containerd write:
	// <namespace>_<pod>_<uid>/<container>/<restarts>.log.
	defaultPodLogs = "/var/log/pods"

	// podPoll is how often the end of a followed file is looked at: quick for a
	// reader's eye, and a stat or two for the node.
	podPoll = 250 * time.Millisecond
	// readBlock is read of a file at once.
	readBlock = 64 << 10
)

// podName is what namespaces, pods and containers may be called (RFC 1123), and
// keeps a caller's text from being a path.
var podName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`)

// container is one of Kubernetes, as users write it: namespace/pod:container.
type container struct{ namespace, pod, name string }

func (c container) String() string { return c.namespace + "/" + c.pod + ":" + c.name }

func parseContainer(text string) (container, error) {
	namespace, rest, slash := strings.Cut(text, "/")
	pod, name, colon := strings.Cut(rest, ":")
	c := container{namespace, pod, name}
	if !slash || !colon || !podName.MatchString(namespace) || !podName.MatchString(pod) || !podName.MatchString(name) || len(text) > maxName {
		return c, failed(connect.CodeInvalidArgument, "%q isn't a container: name it namespace/pod:container, as gbctl containers -k does", shortened(readable(text)))
	}
	return c, nil
}

// pods is the kubelet's directory of logs. Nothing is reached through it that
// is elsewhere.
type pods string

// entries wrap fs.ErrNotExist while no pod has run yet.
func (p pods) entries(dir string) ([]fs.DirEntry, error) {
	return untrusted.ReadDir(filepath.Join(string(p), dir))
}

// list names the containers that have logs, sorted.
func (p pods) list() ([]string, error) {
	dirs, err := p.entries(".")
	if boot.IgnoreMissing(err) != nil {
		return nil, err
	}
	var ids []string
	for _, dir := range dirs {
		parts := strings.Split(dir.Name(), "_") // in none of the names
		if len(parts) != 3 {
			continue
		}
		containers, err := p.entries(dir.Name())
		if err != nil {
			continue // it was just removed, or is no directory
		}
		for _, c := range containers {
			if c.IsDir() {
				ids = append(ids, readable(container{parts[0], parts[1], c.Name()}.String()))
			}
		}
	}
	slices.Sort(ids)
	return slices.Compact(ids), nil
}

// current is the file that a container's last run writes to. A pod that was
// made anew has another directory: the one that was written last counts.
func (p pods) current(c container) (path string, err error) {
	dirs, err := p.entries(".")
	if err != nil {
		return "", err
	}
	var newest time.Time
	for _, dir := range dirs {
		if !strings.HasPrefix(dir.Name(), c.namespace+"_"+c.pod+"_") {
			continue
		}
		files, err := p.entries(dir.Name() + "/" + c.name)
		if err != nil {
			continue
		}
		run, found := lastRun(files)
		if !found {
			continue
		}
		file := filepath.Join(string(p), dir.Name(), c.name, run)
		if info, err := untrusted.Stat(file); err == nil && (path == "" || info.ModTime().After(newest)) {
			path, newest = file, info.ModTime()
		}
	}
	if path == "" {
		return "", fs.ErrNotExist
	}
	return path, nil
}

// lastRun is the log of the highest number; beside it are rotated ones, with
// more behind their names.
func lastRun(files []fs.DirEntry) (name string, found bool) {
	for _, f := range files {
		if runNumber(f.Name()) > runNumber(name) {
			name = f.Name()
		}
	}
	return name, name != ""
}

// runNumber of 3.log is 3, and -1 of what is no such name.
func runNumber(name string) int {
	number, isLog := strings.CutSuffix(name, ".log")
	if n, err := strconv.Atoi(number); isLog && err == nil {
		return n
	}
	return -1
}

// readContainer sends a container's log in the format that it has.
func (s *logService) readContainer(ctx context.Context, req *apiv1.ReadLogRequest, send func([]string, uint64) error) error {
	c, err := parseContainer(req.GetId())
	if err != nil {
		return err
	}
	p := pods(s.opts.PodLogs)
	if !untrusted.Exists(s.opts.PodLogs) {
		return failed(connect.CodeNotFound, "no container of Kubernetes has run on this node yet: see gbctl service kubelet")
	}
	path, err := p.current(c)
	if err != nil {
		ids, _ := p.list()
		return failed(connect.CodeNotFound, "no logs of %s are on this node; %s", c, there(ids))
	}
	f := &follower{pods: p, container: c, send: send}
	defer f.close()
	size, err := f.open(path, int(req.GetTail()))
	if err != nil {
		return err
	}
	if err := send(nil, 0); err != nil {
		return err
	}
	if !req.GetFollow() {
		// Up to what is there now: a container that writes all the time has no end.
		if err := f.drain(ctx, io.LimitReader(f.file, size)); err != nil {
			return err
		}
		return f.flush()
	}
	for {
		if err := f.drain(ctx, f.file); err != nil {
			return err
		}
		if err := f.await(ctx); err != nil {
			return err
		}
	}
}

// follower reads a container's log over rotations, restarts and new pods. Its
// caller's pace is its own: what it hasn't read yet is in the files.
type follower struct {
	pods      pods
	container container
	send      func(lines []string, lost uint64) error

	file    *os.File
	path    string
	partial []byte // of a line whose end isn't there yet
}

func (f *follower) close() {
	if f.file != nil {
		f.file.Close()
	}
}

// open begins with the last tail lines of a file (0: all, negative: none), and
// returns the size of these lines.
func (f *follower) open(path string, tail int) (size int64, err error) {
	file, err := untrusted.OpenLog(path)
	if err != nil {
		return 0, err
	}
	f.close()
	f.file, f.path, f.partial = file, path, nil
	info, err := file.Stat()
	if err != nil {
		return 0, err
	}
	from := int64(0)
	switch {
	case tail < 0:
		from = info.Size()
	case tail > 0:
		if from, err = lastLines(file, info.Size(), tail); err != nil {
			return 0, err
		}
	}
	_, err = file.Seek(from, io.SeekStart)
	return info.Size() - from, err
}

// lastLines is where the last n lines of a file begin.
func lastLines(file io.ReaderAt, size int64, n int) (int64, error) {
	block := make([]byte, readBlock)
	for end := size; end > 0; {
		begin := max(end-readBlock, 0)
		part := block[:end-begin]
		if _, err := file.ReadAt(part, begin); err != nil && err != io.EOF {
			return 0, err
		}
		for i := len(part) - 1; i >= 0; i-- {
			// The newline at the very end closes the last line.
			if part[i] != '\n' || begin+int64(i) == size-1 {
				continue
			}
			if n--; n == 0 {
				return begin + int64(i) + 1, nil
			}
		}
		end = begin
	}
	return 0, nil
}

// drain sends whole lines up to the end of r.
func (f *follower) drain(ctx context.Context, r io.Reader) error {
	block := make([]byte, readBlock)
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := r.Read(block)
		if n > 0 {
			if err := f.take(block[:n]); err != nil {
				return err
			}
		}
		switch {
		case err == io.EOF:
			return nil
		case err != nil:
			return err
		}
	}
}

// take splits into lines. One that is too long is cut into several.
func (f *follower) take(data []byte) error {
	var lines []string
	for len(data) > 0 {
		line, rest, whole := bytes.Cut(data, []byte{'\n'})
		f.partial = append(f.partial, line...)
		if whole || len(f.partial) >= maxLine {
			lines = append(lines, string(f.partial))
			f.partial = f.partial[:0]
		}
		data = rest
	}
	if len(lines) == 0 {
		return nil
	}
	return sendChunks(lines, 0, f.send)
}

// flush sends a last line that has no end, and won't get one.
func (f *follower) flush() error {
	if len(f.partial) == 0 {
		return nil
	}
	line := string(f.partial)
	f.partial = nil
	return sendChunks([]string{line}, 0, f.send)
}

// await returns when there may be more to read: in this file, or in the one
// that has taken its place, which is then open.
func (f *follower) await(ctx context.Context) error {
	for sleep.For(ctx, podPoll) {
		at, err := f.file.Seek(0, io.SeekCurrent)
		if err != nil {
			return err
		}
		now, err := f.file.Stat()
		if err != nil {
			return err
		}
		if now.Size() > at {
			return nil
		}
		if now.Size() < at { // cut short in place
			_, err := f.file.Seek(0, io.SeekStart)
			return err
		}
		path, err := f.pods.current(f.container)
		if err != nil {
			continue // between two runs, or gone for good: who follows decides
		}
		if f.later(path, now) {
			return f.change(ctx, path)
		}
	}
	return ctx.Err()
}

// later reports whether path continues the open file: the same run
// after a rotation, a later run, or a new pod. While a file is
// rotated, the latest may for a moment be an earlier run.
func (f *follower) later(path string, now fs.FileInfo) bool {
	latest, err := untrusted.Stat(path)
	if err != nil || os.SameFile(latest, now) {
		return false
	}
	if filepath.Dir(path) != filepath.Dir(f.path) {
		return latest.ModTime().After(now.ModTime())
	}
	return runNumber(filepath.Base(path)) >= runNumber(filepath.Base(f.path))
}

// change goes on with another file. The last lines of the old one may have been
// written since its end was reached.
func (f *follower) change(ctx context.Context, path string) error {
	if err := f.drain(ctx, f.file); err != nil {
		return err
	}
	if err := f.flush(); err != nil {
		return err
	}
	if _, err := f.open(path, 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
