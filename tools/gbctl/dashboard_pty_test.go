package main

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"golang.org/x/sys/unix"
)

// calmService and calmLog are a node on which all is well.
type calmService struct {
	garboardv1connect.UnimplementedServiceServiceHandler
}

type calmLog struct {
	garboardv1connect.UnimplementedLogServiceHandler
}

func (calmService) List(context.Context, *connect.Request[apiv1.ListServicesRequest]) (*connect.Response[apiv1.ListServicesResponse], error) {
	return answerWith(waitingNode(0).services)
}

func (calmLog) Read(ctx context.Context, r *connect.Request[apiv1.ReadLogRequest], stream *connect.ServerStream[apiv1.LogChunk]) error {
	// Of what is drawn over something else, only what differs is sent.
	line := firstLog
	if r.Msg.Id != "apid" {
		line = secondLog
	}
	if err := stream.Send(&apiv1.LogChunk{Lines: []string{line}}); err != nil {
		return err
	}
	<-ctx.Done()
	return ctx.Err()
}

const (
	firstLog  = "first words"
	secondLog = "OTHER-LINES"
)

func calmNode() http.Handler {
	mux := http.NewServeMux()
	mux.Handle(garboardv1connect.NewServiceServiceHandler(calmService{}))
	mux.Handle(garboardv1connect.NewLogServiceHandler(calmLog{}))
	return mux
}

// terminal is a pseudo-terminal with gbctl on its other end.
type terminal struct {
	*testing.T
	master, slave *os.File
	said          shared
	read          chan struct{} // closed when there is nothing more to read
}

func newTerminal(t *testing.T, rows, cols uint16) *terminal {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	fd := int(master.Fd())
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	slave, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	x := &terminal{T: t, master: master, slave: slave, read: make(chan struct{})}
	x.resize(rows, cols)
	go func() {
		defer close(x.read)
		buffer := make([]byte, 4096)
		for {
			n, err := master.Read(buffer)
			x.said.Write(buffer[:n])
			if err != nil {
				return
			}
		}
	}()
	return x
}

func (x *terminal) resize(rows, cols uint16) {
	x.Helper()
	if err := unix.IoctlSetWinsize(int(x.master.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: cols}); err != nil {
		x.Fatal(err)
	}
}

func (x *terminal) state() unix.Termios {
	x.Helper()
	state, err := unix.IoctlGetTermios(int(x.slave.Fd()), unix.TCGETS)
	if err != nil {
		x.Fatal(err)
	}
	return *state
}

// until waits for words on the screen.
func (x *terminal) until(words string) {
	x.Helper()
	eventually.That(x.T, 20*time.Second, fmt.Sprintf("%q is on the screen", words), func() error {
		if text := x.said.String(); !strings.Contains(text, words) {
			return fmt.Errorf("it has %q", text)
		}
		return nil
	})
}

func (x *terminal) press(keys string) {
	x.Helper()
	if _, err := x.master.WriteString(keys); err != nil {
		x.Fatal(err)
	}
}

var colour = regexp.MustCompile(`\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7])(?:;\d+)*m`)

// The dashboard on a real terminal: it draws, follows a log, and leaves the
// terminal as it was, however it ends.
func TestDashboardTerminal(t *testing.T) {
	a := liveNodes(t, map[string]http.Handler{"10.5.0.2": calmNode()})
	config := &client.Config{Context: "x", Contexts: map[string]*client.Context{"x": a.loaded}}
	path := filepath.Join(t.TempDir(), "garboardconfig")
	if err := config.Save(path); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		env  []string
		end  func(*terminal, *os.Process)
		code int
	}{
		"q":       {nil, func(x *terminal, _ *os.Process) { x.press("q") }, 0},
		"Ctrl-C":  {[]string{"NO_COLOR=1"}, func(x *terminal, _ *os.Process) { x.press("\x03") }, 0},
		"SIGTERM": {nil, func(_ *terminal, p *os.Process) { _ = p.Signal(syscall.SIGTERM) }, codeInterrupted},
	} {
		t.Run(name, func(t *testing.T) {
			x := newTerminal(t, 24, 80)
			before := x.state()
			cmd := exec.Command("gbctl", "--garboardconfig", path, "-n", "10.5.0.2", "dashboard")
			cmd.Env = append(os.Environ(), append(c.env, "TERM=xterm-256color")...)
			cmd.Stdin, cmd.Stdout, cmd.Stderr = x.slave, x.slave, x.slave
			cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = cmd.Process.Kill() }) // where it didn't end
			x.until(firstLog)
			x.press("\x1b[B")
			x.until(secondLog)
			x.resize(8, 30)
			x.until("needs 40×12")
			x.resize(30, 100)
			c.end(x, cmd.Process)
			_ = cmd.Wait()
			if got := cmd.ProcessState.ExitCode(); got != c.code {
				t.Errorf("exit code %d, want %d", got, c.code)
			}
			if after := x.state(); after != before {
				t.Errorf("the terminal was %+v, is %+v", before, after)
			}
			_ = x.slave.Close()
			<-x.read
			_ = x.master.Close()
			said := x.said.String()
			for _, pair := range [][2]string{{"\x1b[?1049h", "\x1b[?1049l"}, {"\x1b[?25l", "\x1b[?25h"}} {
				if on, off := strings.LastIndex(said, pair[0]), strings.LastIndex(said, pair[1]); on < 0 || off < on {
					t.Errorf("%q at %d isn't undone: %d", pair[0], on, off)
				}
			}
			if want := !slices.Contains(c.env, "NO_COLOR=1"); colour.MatchString(said) != want {
				t.Errorf("colours %v, want %v", !want, want)
			}
		})
	}
}

// Without a terminal it says what to use instead, and draws nothing.
func TestDashboardNeedsTerminal(t *testing.T) {
	cmd := exec.Command("gbctl", "-n", "10.5.0.2", "dashboard")
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	_ = cmd.Run()
	if code := cmd.ProcessState.ExitCode(); code != codeUsage || out.Len() > 0 || !strings.Contains(errs.String(), "needs a terminal") {
		t.Errorf("exit code %d: %s%s", code, &out, &errs)
	}
}
