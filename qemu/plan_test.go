package qemu

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"net/netip"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func TestClusterNames(t *testing.T) {
	t.Parallel()
	for name, ok := range map[string]bool{
		"a": true, "garboard-default": true, "x1": true, strings.Repeat("a", 40): true,
		"": false, "-a": false, "a-": false, "A": false, "a/b": false, "..": false, "a b": false, ".lock": false, strings.Repeat("a", 41): false,
	} {
		if err := checkName(name); (err == nil) != ok {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestPlanIsKept(t *testing.T) {
	t.Setenv("GARBOARD_HOME", t.TempDir())
	want := testPlan(Container)
	d, err := dirOf(want.Name)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Open(want.Name); !errors.Is(err, ErrNoCluster) {
		t.Errorf("open without a plan: %v", err)
	}
	if err := os.MkdirAll(string(d), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := writePlan(d, want); err != nil {
		t.Fatal(err)
	}
	all, err := List()
	if err != nil || len(all) != 1 {
		t.Fatalf("list: %v, %v", all, err)
	}
	if diff := cmp.Diff(want, all[0].Plan, cmpopts.EquateComparable(netip.Prefix{}, netip.Addr{})); diff != "" {
		t.Errorf("plan (-want +got):\n%s", diff)
	}
	// The error of a damaged plan has its path.
	if err := os.WriteFile(d.plan(), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(want.Name); err == nil || !strings.Contains(err.Error(), d.plan()) {
		t.Errorf("open with a broken plan: %v", err)
	}
}

// A cluster that another command removes during List is left out.
func TestListWhileOneIsRemoved(t *testing.T) {
	t.Setenv("GARBOARD_HOME", t.TempDir())
	plan := testPlan(Container)
	d, _ := dirOf(plan.Name)
	gone, _ := dirOf("gone")
	if err := errors.Join(os.MkdirAll(string(d), 0o700), writePlan(d, plan), os.MkdirAll(string(gone), 0o700), os.Symlink("nowhere", gone.plan())); err != nil {
		t.Fatal(err)
	}
	if all, err := List(); err != nil || len(all) != 1 || all[0].Name != plan.Name {
		t.Errorf("list: %v, %v", all, err)
	}
}

// A damaged cluster hides no others, and doesn't prevent new ones.
func TestListWithOneThatIsDamaged(t *testing.T) {
	t.Setenv("GARBOARD_HOME", t.TempDir())
	plan := testPlan(Container)
	d, _ := dirOf(plan.Name)
	broken, _ := dirOf("broken")
	copied := clusterDir(string(d) + ".bak")
	err := errors.Join(os.MkdirAll(string(d), 0o700), writePlan(d, plan), os.MkdirAll(string(copied), 0o700), writePlan(copied, plan),
		os.MkdirAll(string(broken), 0o700), os.WriteFile(broken.plan(), nil, 0o600))
	if err != nil {
		t.Fatal(err)
	}
	all, err := List()
	if len(all) != 1 || all[0].Name != plan.Name {
		t.Errorf("list: %v", all)
	}
	if err == nil || !strings.Contains(err.Error(), "'gbctl cluster destroy --name broken' removes it") || strings.Contains(err.Error(), ".bak") {
		t.Errorf("list: %v", err)
	}
	if ports, err := freePorts("new", 1); err != nil || len(ports) != 1 {
		t.Errorf("ports of a new one: %v, %v", ports, err)
	}
}

// A port that another cluster has planned, or that is in use, isn't planned again.
func TestPortsDontCollide(t *testing.T) {
	t.Setenv("GARBOARD_HOME", t.TempDir())
	first, err := freePorts("c", 2)
	if err != nil {
		t.Fatal(err)
	}
	plan := testPlan(Container)
	plan.KubernetesPort, plan.Nodes[0].APIPort = first[0], first[1]
	d, _ := dirOf(plan.Name)
	if err := errors.Join(os.MkdirAll(string(d), 0o700), writePlan(d, plan)); err != nil {
		t.Fatal(err)
	}
	second, err := freePorts("c", 1)
	if err != nil || slices.Contains(first, second[0]) {
		t.Fatalf("second port %d, first %d: %v", second, first, err)
	}
	l, err := net.Listen("tcp4", fmt.Sprintf("127.0.0.1:%d", second[0]))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if third, err := freePorts("c", 1); err != nil || slices.Contains(append(first, second...), third[0]) {
		t.Errorf("third port %d: %v", third, err)
	}
}

// A command that waits for another one reports it, and can be interrupted.
func TestUpWaitsForAnotherCommand(t *testing.T) {
	t.Setenv("GARBOARD_HOME", t.TempDir())
	release, err := waitFor(t.Context(), "busy", func() { t.Error("nobody else is there") })
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	hear, say := io.Pipe()
	done := make(chan error, 1)
	go func() {
		_, err := Up(ctx, Options{Name: "busy", Out: say})
		say.Close()
		done <- err
	}()
	line, err := bufio.NewReader(hear).ReadString('\n')
	if err != nil || line != "waiting for another command at cluster busy\n" {
		t.Errorf("it says %q, %v", line, err)
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("up: %v", err)
	}
}

// Other processes get the PID of a lock's holder, and 0 after it has ended.
func TestLock(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "lock")
	if pid, err := holder(path); pid != 0 || err != nil {
		t.Errorf("holder of nothing: %d, %v", pid, err)
	}
	holding := exec.Command(os.Args[0], "-test.run=^TestLockHelper$")
	holding.Env = append(os.Environ(), "GARBOARD_TEST_LOCK="+path)
	in, _ := holding.StdinPipe()
	out, _ := holding.StdoutPipe()
	if err := holding.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if pid, err := holder(path); pid != holding.Process.Pid || err != nil {
		t.Errorf("holder %d, %v; want %d", pid, err, holding.Process.Pid)
	}
	if _, err := hold(path); err == nil {
		t.Error("two hold the lock")
	}
	in.Close()
	_ = holding.Wait()
	if pid, err := holder(path); pid != 0 || err != nil {
		t.Errorf("holder after the end: %d, %v", pid, err)
	}
}

// TestLockHelper is the other process of TestLock.
func TestLockHelper(t *testing.T) {
	path := os.Getenv("GARBOARD_TEST_LOCK")
	if path == "" {
		return
	}
	if _, err := hold(path); err != nil {
		t.Fatal(err)
	}
	fmt.Print("held")
	_, _ = os.Stdin.Read(make([]byte, 1))
}

// Sockets work with any length of the directory's path.
func TestLongSocketPath(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), strings.Repeat("d", 100), strings.Repeat("e", 100))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	d := clusterDir(dir)
	l, err := listenUnix(d.socket())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	h := &hostProcess{stop: make(chan struct{})}
	go func() { _ = http.Serve(l, h.control()) }() // ends when l is closed
	var nodes []NodeStatus
	if err := ask(t.Context(), d, "GET", "/status", &nodes); err != nil {
		t.Error(err)
	}
	if err := ask(t.Context(), d, "POST", "/nodes/nobody/cut", nil); err == nil || !strings.Contains(err.Error(), `no node "nobody"`) {
		t.Errorf("cut nobody: %v", err)
	}
	if err := ask(t.Context(), d, "POST", "/stop?budget=1s", nil); err != nil {
		t.Error(err)
	}
	<-h.stop
}
