//go:build e2e

package e2etest

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// A Session is gbctl as a user has it on a terminal: all output in one order, with the
// answers in it. It is killed at the end of its test.
type Session struct {
	t     testing.TB
	cmd   *exec.Cmd
	input io.WriteCloser
	news  chan struct{} // has an element after output and at the end
	ended chan struct{} // closed after err is set
	err   error

	mu   sync.Mutex // guards text
	text strings.Builder
}

// Session starts gbctl with the cluster's client configuration.
func (c *Cluster) Session(args ...string) *Session {
	c.t.Helper()
	program, err := gbctl()
	if err != nil {
		c.t.Fatal(err)
	}
	s := &Session{t: c.t, cmd: exec.Command(program, args...), news: make(chan struct{}, 1), ended: make(chan struct{})}
	s.cmd.Env = append(os.Environ(), "GARBOARDCONFIG="+c.ClientConfig())
	s.cmd.Stdout, s.cmd.Stderr = s, s
	if s.input, err = s.cmd.StdinPipe(); err == nil {
		err = s.cmd.Start()
	}
	if err != nil {
		c.t.Fatalf("gbctl %s: %v", strings.Join(args, " "), err)
	}
	go func() {
		s.err = s.cmd.Wait()
		close(s.ended)
		s.wake()
	}()
	c.t.Cleanup(s.Kill)
	return s
}

// Write adds output.
func (s *Session) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.wake()
	return s.text.Write(p)
}

func (s *Session) wake() {
	select {
	case s.news <- struct{}{}:
	default:
	}
}

// Text is the output so far.
func (s *Session) Text() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

// Ended reports whether gbctl has ended.
func (s *Session) Ended() bool {
	select {
	case <-s.ended:
		return true
	default:
		return false
	}
}

// Await waits until found returns true for the output, or gbctl ends. It returns whether
// found did.
func (s *Session) Await(budget time.Duration, what string, found func(text string) bool) bool {
	s.t.Helper()
	ctx, cancel := eventually.Context(s.t.Context(), budget)
	defer cancel()
	for {
		ended := s.Ended()
		if found(s.Text()) {
			return true
		}
		if ended {
			return false
		}
		select {
		case <-s.news:
		case <-ctx.Done():
			s.t.Fatalf("gbctl doesn't show in time: %s:\n%s", what, s.Text())
		}
	}
}

// Asks waits for a question, which has this part.
func (s *Session) Asks(budget time.Duration, part string) {
	s.t.Helper()
	if !s.Await(budget, "the question "+part, func(string) bool { return s.Prompts(part) }) {
		s.t.Fatalf("gbctl ended without the question %s: %v\n%s", part, s.err, s.Text())
	}
}

// prompted is the question that gbctl waits for an answer to, at the end of its output.
func prompted(text string) string {
	last := text[strings.LastIndexByte(text, '\n')+1:]
	if !strings.HasSuffix(last, "]: ") {
		return ""
	}
	return last
}

// Prompts reports whether gbctl waits for the answer to a question, which has this part.
func (s *Session) Prompts(part string) bool {
	asked := prompted(s.Text())
	return asked != "" && strings.Contains(asked, part)
}

// Operation is the ID of the operation that the output is about; "" before it begins.
func (s *Session) Operation() string {
	if found := operationBegins.FindStringSubmatch(s.Text()); found != nil {
		return found[1]
	}
	return ""
}

// Type types a line, which is in the output as on a terminal.
func (s *Session) Type(line string) {
	s.t.Helper()
	fmt.Fprintln(s, line)
	if _, err := fmt.Fprintln(s.input, line); err != nil {
		s.t.Errorf("type %q: %v", line, err)
	}
}

// End waits for the end of gbctl, and returns its error.
func (s *Session) End(budget time.Duration) error {
	s.t.Helper()
	s.Await(budget, "its end", func(string) bool { return false })
	return s.err
}

// Kill kills gbctl, and waits until it is gone.
func (s *Session) Kill() {
	_ = s.cmd.Process.Kill() // it may have ended
	<-s.ended
}
