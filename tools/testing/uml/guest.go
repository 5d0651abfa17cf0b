package uml

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// beat is how often init says that it is alive.
	beat = time.Second
	// drain bounds the wait for the last of the output, once all processes are gone.
	drain = 10 * time.Second
	// byeTime bounds the wait for the wrapper's answer to the end.
	byeTime = 10 * time.Second
)

// Init is the guest's first process. It returns only where it isn't that.
func Init() error {
	if os.Getpid() != 1 || !inside() && mountProc() != nil {
		return fmt.Errorf("%s: a guest's kernel starts it", InitCommand)
	}
	l, err := openLine()
	if err == nil {
		err = serve(l)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "uml-init:", err)
		if l != nil && l.send(fault, []byte(err.Error())) == nil {
			time.Sleep(byeTime) // the wrapper ends the guest when it has read that
		}
	}
	unix.Sync()
	return os.NewSyscallError("reboot", unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF))
}

func mountProc() error {
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return &os.PathError{Op: "mount", Path: "/proc", Err: err}
	}
	if !inside() {
		return errors.New("not User Mode Linux")
	}
	return nil
}

// openLine opens the serial line, on which every byte means itself.
func openLine() (*line, error) {
	const name = "/dev/ttyS0"
	fd, err := unix.Open(name, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: name, Err: err}
	}
	t, err := unix.IoctlGetTermios(fd, unix.TCGETS)
	if err != nil {
		return nil, &os.PathError{Op: "ioctl TCGETS", Path: name, Err: err}
	}
	// As cfmakeraw(3).
	t.Iflag, t.Oflag, t.Lflag = 0, 0, 0
	t.Cflag = t.Cflag&^(unix.CSIZE|unix.PARENB) | unix.CS8 | unix.CLOCAL | unix.CREAD
	t.Cc[unix.VMIN], t.Cc[unix.VTIME] = 1, 0
	if err := unix.IoctlSetTermios(fd, unix.TCSETS, t); err != nil {
		return nil, &os.PathError{Op: "ioctl TCSETS", Path: name, Err: err}
	}
	return &line{file: os.NewFile(uintptr(fd), name)}, nil
}

// serve runs what the wrapper wants to have run.
func serve(l *line) error {
	a, err := l.ask()
	if err != nil {
		return err
	}
	if err := prepare(a); err != nil {
		return err
	}
	end, heard, err := run(l, a)
	if err != nil {
		return err
	}
	unix.Sync() // what the test has written to the host's files
	text, err := json.Marshal(end)
	if err == nil {
		err = l.send(ended, text)
	}
	if err != nil {
		return err
	}
	select {
	case <-heard:
	case <-time.After(byeTime):
	}
	return nil
}

// run runs the test, and ends what it leaves behind. heard is closed when the wrapper has
// said the last word.
func run(l *line, a assignment) (end outcome, heard <-chan struct{}, err error) {
	out, in, err := os.Pipe()
	if err != nil {
		return end, nil, err
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return end, nil, err
	}
	pid, err := syscall.ForkExec(a.Program, a.Args, &syscall.ProcAttr{
		Dir: a.Dir, Env: a.Env,
		Files: []uintptr{null.Fd(), in.Fd(), in.Fd()},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return end, nil, fmt.Errorf("start %s in %s: %w", a.Program, a.Dir, err)
	}
	if err := in.Close(); err != nil {
		return end, nil, err
	}
	copied := make(chan error, 1)
	go func() { copied <- forward(l, out) }()
	go func() {
		for l.send(alive, nil) == nil {
			time.Sleep(beat)
		}
	}()
	last := make(chan struct{})
	go func() { defer close(last); listen(l, pid) }()
	status, err := reap(pid)
	if err != nil {
		return end, nil, err
	}
	end = outcome{Code: status.ExitStatus()}
	if status.Signaled() {
		end.Signal = int(status.Signal())
	}
	select {
	case err = <-copied:
	case <-time.After(drain):
		err = fmt.Errorf("somebody holds the test's output open %s after the end of all processes", drain)
	}
	return end, last, err
}

// forward sends what the test prints, as it comes.
func forward(l *line, from io.Reader) error {
	buffer := make([]byte, 32<<10)
	for {
		n, err := from.Read(buffer)
		if n > 0 {
			if err := l.send(output, buffer[:n]); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// listen hands signals on to the test, until the wrapper says bye.
func listen(l *line, pid int) {
	for {
		f, err := l.receive()
		if err != nil || f.kind == bye {
			return
		}
		if f.kind == signal && len(f.content) == 1 {
			// ESRCH: it has ended meanwhile.
			unix.Kill(pid, unix.Signal(f.content[0]))
		}
	}
}

// reap waits for all processes, as their first one has to, and returns how the test ended.
// With it all others end.
func reap(test int) (unix.WaitStatus, error) {
	var of unix.WaitStatus
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.ECHILD):
			return of, nil
		case err != nil:
			return of, os.NewSyscallError("wait4", err)
		case pid == test:
			of = status
			// ESRCH: there is no other one.
			if err := unix.Kill(-1, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
				return of, os.NewSyscallError("kill", err)
			}
		}
	}
}

// prepare makes the guest's system what a test expects.
func prepare(a assignment) error {
	if err := errors.Join(mounts(a), limits(), unix.Sethostname([]byte("uml"))); err != nil {
		return err
	}
	m, err := readModules()
	if err != nil {
		return err
	}
	for _, name := range loaded {
		if err := m.load(name); err != nil {
			return err
		}
	}
	return errors.Join(serveModules(a.Self), loopbackUp())
}

// limits lets a test have as many files open as on a usual host.
func limits() error {
	const files = 1 << 16
	return os.NewSyscallError("setrlimit", unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: files, Max: files}))
}

// serveModules makes Modprobe what the kernel calls for a module that it lacks. It passes no
// argument of ours, so a script adds the subcommand.
func serveModules(self string) error {
	const script = "/run/uml-modprobe"
	quoted := "'" + strings.ReplaceAll(self, "'", `'\''`) + "'"
	if err := os.WriteFile(script, []byte("#!/bin/sh\nexec "+quoted+" "+ModprobeCommand+" \"$@\"\n"), 0o755); err != nil {
		return err
	}
	return os.WriteFile("/proc/sys/kernel/modprobe", []byte(script), 0)
}

func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	r, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	r.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return os.NewSyscallError("ioctl SIOCSIFFLAGS lo", unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, r))
}
