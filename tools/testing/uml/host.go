package uml

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	ossignal "os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// bootTime bounds a boot, which takes one to two seconds: this is for a machine that does
	// much else.
	bootTime = 2 * time.Minute
	// silence is how long a guest may say nothing; its init says each second that it is alive.
	silence = 2 * time.Minute
	// offTime is ample for a power-off.
	offTime = 10 * time.Second
	// stopTime is what a test has after a signal: go test kills the wrapper 5 s after its own
	// SIGQUIT (WaitDelay in cmd/go/internal/test), and a guest prints goroutines slowly.
	stopTime = 4 * time.Second
	// lastWords is how much of the kernel's messages is kept: a panic with its stack.
	lastWords = 16 << 10
)

// Run runs a test program, with its arguments, in a guest, and returns its exit code. What
// the test prints, on standard output or error, is written to out. self is this program.
func Run(ctx context.Context, self string, args []string, out io.Writer) (int, error) {
	a, err := assign(self, args)
	if err != nil {
		return 1, err
	}
	g, err := start(self)
	if err != nil {
		return 1, err
	}
	defer g.stop()
	if g.order, err = json.Marshal(a); err != nil {
		return 1, err
	}
	signals := make(chan os.Signal, 8)
	ossignal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT, syscall.SIGHUP)
	defer ossignal.Stop(signals)
	end, err := g.attend(ctx, signals, out)
	if err != nil {
		g.stop()
		return 1, fmt.Errorf("%w; what the guest's kernel said last:\n%s", err, g.said.String())
	}
	if end.Signal != 0 {
		// As the go command says it of a test on the host.
		fmt.Fprintf(out, "signal: %s\n", syscall.Signal(end.Signal))
		return 128 + end.Signal, nil
	}
	return end.Code, nil
}

// guest is a running one.
type guest struct {
	line   *line
	order  []byte // what is still to be sent of what to run
	frames chan frame
	broken error // why frames was closed
	said   *tail
	gone   chan struct{} // closed when its processes have ended
	stop   func()
}

// start returns once the guest's processes run. They end with this one, whatever ends it.
func start(self string) (*guest, error) {
	kernel, err := openKernel()
	if err != nil {
		return nil, err
	}
	defer kernel.Close()
	number, lock, err := takeProcessor()
	if err != nil {
		return nil, err
	}
	ours, theirs, err := pair()
	if err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	defer theirs.Close()
	g := &guest{line: &line{file: ours}, frames: make(chan frame), said: &tail{}, gone: make(chan struct{})}
	cmd := exec.Command(self, KeepCommand, self, strconv.Itoa(number))
	cmd.Stdout, cmd.Stderr = g.said, g.said
	cmd.ExtraFiles = []*os.File{lineFile - 3: theirs, kernelFile - 3: kernel}
	cmd.SysProcAttr = namespace()
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // Pdeathsig is sent when the thread ends that started the process
		defer runtime.UnlockOSThread()
		defer close(g.gone)
		err := cmd.Start()
		started <- err
		if err == nil {
			cmd.Wait() // how it ended is in its messages
		}
	}()
	if err := <-started; err != nil {
		return nil, errors.Join(fmt.Errorf("start %s: %w", KeepCommand, err), ours.Close(), lock.Close())
	}
	ended := make(chan struct{})
	go g.read(ended)
	g.stop = sync.OnceFunc(func() {
		cmd.Process.Kill()
		<-g.gone
		close(ended)
		ours.Close()
		lock.Close()
	})
	return g, nil
}

// namespace is that of the guest's processes. Without root it takes a user namespace, in
// which the user is who they are.
func namespace() *syscall.SysProcAttr {
	a := &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWPID,
		Pdeathsig:  syscall.SIGKILL,
		Setsid:     true, // Ctrl-C is for the wrapper
	}
	if uid, gid := os.Geteuid(), os.Getegid(); uid != 0 {
		a.Cloneflags |= syscall.CLONE_NEWUSER
		a.UidMappings = []syscall.SysProcIDMap{{ContainerID: uid, HostID: uid, Size: 1}}
		a.GidMappings = []syscall.SysProcIDMap{{ContainerID: gid, HostID: gid, Size: 1}}
	}
	return a
}

// pair is the two ends of the serial line.
func pair() (ours, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socketpair: %w", err)
	}
	if err := unix.SetNonblock(fds[0], true); err != nil { // so that Close ends a Read
		return nil, nil, err
	}
	return os.NewFile(uintptr(fds[0]), "line"), os.NewFile(uintptr(fds[1]), "line of the guest"), nil
}

func (g *guest) read(ended <-chan struct{}) {
	defer close(g.frames)
	for {
		f, err := g.line.receive()
		if err != nil {
			g.broken = err
			return
		}
		select {
		case g.frames <- f:
		case <-ended:
			return
		}
	}
}

// attend talks with the guest until the test has ended.
func (g *guest) attend(ctx context.Context, signals <-chan os.Signal, out io.Writer) (outcome, error) {
	patience, limit := bootTime, "it didn't boot within "
	quiet := time.NewTimer(patience)
	var stopping <-chan time.Time
	var last os.Signal
	done := ctx.Done()
	for {
		select {
		case f, open := <-g.frames:
			if !open {
				return outcome{}, fmt.Errorf("guest ended before the test: %w", g.broken)
			}
			end, over, err := g.take(f, out)
			if over || err != nil {
				return end, err
			}
			patience, limit = silence, "it was silent for "
			quiet.Reset(patience) // also when out took its time
		case s := <-signals:
			if last != nil {
				return outcome{}, fmt.Errorf("ended by a second signal: %s", s)
			}
			last, stopping = s, time.After(stopTime)
			if err := g.line.send(signal, []byte{byte(s.(syscall.Signal))}); err != nil {
				return outcome{}, err
			}
		case <-done:
			// The same signal may be on its way to signals.
			if done = nil; stopping == nil {
				stopping = time.After(stopTime)
			}
		case <-stopping:
			return outcome{}, fmt.Errorf("test went on for %s after signal %v", stopTime, last)
		case <-quiet.C:
			return outcome{}, fmt.Errorf("guest hangs: %s%s", limit, patience)
		}
	}
}

// take handles a frame, and reports whether the test is over.
func (g *guest) take(f frame, out io.Writer) (end outcome, over bool, err error) {
	switch f.kind {
	case hello:
		g.order, err = g.line.answer(g.order)
		return end, false, err
	case alive:
		return end, false, nil
	case output:
		_, err := out.Write(f.content)
		return end, false, err
	case fault:
		return end, false, fmt.Errorf("guest: %s", f.content)
	case ended:
		if err := decode(f.content, &end); err != nil {
			return end, true, err
		}
		if err := g.line.send(bye, nil); err == nil {
			select { // all is written by now: a guest that doesn't power off is killed
			case <-g.gone:
			case <-time.After(offTime):
			}
		}
		return end, true, nil
	}
	return end, false, fmt.Errorf("unknown frame %q of %d bytes from the guest", f.kind, len(f.content))
}

// tail keeps the end of what is written to it.
type tail struct {
	mu   sync.Mutex // guards text
	text []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, p...)
	if extra := len(t.text) - lastWords; extra > 0 {
		t.text = append([]byte(nil), t.text[extra:]...)
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.text)
}

// assign makes the guest's order of a command line of go test.
func assign(self string, args []string) (assignment, error) {
	if len(args) == 0 {
		return assignment{}, errors.New("no test program: it and its arguments are what is run")
	}
	test, err := filepath.Abs(args[0])
	if err != nil {
		return assignment{}, err
	}
	if _, err := os.Stat(test); err != nil {
		return assignment{}, err
	}
	dir, err := os.Getwd()
	if err != nil {
		return assignment{}, err
	}
	a := assignment{Program: test, Args: slices.Insert(slices.Clone(args), 1, cacheable(test, args)...), Dir: dir, Env: os.Environ(), Self: self}
	a.share()
	return a, nil
}
