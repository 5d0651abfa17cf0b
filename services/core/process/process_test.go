package process

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/garboard-os/garboard/tools/testing/eventually"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

func ignoreTerm() { signal.Ignore(unix.SIGTERM) }

// exitCode is what Wait's error says; -1 where it carries none.
func exitCode(err error) int {
	if err == nil {
		return 0
	}
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return exit.ExitCode()
	}
	return -1
}

// gone is nil once no process pid is left, or only its zombie.
func gone(pid int) error {
	stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return err
	}
	_, after, _ := strings.Cut(string(stat), ") ")
	if strings.HasPrefix(after, "Z") {
		return nil
	}
	return fmt.Errorf("process %d lives: %s", pid, stat)
}

func TestWaitGivesEveryCallerTheSameAnswer(t *testing.T) {
	c, err := New().Start(helper("exit", "7"))
	if err != nil {
		t.Fatal(err)
	}
	codes := make([]int, 20)
	var wg sync.WaitGroup
	for i := range codes {
		wg.Go(func() { codes[i] = exitCode(c.Wait()) })
	}
	wg.Wait()
	for i, code := range codes {
		if code != 7 {
			t.Errorf("caller %d got exit code %d", i, code)
		}
	}
	if got := c.cmd.ProcessState.ExitCode(); got != 7 {
		t.Errorf("cmd.ProcessState says %d", got)
	}
	if err := c.Signal(unix.SIGTERM); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("signal after the end: %v", err)
	}
	if err := c.Kill(); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("kill after the end: %v", err)
	}
}

func TestStartThatFails(t *testing.T) {
	table := New()
	_, err := table.Start(exec.Command("/nonexistent/program", "arg"))
	if !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "start /nonexistent/program arg") {
		t.Errorf("error: %v", err)
	}
	if len(table.known) != 0 {
		t.Errorf("the table knows %v", table.known)
	}
}

func TestRunErrorEndsWithTheLastOutput(t *testing.T) {
	var lines strings.Builder
	for i := range 2000 {
		fmt.Fprintf(&lines, "line %d\n", i)
	}
	err := New().Run(t.Context(), helper("say", lines.String()))
	if exitCode(err) != 3 {
		t.Fatalf("error: %v", err)
	}
	text := err.Error()
	if !strings.HasSuffix(text, "line 1998\nline 1999") || strings.Contains(text, "line 1991\n") {
		t.Errorf("error: %s", text)
	}
	if len(text) > maxCommand+tailBytes+100 {
		t.Errorf("%d bytes of error", len(text))
	}
}

func TestOutputOfTheCallerIsKept(t *testing.T) {
	var out bytes.Buffer
	cmd := helper("say", "hello")
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := New().Run(t.Context(), cmd); exitCode(err) != 3 || !strings.HasSuffix(err.Error(), "hello") {
		t.Errorf("error: %v", err)
	}
	if out.String() != "hello" {
		t.Errorf("output %q", out.String())
	}
}

func TestRunKillsTheGroupWhenItsContextEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	defer write.Close()
	cmd := helper("grandchild", "stay")
	cmd.Stdout = write
	ended := make(chan error, 1)
	table := New()
	go func() { ended <- table.Run(ctx, cmd) }()
	grandchild := readPID(t, read)
	cancel()
	err = <-ended
	if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "signal: killed") {
		t.Errorf("error: %v", err)
	}
	eventually.That(t, 10*time.Second, "the grandchild is killed too", func() error { return gone(grandchild) })
}

func readPID(t *testing.T, r io.Reader) int {
	t.Helper()
	var pid int
	if _, err := fmt.Fscan(r, &pid); err != nil {
		t.Fatal(err)
	}
	return pid
}

func TestRunWithAnEndedContextStartsNothing(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	mark := filepath.Join(t.TempDir(), "mark")
	err := New().Run(ctx, exec.Command("touch", mark))
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error: %v", err)
	}
	if _, err := os.Stat(mark); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("it ran: %v", err)
	}
}

func TestStopKillsWhatIgnoresTerm(t *testing.T) {
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	cmd := helper("stubborn")
	cmd.Stdout = write
	c, err := New().Start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	write.Close()
	var word string
	if _, err := fmt.Fscan(read, &word); err != nil {
		t.Fatal(err)
	}
	if err := c.Stop(50 * time.Millisecond); !strings.Contains(fmt.Sprint(err), "signal: killed") {
		t.Errorf("error: %v", err)
	}
}

// A grandchild that keeps the output open doesn't keep Wait.
func TestWaitDoesNotHangOnADaemon(t *testing.T) {
	var out bytes.Buffer
	cmd := helper("grandchild", "leave")
	cmd.Stdout = &out
	cmd.WaitDelay = eventually.Scale(time.Second)
	c, err := New().Start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(); err != nil {
		t.Errorf("error: %v", err)
	}
	pid := readPID(t, &out)
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Error(err)
	}
}

func TestAttributesOfTheCallerAreKept(t *testing.T) {
	attr := &syscall.SysProcAttr{Setsid: true}
	cmd := helper("stubborn")
	cmd.SysProcAttr = attr
	c, err := New().Start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Wait()
	defer c.Kill()
	if sid, err := unix.Getsid(c.Pid()); err != nil || sid != c.Pid() {
		t.Errorf("session %d of process %d: %v", sid, c.Pid(), err)
	}
	if attr.Setpgid {
		t.Error("the caller's attributes were changed")
	}
}

func TestTailIsBoundedAndValid(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var kept Tail
		var all []byte
		for range rapid.IntRange(0, 20).Draw(t, "writes") {
			p := bytes.Repeat(rapid.SliceOf(rapid.Byte()).Draw(t, "p"), rapid.IntRange(1, 400).Draw(t, "times"))
			n, err := kept.Write(p)
			if n != len(p) || err != nil {
				t.Fatalf("write %d bytes: %d, %v", len(p), n, err)
			}
			all = append(all, p...)
		}
		s := kept.String()
		if !utf8.ValidString(s) || len(kept.buf) > 2*tailBytes || strings.Count(s, "\n") >= tailLines {
			t.Fatalf("tail %q", s)
		}
		if len(all) <= tailBytes && utf8.Valid(all) && !strings.HasSuffix(strings.TrimSpace(string(all)), s) {
			t.Fatalf("tail %q of %q", s, all)
		}
	})
}
