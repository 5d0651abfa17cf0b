package qmp

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// fake is the other end: it greets, and answers each command with the next script.
func fake(t *testing.T, scripts ...string) net.Conn {
	t.Helper()
	ours, theirs := net.Pipe()
	t.Cleanup(func() { theirs.Close() })
	go func() {
		fmt.Fprintln(theirs, `{"QMP": {"version": {}, "capabilities": []}}`)
		in := bufio.NewScanner(theirs)
		for _, script := range scripts {
			if !in.Scan() {
				return
			}
			fmt.Fprintln(theirs, script)
		}
		theirs.Close()
	}()
	return ours
}

const ok = `{"return": {}}`

func TestCommandsAndEvents(t *testing.T) {
	t.Parallel()
	var events []string
	c, err := New(t.Context(), fake(t, ok,
		`{"event": "STOP"}`+"\n"+ok,
		`{"error": {"class": "CommandNotFound", "desc": "no such command"}}`,
		ok+"\n"+`{"event": "SHUTDOWN", "data": {"guest": true, "reason": "guest-reset"}}`,
	), func(name, reason string) { events = append(events, name+" "+reason) })
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Do(t.Context(), "stop"); err != nil {
		t.Error(err)
	}
	if err := c.Do(t.Context(), "fly"); err == nil || err.Error() != "qmp fly: CommandNotFound: no such command" {
		t.Errorf("fly: %v", err)
	}
	if err := c.Do(t.Context(), "cont"); err != nil {
		t.Error(err)
	}
	<-c.Done()
	want := []string{"STOP ", "SHUTDOWN guest-reset"}
	if diff := cmp.Diff(want, events); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	if err := c.Do(t.Context(), "quit"); err == nil {
		t.Error("a command worked after the end")
	}
}

func TestGreetingOfAnother(t *testing.T) {
	t.Parallel()
	ours, theirs := net.Pipe()
	go func() {
		fmt.Fprintln(theirs, "SSH-2.0-OpenSSH")
		theirs.Close()
	}()
	if _, err := New(t.Context(), ours, func(string, string) {}); err == nil {
		t.Error("took SSH for QMP")
	}
}

func TestSilenceEndsWithTheContext(t *testing.T) {
	t.Parallel()
	ours, theirs := net.Pipe()
	t.Cleanup(func() { theirs.Close() })
	go func() { _, _ = bufio.NewReader(theirs).ReadString('\n') }() // reads and doesn't answer
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := New(ctx, ours, func(string, string) {})
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "qmp_capabilities") {
		t.Errorf("new: %v", err)
	}
}
