package logs

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/garboard-os/garboard/boot/untrusted"
)

const (
	// Bounds of the files of one log: with 40 logs, 320 MB at the very worst,
	// and the last three boots of a normal service survive (design, duty 13).
	maxFile  = 2 << 20
	keepOld  = 3
	filePerm = 0o640

	// Lines that wait for the disk. At 200 bytes a line 800 KB; a disk that
	// stalls for longer than these last loses lines instead of stopping services.
	queueLines = 4096
)

// disk writes lines to files, in one goroutine between Persist and Release.
type disk struct {
	report func(format string, args ...any)
	open   func(path string) (file, error)

	mu      sync.Mutex      // guards all below; the innermost of the locks
	dir     string          // of the files
	boot    uint64          // the number of this boot
	begun   map[string]bool // logs whose current file is of this boot
	queue   chan record     // nil: nothing is persisted
	done    chan struct{}
	dropped int // lines that found the queue full
}

// file is what a log needs of *os.File; tests inject a full disk.
type file interface {
	io.WriteCloser
	Truncate(size int64) error
}

func openFile(path string) (file, error) {
	return untrusted.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, filePerm)
}

type record struct{ id, line string }

// Persist writes all logs, from their first line in memory on, also to
// dir/<id>.log from now on. Files of the last boots are kept as <id>.log.1 and
// up; the first line of each has the number of its boot. The directory is made; its
// parent must exist.
func (l *Logs) Persist(dir string, boot uint64) error {
	if err := untrusted.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("persist logs: %w", err)
	}
	// With all rings held, each line is either in a ring by now or will come
	// through add, and finds the queue.
	l.mu.Lock()
	defer l.mu.Unlock()
	backlog := 0
	for _, r := range l.byID {
		r.mu.Lock()
		defer r.mu.Unlock()
		backlog += len(r.items)
	}
	d := &l.disk
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.queue != nil {
		return fmt.Errorf("persist logs to %s: they are already", dir)
	}
	// Room for the backlog, so that this doesn't wait for the disk either.
	queue := make(chan record, queueLines+backlog)
	for id, r := range l.byID {
		for _, line := range r.items {
			queue <- record{id, line}
		}
	}
	done := make(chan struct{})
	w := &diskWriter{disk: d, dir: dir, head: bootLine(boot), files: map[string]*logFile{}}
	go func() {
		defer close(done)
		w.run(queue)
	}()
	d.dir, d.boot, d.begun, d.queue, d.done = dir, boot, map[string]bool{}, queue, done
	return nil
}

// Release writes what is queued and closes the files, so that their file system
// can be unmounted. Logs in memory go on.
func (l *Logs) Release() {
	d := &l.disk
	d.mu.Lock()
	queue, done := d.queue, d.done
	d.queue = nil
	if queue != nil {
		close(queue)
	}
	d.mu.Unlock()
	if done != nil {
		<-done
	}
}

func (d *disk) enqueue(id, line string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.queue == nil {
		return
	}
	select {
	case d.queue <- record{id, line}:
	default:
		d.dropped++
	}
}

func (d *disk) takeDropped() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := d.dropped
	d.dropped = 0
	return n
}

// diskWriter is the state of the one goroutine that writes files.
type diskWriter struct {
	disk     *disk
	dir      string
	head     string // the first line of a file
	files    map[string]*logFile
	lost     int  // lines since writing last worked
	reported bool // on the console, since then
}

func (w *diskWriter) run(queue <-chan record) {
	for rec := range queue {
		w.write(rec)
	}
	for _, f := range w.files {
		if f.file != nil {
			f.file.Close()
		}
	}
}

func (w *diskWriter) write(rec record) {
	w.lost += w.disk.takeDropped()
	f, err := w.file(rec.id)
	if err == nil && w.lost > 0 {
		err = f.append(w.disk.open, fmt.Sprintf("%s  warning: %d lines of all logs are missing here: the disk was full or too slow",
			time.Now().UTC().Format(timeLayout), w.lost))
		if err == nil {
			w.lost, w.reported = 0, false
		}
	}
	if err == nil {
		err = f.append(w.disk.open, rec.line)
	}
	if err == nil {
		return
	}
	w.lost++
	if !w.reported {
		w.reported = true
		w.disk.report("logs: %v; lines are kept in memory only until writing works again", err)
	}
}

// logFile is one open <id>.log.
type logFile struct {
	path string
	head string
	file file // nil: to be opened with the next line
	size int64
}

func (w *diskWriter) file(id string) (*logFile, error) {
	if f := w.files[id]; f != nil {
		return f, nil
	}
	f := &logFile{path: logPath(w.dir, id), head: w.head}
	// What is there is of an earlier boot.
	if err := shift(f.path); err != nil {
		return nil, err
	}
	w.files[id] = f
	w.disk.mu.Lock()
	w.disk.begun[id] = true
	w.disk.mu.Unlock()
	return f, nil
}

// logPath is the current file of a log. An ID is a name; should one ever hold a slash, it stays
// in the directory.
func logPath(dir, id string) string {
	return filepath.Join(dir, strings.ReplaceAll(id, "/", "_")+".log")
}

// bootLine is the first line of each file.
func bootLine(boot uint64) string { return fmt.Sprintf("%s%d --", bootHead, boot) }

const bootHead = "-- boot "

// rotated is the path of the file that was current i files ago.
func rotated(path string, i int) string {
	if i == 0 {
		return path
	}
	return fmt.Sprintf("%s.%d", path, i)
}

func (f *logFile) append(open func(string) (file, error), line string) (err error) {
	if f.file != nil && f.size > 0 && f.size+int64(len(line))+1 > maxFile {
		f.file.Close()
		f.file = nil
		if err := shift(f.path); err != nil {
			return err
		}
	}
	if f.file == nil {
		if f.file, err = open(f.path); err != nil {
			f.file = nil
			return err
		}
		f.size = 0
	}
	if f.size == 0 {
		line = f.head + "\n" + line
	}
	n, err := f.file.Write(append([]byte(line), '\n'))
	if err != nil {
		// Half a line would merge with the next one.
		if n > 0 && f.file.Truncate(f.size) != nil {
			f.size += int64(n)
		}
		return err
	}
	f.size += int64(n)
	return nil
}

// shift renames path to path.1, path.1 to path.2 and so on; the oldest goes.
func shift(path string) error {
	for i := keepOld - 1; i >= 0; i-- {
		if err := untrusted.Rename(rotated(path, i), rotated(path, i+1)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}
