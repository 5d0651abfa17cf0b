package logs

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/boot/untrusted"
)

// ErrNotPersisted: EPHEMERAL isn't mounted.
var ErrNotPersisted = errors.New("logs are in memory only: EPHEMERAL isn't mounted")

// ErrNoBoot: no file has lines of that boot.
var ErrNoBoot = errors.New("there are no lines")

// Previous returns the lines of a log that came before its current file of this boot, also in
// earlier boots, oldest first: those in its rotated files. Of them it returns the last tail; 0:
// all, negative: none. A file that can't be read ends it with an error.
func (l *Logs) Previous(id string, tail int) iter.Seq2[string, error] {
	return l.lines(id, tail, func() ([]*os.File, error) { return l.openPrevious(id) })
}

// OfBoot is Previous for all lines of a boot: 1 and up is its number, -1 the boot before
// this one, and so on; 0 is this boot.
func (l *Logs) OfBoot(id string, boot int64, tail int) iter.Seq2[string, error] {
	return l.lines(id, tail, func() ([]*os.File, error) { return l.openBoot(id, boot) })
}

// lines reads the files that open returns, and closes them.
func (l *Logs) lines(id string, tail int, open func() ([]*os.File, error)) iter.Seq2[string, error] {
	return func(yield func(string, error) bool) {
		files, err := open()
		defer func() {
			for _, f := range files {
				f.Close()
			}
		}()
		if err == nil && tail < 0 {
			return
		}
		skip := 0
		if err == nil && tail > 0 {
			err = eachLine(files, func(string) bool { skip++; return true })
			skip = max(skip-tail, 0)
		}
		more := true
		if err == nil {
			err = eachLine(files, func(line string) bool {
				if skip > 0 {
					skip--
					return true
				}
				more = yield(line, nil)
				return more
			})
		}
		if err != nil && more {
			yield("", fmt.Errorf("read earlier lines of %s: %w", id, err))
		}
	}
}

// openBoot opens the files of a boot, the oldest first.
func (l *Logs) openBoot(id string, boot int64) (of []*os.File, err error) {
	l.disk.mu.Lock()
	dir, persisted := l.disk.dir, l.disk.queue != nil
	if boot <= 0 {
		boot += int64(l.disk.boot)
	}
	l.disk.mu.Unlock()
	if !persisted {
		return nil, ErrNotPersisted
	}
	all, err := openFiles(logPath(dir, id), 0)
	var others []string
	for _, f := range all {
		head := ""
		if err == nil {
			head, err = bufio.NewReaderSize(f, 64).ReadString('\n')
		}
		if head = strings.TrimSuffix(head, "\n"); head == bootLine(uint64(boot)) {
			of = append(of, f)
			continue
		}
		f.Close()
		others = append(others, strings.Trim(head, "- "))
	}
	if err == nil && len(of) == 0 {
		err = fmt.Errorf("%w of boot %d; the files have those of: %s", ErrNoBoot, boot, cmp.Or(strings.Join(slices.Compact(others), ", "), "no boot"))
	}
	return of, err
}

// openPrevious opens the rotated files of a log, the oldest first.
func (l *Logs) openPrevious(id string) (files []*os.File, err error) {
	l.disk.mu.Lock()
	dir, persisted, first := l.disk.dir, l.disk.queue != nil, 0
	if l.disk.begun[id] {
		first = 1
	}
	l.disk.mu.Unlock()
	if !persisted {
		return nil, ErrNotPersisted
	}
	return openFiles(logPath(dir, id), first)
}

// openFiles opens the files of a log from one on, the oldest first. They may be renamed meanwhile:
// the newest is opened first, and one that is met again is skipped.
func openFiles(path string, first int) (files []*os.File, err error) {
	var seen []fs.FileInfo
	for i := first; i <= keepOld; i++ {
		f, err := untrusted.OpenLog(rotated(path, i))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return files, err
		}
		files = slices.Insert(files, 0, f)
		info, err := f.Stat()
		if err != nil {
			return files, err
		}
		if slices.ContainsFunc(seen, func(other fs.FileInfo) bool { return os.SameFile(info, other) }) {
			f.Close()
			files = files[1:]
		}
		seen = append(seen, info)
	}
	return files, nil
}

// eachLine reads files from their start, without the lines with the number of the boot. A line that is too long for a
// log comes in pieces.
func eachLine(files []*os.File, do func(line string) bool) error {
	for _, f := range files {
		if _, err := f.Seek(0, io.SeekStart); err != nil {
			return err
		}
		r := bufio.NewReaderSize(io.LimitReader(f, maxFile), maxLine+1)
		for first := true; ; first = false {
			line, _, err := r.ReadLine()
			if err == io.EOF {
				break
			}
			if err != nil {
				return err
			}
			if first && bytes.HasPrefix(line, []byte(bootHead)) {
				continue
			}
			if !do(string(line)) {
				return nil
			}
		}
	}
	return nil
}
