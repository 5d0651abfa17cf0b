package main

import (
	"context"
	"errors"
	"fmt"
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

	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/process"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// roleEnv selects what this test binary runs as: PID 1 of a PID namespace with
// one of the nodes below, or one of the node's processes.
const roleEnv = "GARBOARD_INIT_ROLE"

func TestMain(m *testing.M) {
	role := os.Getenv(roleEnv)
	name, isNode := strings.CutPrefix(role, "node ")
	switch {
	case role == "":
		os.Exit(m.Run())
	case isNode:
		playPID1(nodes[name])
	case role == "ignoresSignals":
		signal.Ignore(syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
		fmt.Println("ready")
		select {}
	case role == "forget":
		for range stormOrphans / stormForkers {
			must(exec.Command("/bin/true").Start()) // and never waits
		}
	case role == "mounts":
		playMounts()
	}
}

func asRole(role string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleEnv+"="+role)
	return cmd
}

func must(err error) {
	if err != nil {
		fmt.Println("test setup:", err)
		os.Exit(99)
	}
}

// playPID1 is stage 2 as in a container, with its real signals, reaper, funnel
// and last system call. It has no boot steps, and the node is a test's.
func playPID1(run func(p *pid1, ctx context.Context) error) {
	if os.Getpid() != 1 {
		must(errors.New("not PID 1 of a namespace"))
	}
	// All mounts and unmounts here are in this namespace.
	must(unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	must(unix.Mount("proc", "/proc", "proc", noSuidDevExec, ""))
	p := &pid1{
		mode:      boot.Container,
		processes: process.New(),
		requests:  make(chan request, 1),
		heartbeat: make(chan chan struct{}),
		leave:     leaveFor(boot.Container),
	}
	p.useLogs(logs.New(logs.Plain(os.Stdout)))
	p.phases = p.orderlyPhases
	p.newNode = func(services.Options) (node, error) { return testNode{p, run}, nil }
	p.run()
}

type testNode struct {
	p   *pid1
	run func(*pid1, context.Context) error
}

func (n testNode) Run(ctx context.Context) error { return n.run(n.p, ctx) }

// End fails as on a node that can't begin an operation: the machine ends at once.
func (n testNode) End(context.Context, boot.Power, string) error {
	return errors.New("STATE isn't mounted")
}

func (n testNode) Marked() bool                { return false }
func (n testNode) EraseTime() time.Duration    { return 0 }
func (n testNode) Erase(context.Context) error { return nil }

// nodes are the nodes that the tests' PID 1s run.
var nodes = map[string]func(p *pid1, ctx context.Context) error{
	"idle":           func(p *pid1, ctx context.Context) error { p.logs.Printf("ready"); <-ctx.Done(); return nil },
	"failing":        func(*pid1, context.Context) error { return errors.New("no way on") },
	"panics":         func(*pid1, context.Context) error { panic("node") },
	"storm":          storm,
	"ignoresSignals": ignoresSignals,
	"panicky":        panicky,
}

// pid1Process is a PID 1 in its own namespaces.
type pid1Process struct {
	*exec.Cmd
	out   *screen
	ended chan struct{}
}

func startPID1(t *testing.T, name string) *pid1Process {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: new PID and mount namespaces")
	}
	p := &pid1Process{Cmd: asRole("node " + name), out: &screen{}, ended: make(chan struct{})}
	p.Stdout, p.Stderr = p.out, p.out
	p.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.ended)
		p.Wait() // the result is in ProcessState
	}()
	t.Cleanup(func() {
		p.Process.Kill()
		<-p.ended
		if t.Failed() {
			t.Logf("console:\n%s", p.out)
		}
	})
	return p
}

func (p *pid1Process) says(t *testing.T, within time.Duration, text string) {
	t.Helper()
	eventually.That(t, within, "PID 1 to say "+strconv.Quote(text), func() error {
		select {
		case <-p.ended:
			if !strings.Contains(p.out.String(), text) {
				t.Fatalf("PID 1 ended (%s) without saying %q", p.ProcessState, text)
			}
		default:
		}
		if !strings.Contains(p.out.String(), text) {
			return errors.New("not said")
		}
		return nil
	})
}

func (p *pid1Process) endsWith(t *testing.T, within time.Duration, want string) {
	t.Helper()
	ctx, cancel := eventually.Context(t.Context(), within)
	defer cancel()
	select {
	case <-p.ended:
		if got := p.ProcessState.String(); got != want {
			t.Errorf("PID 1 ended with %q, want %q", got, want)
		}
	case <-ctx.Done():
		t.Fatalf("PID 1 lives: %v", context.Cause(ctx))
	}
}

// The numbers of the issue.
const (
	stormOrphans  = 10_000
	stormForkers  = 40
	stormChildren = 200
)

// storm creates many orphans while PID 1 waits for children of its own.
func storm(p *pid1, ctx context.Context) error {
	var wg sync.WaitGroup
	slots := make(chan struct{}, 8)
	start := func(do func()) {
		slots <- struct{}{}
		wg.Go(func() { do(); <-slots })
	}
	for i := range stormForkers + stormChildren {
		if i%(1+stormChildren/stormForkers) == 0 {
			start(func() {
				if err := p.processes.Run(ctx, asRole("forget")); err != nil {
					p.logs.Printf("forker: %v", err)
				}
			})
			continue
		}
		start(func() {
			code := 1 + i%100
			err := p.processes.Run(ctx, exec.Command("/bin/sh", "-c", fmt.Sprint("exit ", code)))
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.ExitCode() != code {
				p.logs.Printf("LOST exit code %d: %v", code, err)
			}
		})
	}
	wg.Wait()
	for p.processes.Reaped() < stormOrphans {
		select {
		case <-time.After(pollLeftovers):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	p.logs.Printf("storm over: %d orphans", p.processes.Reaped())
	<-ctx.Done()
	return nil
}

func TestTenThousandOrphansAndNoExitStatusLost(t *testing.T) {
	p := startPID1(t, "storm")
	p.says(t, 2*time.Minute, fmt.Sprintf("storm over: %d orphans", stormOrphans))
	if strings.Contains(p.out.String(), "LOST") || strings.Contains(p.out.String(), "forker:") {
		t.Error("own children's exit statuses were lost")
	}
	p.Process.Signal(syscall.SIGTERM)
	p.endsWith(t, 10*time.Second, "exit status 0")
}

// ignoresSignals is a node with a service that ignores its end and whose
// process does the same, and with a process that belongs to no service.
func ignoresSignals(p *pid1, ctx context.Context) error {
	stray := asRole("ignoresSignals")
	if _, err := p.processes.Start(stray); err != nil {
		return err
	}
	g, err := dag.New(dag.Options{Log: p.logs.Logger}, dag.Service{
		ID: "ignoresSignals",
		Run: func(ctx context.Context, h *dag.Handle) error {
			cmd := asRole("ignoresSignals")
			out, err := cmd.StdoutPipe()
			if err != nil {
				return err
			}
			child, err := p.processes.Start(cmd)
			if err != nil {
				return err
			}
			if _, err := out.Read(make([]byte, 5)); err != nil {
				return err
			}
			h.Started("running")
			p.logs.Printf("ready")
			context.AfterFunc(ctx, func() { child.Signal(syscall.SIGTERM) })
			return child.Wait()
		},
		StopBudget: time.Hour,
	})
	if err != nil {
		return err
	}
	return g.Run(ctx)
}

func TestPowersOffWithin30SecondsWhateverAServiceDoes(t *testing.T) {
	pace := eventually.Measure()
	p := startPID1(t, "ignoresSignals")
	p.says(t, 10*time.Second, "ready")
	start := time.Now()
	p.Process.Signal(syscall.SIGTERM)
	p.says(t, 5*time.Second, "power off because=SIGTERM")
	p.Process.Signal(syscall.SIGINT) // a second request doesn't start it again
	const promise = 30 * time.Second
	p.endsWith(t, promise, "exit status 0")
	end := time.Now()
	t.Logf("off after %s", end.Sub(start).Round(time.Millisecond))
	if err := pace.Kept(start, end, promise); err != nil {
		t.Errorf("off: %v", err)
	}
	for _, want := range []string{"stop services: ", "is shutting down already", "end processes: 2 are left: "} {
		if !strings.Contains(p.out.String(), want) {
			t.Errorf("console doesn't say %q", want)
		}
	}
}

// panicky panics in a service, and in one of PID 1's own loops.
func panicky(p *pid1, ctx context.Context) error {
	first := true
	p.forever("own loop", func() {
		if first {
			first = false
			panic("loop")
		}
		p.logs.Printf("own loop goes on")
	})
	service := 0
	g, err := dag.New(dag.Options{Log: p.logs.Logger}, dag.Service{
		ID: "panicky",
		Run: func(ctx context.Context, h *dag.Handle) error {
			if service++; service == 1 {
				var nothing *pid1
				nothing.logs.Printf("boom")
			}
			p.logs.Printf("service goes on")
			h.Started("running")
			<-ctx.Done()
			return nil
		},
	})
	if err != nil {
		return err
	}
	return g.Run(ctx)
}

func TestPanicsDoNotEndPID1(t *testing.T) {
	p := startPID1(t, "panicky")
	p.says(t, 20*time.Second, "own loop goes on")
	p.says(t, 20*time.Second, "service goes on")
	if !strings.Contains(p.out.String(), `panic in PID 1 where="own loop" panic=loop`) {
		t.Error("the console isn't told of the panic")
	}
	p.Process.Signal(rtmin + 3)
	p.endsWith(t, 10*time.Second, "exit status 0")
}

func TestNodeThatFailsOrPanicsReboots(t *testing.T) {
	for name, why := range map[string]string{"failing": `reboot because="no way on"`, "panics": `reboot because="panic: node"`} {
		p := startPID1(t, name)
		// The parent of a PID namespace sees reboot(2) as SIGHUP.
		p.endsWith(t, 10*time.Second, "signal: hangup")
		if !strings.Contains(p.out.String(), why) {
			t.Errorf("console doesn't say %q:\n%s", why, p.out)
		}
	}
}

// Many signals without a meaning must not hide one that has a meaning.
func TestNoSignalEndsPID1ByItself(t *testing.T) {
	p := startPID1(t, "idle")
	p.says(t, 10*time.Second, "ready")
	for range 100 { // a busy node can't handle them as fast as they come
		for s := syscall.Signal(1); s <= 64; s++ {
			if _, means := signalIntents[s]; means || uncatchable(s) {
				continue
			}
			p.Process.Signal(s)
		}
	}
	p.Process.Signal(syscall.SIGTERM)
	p.endsWith(t, 10*time.Second, "exit status 0")
	if !strings.Contains(p.out.String(), "power off because=SIGTERM") {
		t.Error("it wasn't SIGTERM that ended it")
	}
}

// playMounts mounts the container's table over the directories of a root
// filesystem, and unmounts it.
func playMounts() {
	must(unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	root := os.Getenv("GARBOARD_INIT_ROOT")
	must(unix.Mount("tmpfs", root, "tmpfs", 0, "mode=0755"))
	for _, dir := range []string{"dev", "etc/sub", "proc", "run", "sys", "system/run", "system/secrets", "system/state", "tmp", "var"} {
		must(os.MkdirAll(filepath.Join(root, dir), 0o755))
	}
	must(os.WriteFile(filepath.Join(root, "etc/hosts"), []byte("lower\n"), 0o644))
	must(unix.Chroot(root))
	must(os.Chdir("/"))
	must(unix.Mount("proc", "/proc", "proc", 0, ""))
	table := forMode(mounts, boot.Container)
	for range 2 { // existing mounts stay
		must(mountAll(table[2:], nil)) // /proc is there; /sys of a foreign network namespace isn't wanted
	}
	must(shareMounts())
	must(os.WriteFile("/etc/hosts", []byte("upper\n"), 0o644))
	secrets, err := os.Stat(boot.SecretsDir)
	must(err)
	fmt.Println("secrets", secrets.Mode())
	all, err := mountedAt()
	must(err)
	fmt.Println("mounted", strings.Join(all, " "))
	must(unix.Mount("tmpfs", "/var", "tmpfs", 0, ""))
	must(os.Mkdir("/run/deep", 0o755))
	must(unix.Mount("tmpfs", "/run/deep", "tmpfs", 0, ""))
	busy, err := os.Create("/var/busy")
	must(err)
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	fmt.Println("busy:", unmountAll(ctx, boot.Container))
	cancel()
	_, err = busy.Write([]byte("x"))
	fmt.Println("write:", err)
	must(busy.Close())
	must(unmountAll(context.Background(), boot.Container))
	all, err = mountedAt()
	must(err)
	fmt.Println("left", strings.Join(all, " "))
}

func TestMountTable(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: a mount namespace")
	}
	cmd := asRole("mounts")
	cmd.Env = append(cmd.Env, "GARBOARD_INIT_ROOT="+t.TempDir())
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, want := range []string{
		"secrets drwx------\n",
		"mounted / /proc /dev /run /dev/pts /dev/shm /dev/mqueue /tmp /system/secrets /system/run /etc\n",
		"busy: unmount /var: device or resource busy\n",
		"left / /proc /dev /run /dev/pts /dev/shm /dev/mqueue /etc\n",
	} {
		if !strings.Contains(string(out), want) {
			t.Errorf("want %q in\n%s", want, out)
		}
	}
}
