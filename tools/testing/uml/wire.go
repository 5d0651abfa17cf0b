package uml

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"sync"
)

// The wrapper and the guest's init exchange frames on a serial line:
//
//	guest   hello ─►
//	        ◄─ part …           of what to run, each after another hello
//	        ◄─ order            the last part
//	        output ─► …         what the test prints
//	        ◄─ signal …         a signal for the test
//	        alive ─► …          each second
//	        ended ─►            how the test ended, or fault: why it could not run
//	        ◄─ bye              then the guest powers off
//
// A frame is its kind, the length of its content in 4 bytes, and the content.
type kind byte

const (
	hello  kind = 'h'
	part   kind = 'p'
	order  kind = 'o'
	output kind = 't'
	signal kind = 's'
	alive  kind = 'a'
	ended  kind = 'e'
	fault  kind = 'f'
	bye    kind = 'b'
)

const (
	// longest bounds a frame: the guest's largest are pieces of output.
	longest = 64 << 10
	// partSize fits the guest's buffer of a terminal's input (4 KiB, N_TTY_BUF_SIZE in
	// drivers/tty/n_tty.c): where more comes, UML looks again some ten times a second.
	partSize = 2 << 10
)

type frame struct {
	kind    kind
	content []byte
}

// An assignment is what the guest is to run.
type assignment struct {
	Program string
	Args    []string // with the program's name
	Dir     string
	Env     []string
	// Temporary directories are empty and writable in the guest.
	Temporary []string
	// Shared directories are the host's own ones.
	Shared []shared
	// Self is the program that holds this package.
	Self string
}

type shared struct {
	Path     string
	Writable bool
}

// An outcome is how the test program ended.
type outcome struct {
	Code   int
	Signal int // that ended it, or 0
}

// line is one end of the serial line.
type line struct {
	file io.ReadWriter
	mu   sync.Mutex // keeps the frames of several goroutines apart
}

func (l *line) send(k kind, content []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	head := make([]byte, 5, 5+len(content))
	head[0] = byte(k)
	binary.BigEndian.PutUint32(head[1:], uint32(len(content)))
	if _, err := l.file.Write(append(head, content...)); err != nil {
		return fmt.Errorf("send frame %q of %d bytes: %w", k, len(content), err)
	}
	return nil
}

func decode(content []byte, v any) error {
	if err := json.Unmarshal(content, v); err != nil {
		return fmt.Errorf("decode %d bytes: %w", len(content), err)
	}
	return nil
}

// ask receives what the guest is to run.
func (l *line) ask() (a assignment, err error) {
	var all []byte
	for {
		if err := l.send(hello, nil); err != nil {
			return a, err
		}
		f, err := l.receive()
		if err != nil {
			return a, err
		}
		all = append(all, f.content...)
		switch f.kind {
		case order:
			return a, decode(all, &a)
		case part:
		default:
			return a, fmt.Errorf("frame %q instead of what to run", f.kind)
		}
	}
}

// answer sends the next part of what the guest is to run, and returns the rest.
func (l *line) answer(text []byte) (rest []byte, err error) {
	if len(text) <= partSize {
		return nil, l.send(order, text)
	}
	return text[partSize:], l.send(part, text[:partSize])
}

// receive returns io.EOF where the line ends between two frames.
func (l *line) receive() (frame, error) {
	var head [5]byte
	if _, err := io.ReadFull(l.file, head[:]); err != nil {
		return frame{}, err
	}
	f := frame{kind: kind(head[0])}
	size := binary.BigEndian.Uint32(head[1:])
	if size > longest {
		return f, fmt.Errorf("frame %q of %d bytes: more than %d", f.kind, size, longest)
	}
	f.content = make([]byte, size)
	if _, err := io.ReadFull(l.file, f.content); err != nil {
		return f, fmt.Errorf("receive frame %q of %d bytes: %w", f.kind, size, err)
	}
	return f, nil
}
