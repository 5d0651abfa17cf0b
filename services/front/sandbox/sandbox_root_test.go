package sandbox

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"golang.org/x/sys/unix"
)

const (
	testUID  = 50
	patience = 20 * time.Second
)

// bench is one service in a graph of its own.
type bench struct {
	t       *testing.T
	runner  Runner
	service dag.Service
	logs    *logs.Logs
	graph   *dag.Graph
	stop    func()
}

// newBench prepares the prober as a service that is called after the test.
func newBench(t *testing.T, args ...string) *bench {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("sandboxes need root")
	}
	// Not t.TempDir: the way there is closed to others.
	work, err := os.MkdirTemp("/var/tmp", "sandbox-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// Not RemoveAll: it is empty, or something is still mounted there.
		if err := os.Remove(work); err != nil {
			t.Error(err)
		}
	})
	if err := os.Chmod(work, 0o755); err != nil {
		t.Fatal(err)
	}
	b := &bench{t: t, logs: logs.New(nil)}
	b.runner = Runner{
		Processes: processes, Logs: b.logs,
		ID:      strings.ToLower(t.Name()),
		args:    append([]string{filepath.Join(programs, "prober")}, args...),
		UID:     testUID,
		Dir:     t.TempDir(),
		Socket:  NewSocket(testUID, filepath.Join(t.TempDir(), "socket")),
		sandbox: filepath.Join(programs, "sandbox"),
		work:    work,
		parent:  fmt.Sprintf("/garboard-test-%d", os.Getpid()),
	}
	l, err := b.runner.Socket.Listen()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	b.service = dag.Service{ID: b.runner.ID, Restart: dag.RestartAlways}
	return b
}

func (b *bench) start() {
	b.t.Helper()
	b.service.Run = b.runner.Run
	var err error
	if b.graph, err = dag.New(dag.Options{Log: b.logs.Logger}, b.service); err != nil {
		b.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- b.graph.Run(ctx) }()
	var stopped bool
	b.stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-done; err != nil {
			b.t.Error(err)
		}
	}
	b.t.Cleanup(func() {
		b.stop()
		if b.t.Failed() {
			b.t.Logf("log of the service:\n%s", strings.Join(b.logs.Tail(b.runner.ID, 0), "\n"))
		}
		b.nothingLeft()
	})
}

// nothingLeft after a stop: no cgroup. (That nothing is mounted, the end of newBench
// has seen.)
func (b *bench) nothingLeft() {
	group := cgroup(filepath.Join(b.runner.parent, b.runner.ID))
	if dirs, err := group.dirs(); err != nil || len(dirs) > 0 {
		b.t.Errorf("cgroups left: %v, %v", dirs, err)
	}
	if err := cgroup(b.runner.parent).remove(context.Background()); err != nil && !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.ENOTEMPTY) {
		b.t.Error(err)
	}
}

func (b *bench) status() dag.Status {
	b.t.Helper()
	s, ok := b.graph.Status(b.runner.ID)
	if !ok {
		b.t.Fatal("no such service")
	}
	return s
}

// pid waits until the service runs, as another process than the one given.
func (b *bench) pid(former int) (pid int) {
	b.t.Helper()
	eventually.That(b.t, patience, "the service runs", func() error {
		s := b.status()
		if s.State != dag.Running {
			return fmt.Errorf("%s: %s", s.State, s.Message)
		}
		want := "Started process " + b.runner.ID + " (PID %d) in a sandbox"
		if n, err := fmt.Sscanf(s.Message, want, &pid); n != 1 {
			return fmt.Errorf("message %q: %w", s.Message, err)
		}
		if pid == former {
			return errors.New("still the former one")
		}
		return nil
	})
	return pid
}

// message waits for an event with this text.
func (b *bench) message(text string) {
	b.t.Helper()
	eventually.That(b.t, patience, "an event with "+text, func() error {
		var all []string
		for _, e := range b.graph.Events() {
			if all = append(all, e.Message); strings.Contains(e.Message, text) {
				return nil
			}
		}
		return errors.New(strings.Join(all, "; "))
	})
}

// line waits for a line of the service's output, and returns what follows prefix.
func (b *bench) line(prefix string) (rest string) {
	b.t.Helper()
	eventually.That(b.t, patience, "output "+prefix, func() error {
		for _, line := range b.logs.Tail(b.runner.ID, 0) {
			var ok bool
			if rest, ok = strings.CutPrefix(line, prefix); ok {
				return nil
			}
		}
		return fmt.Errorf("last event: %s", b.status().Message)
	})
	return rest
}

// secretDir is a directory with a secret that belongs to the service's
// user, in one that is closed to it.
func secretDir(t *testing.T) string {
	t.Helper()
	closed, err := os.MkdirTemp("", "closed-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(closed) })
	dir := filepath.Join(closed, "secrets")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "secret"), []byte("key"), 0o400); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{dir, filepath.Join(dir, "secret")} {
		if err := os.Chown(path, testUID, testUID); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func parseReport(t *testing.T, text string) map[string]string {
	t.Helper()
	var result map[string]string
	if err := json.Unmarshal([]byte(text), &result); err != nil {
		t.Fatal(err)
	}
	return result
}

// S-097: unauthenticated clients can reach apid and trustd. All that the sandbox
// promises, seen from inside.
func TestSandboxFromInside(t *testing.T) {
	b := newBench(t, "report")
	result := b.report()
	if result["ns user"] == own(t, "user") {
		t.Error("the user namespace is ours")
	}
	if text := strings.Join(b.logs.Tail(b.runner.ID, 0), "\n"); strings.Contains(text, "lacks") {
		t.Error(text)
	}
}

// In a container whose /proc is partly covered, as a node of a development cluster
// is, the kernel gives no user namespace a /proc: the sandbox does without, says so,
// and keeps all other promises.
func TestSandboxWithoutUserNamespace(t *testing.T) {
	b := newBench(t, "report")
	b.runner.sandbox = filepath.Join(programs, "covered")
	const script = `#!/bin/sh
exec unshare --mount sh -c 'mount --bind /dev/null /proc/uptime && exec "$0" "$@"' %s/sandbox "$@"
`
	if err := os.WriteFile(b.runner.sandbox, fmt.Appendf(nil, script, programs), 0o700); err != nil {
		t.Fatal(err)
	}
	result := b.report()
	if result["ns user"] != own(t, "user") {
		t.Error("it has a user namespace: the test is in vain")
	}
	if text := strings.Join(b.logs.Tail(b.runner.ID, 0), "\n"); !strings.Contains(text, "warning: the sandbox lacks something here without=\"its own user namespace: ") {
		t.Error(text)
	}
}

// report runs the prober, and holds against the promises what it says.
func (b *bench) report() map[string]string {
	t := b.t
	t.Helper()
	b.runner.Dir = secretDir(t)
	b.runner.args = append(b.runner.args, b.runner.Dir)
	b.start()
	pid := b.pid(0)
	if left, err := filepath.Glob(boot.RunDir + "/socket-*"); err != nil || len(left) > 0 {
		t.Errorf("the socket has a name: %q, %v", left, err)
	}
	result := parseReport(t, b.line("report "))

	const refused, readOnly = "function not implemented", "read-only file system"
	for what, want := range map[string]string{
		"uid": "50 50", "gid": "50 50", "groups": "0",
		"CapInh": "0000000000000000", "CapPrm": "0000000000000000", "CapEff": "0000000000000000",
		"CapBnd": "0000000000000000", "CapAmb": "0000000000000000",
		"NoNewPrivs": "1", "Seccomp": "2",
		"ls /":               "dev proc tmp",
		"ls " + b.runner.Dir: "secret",
		"write /":            readOnly, "write dir": readOnly, "write itself": "permission denied", "write /dev": readOnly,
		"write /tmp": "allowed", "read secret": "allowed", "read /sys": "no such file or directory", "change settings": "permission denied", "read the kernel's command line": "empty",
		"use /dev/null": "allowed", "use urandom": "allowed", "listen": "allowed", "interfaces": "allowed", "connect unix": "allowed",
		"packet socket": refused, "raw socket": "operation not permitted", "netfilter socket": refused,
		"unshare": refused, "keyctl": refused, "mount": refused, "prctl": refused, "fork": refused, "ioctl": refused,
		"GOMEMLIMIT": fmt.Sprint(memoryMax / 4 * 3),
	} {
		if got := result[what]; got != want && !strings.HasSuffix(got, want) {
			t.Errorf("%s: %q, want %q", what, got, want)
		}
	}
	for _, name := range strings.Fields(result["ls /proc"]) {
		if strings.Trim(name, "0123456789") == "" && name != "1" {
			t.Errorf("it sees process %s", name)
		}
	}
	// libcontainer makes the links; ptmx leads nowhere.
	if got := strings.TrimPrefix(result["ls /dev"], "core "); got != "fd null ptmx stderr stdin stdout urandom" {
		t.Errorf("devices: %s", got)
	}
	for _, ns := range []string{"mnt", "pid", "ipc", "uts", "cgroup"} {
		if result["ns "+ns] == own(t, ns) || result["ns "+ns] == "" {
			t.Errorf("%s namespace is ours: %s", ns, result["ns "+ns])
		}
	}
	if result["ns net"] != own(t, "net") {
		t.Errorf("network namespace %s isn't ours", result["ns net"])
	}
	if stat, err := os.Stat(fmt.Sprintf("/proc/%d", pid)); err != nil || stat.Sys().(*syscall.Stat_t).Uid != testUID {
		t.Errorf("process %d: %v, %v", pid, stat, err)
	}
	return result
}

// own is our own namespace.
func own(t *testing.T, ns string) string {
	t.Helper()
	link, err := os.Readlink("/proc/self/ns/" + ns)
	if err != nil {
		t.Fatal(err)
	}
	return link
}

// The same program without a sandbox can all that: it's the sandbox that forbids.
func TestNegativeTwinOutside(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("the twin is root")
	}
	dir := secretDir(t)
	var out bytes.Buffer
	cmd := exec.Command(filepath.Join(programs, "prober"), "once", dir)
	cmd.Stdout = &out
	// Its own mounts, so that its tries harm nobody.
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS}
	if err := processes.Run(t.Context(), cmd); err != nil {
		t.Fatal(err)
	}
	text, _ := strings.CutPrefix(strings.TrimSpace(out.String()), "report ")
	result := parseReport(t, text)
	for _, what := range []string{
		"write dir", "read secret", "change settings", "read /sys", "read the kernel's command line", "packet socket", "raw socket", "netfilter socket",
		"unshare", "keyctl", "mount", "prctl", "fork", "ioctl",
	} {
		if result[what] != "allowed" {
			t.Errorf("%s: %s", what, result[what])
		}
	}
	if result["Seccomp"] != "0" || result["NoNewPrivs"] != "0" || strings.Trim(result["CapEff"], "0") == "" || result["uid"] != "0 0" {
		t.Errorf("the twin is restricted: %v", result)
	}
	if !strings.Contains(result["ls /proc"], fmt.Sprint(os.Getpid())) {
		t.Error("the twin doesn't see us")
	}
}
