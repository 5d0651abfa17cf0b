package logs

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"slices"
)

// ErrNotPersisted: EPHEMERAL isn't mounted.
var ErrNotPersisted = errors.New("logs are in memory only: EPHEMERAL isn't mounted")

// Previous returns the lines of a log that came before its current file of this boot, also in
// earlier boots, oldest first: those in its rotated files. Of them it returns the last tail; 0:
// all, negative: none. A file that can't be read ends it with an error.
func (l *Logs) Previous(id string, tail int) iter.Seq2[string, error] {
	return func(yield func(string, error) bool) {
		files, err := l.openPrevious(id)
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

// openPrevious opens the rotated files of a log, the oldest first. They aren't written any more,
// but may be renamed meanwhile: the newest is opened first, and one that is met again is skipped.
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
	var seen []fs.FileInfo
	for i := first; i <= keepOld; i++ {
		f, err := os.Open(rotated(logPath(dir, id), i))
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

// eachLine reads files from their start. A line that is too long for a log comes in pieces.
func eachLine(files []*os.File, do func(line string) bool) error {
	for _, f := range files {
		if _, err := f.Seek(0, io.SeekStart); err != nil {
			return err
		}
		r := bufio.NewReaderSize(io.LimitReader(f, maxFile), maxLine+1)
		for {
			line, _, err := r.ReadLine()
			if err == io.EOF {
				break
			}
			if err != nil {
				return err
			}
			if !do(string(line)) {
				return nil
			}
		}
	}
	return nil
}
