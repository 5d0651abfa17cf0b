package sandbox

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"golang.org/x/sys/unix"
)

// Nothing but the service itself stays: the sandbox program has ended.
func TestServiceIsOurChild(t *testing.T) {
	b := newBench(t, "serve")
	b.start()
	pid := b.pid(0)
	b.line("ready")
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(stat), ") ")
	if fields := strings.Fields(after); fields[1] != fmt.Sprint(os.Getpid()) {
		t.Errorf("its parent is %s, not us, %d", fields[1], os.Getpid())
	}
	b.stop()
	b.line("asked to end")
	if s := b.status(); s.State != dag.Finished || s.Message != "Stopped" {
		t.Errorf("it ended as %s: %s", s.State, s.Message)
	}
}

func TestKilledServiceIsStartedAgain(t *testing.T) {
	b := newBench(t, "serve")
	b.start()
	pid := b.pid(0)
	for range 2 {
		if err := unix.Kill(pid, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		pid = b.pid(pid)
	}
	b.message("ended by itself: run " + b.runner.args[0] + " serve: signal: killed")
}

// The exit status of a process that another program has started reaches the user.
func TestExitStatusIsReported(t *testing.T) {
	b := newBench(t, "exit", "7")
	b.service.Restart = dag.RestartNever
	b.start()
	b.message("ended by itself: run " + b.runner.args[0] + " exit 7: exit status 7")
	b.line("last words")
}

func TestMemoryCeiling(t *testing.T) {
	b := newBench(t, "hog")
	b.service.Restart = dag.RestartNever
	b.runner.memory = 32 << 20
	b.start()
	b.message("hit its memory ceiling of 32 MiB, and the kernel killed it: run " + b.runner.args[0] + " hog: signal: killed")
}

func TestThreadCeiling(t *testing.T) {
	b := newBench(t, "threads")
	b.service.Restart = dag.RestartNever
	b.start()
	// Go's runtime gives up when it gets no thread.
	b.message("ended by itself: run " + b.runner.args[0] + " threads: exit status 2")
}

func TestStubbornServiceIsKilled(t *testing.T) {
	b := newBench(t, "stubborn")
	b.runner.stop = 100 * time.Millisecond
	b.start()
	b.pid(0)
	b.line("ready")
	start := time.Now()
	b.stop()
	if took := time.Since(start); took > eventually.Scale(dag.DefaultStopBudget) {
		t.Errorf("the stop took %s", took)
	}
}

// A service that survived its PID 1 (which can't be, but a node container's cgroup
// can) gives way to the next one.
func TestLeftoverGivesWay(t *testing.T) {
	old := newBench(t, "serve")
	old.service.Restart = dag.RestartNever
	old.start()
	former := old.pid(0)

	next := newBench(t, "serve")
	next.runner.ID, next.service.ID = old.runner.ID, old.runner.ID
	next.start()
	if pid := next.pid(0); pid == former {
		t.Errorf("process %d lives on", pid)
	}
	old.message("signal: killed")
}

// A sandbox program that doesn't do its part is an error in its own words, or in
// ours, and leaves nothing.
func TestMakerFails(t *testing.T) {
	for name, want := range map[string]string{
		"dead":    "sandbox: no luck today",
		"garbage": "decode the sandbox program's answer",
		"wrong":   "answers with process 1",
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, "serve")
			b.runner.ID, b.service.ID = name, name
			b.runner.sandbox = filepath.Join(programs, "maker-"+name)
			b.service.Restart = dag.RestartNever
			link(t, b.runner.sandbox)
			b.start()
			b.message(want)
			b.message("make the sandbox of " + name)
		})
	}
}

// A sandbox program that is killed halfway leaves a process that waits for it for
// ever: the next run ends that.
func TestMakerKilledHalfway(t *testing.T) {
	b := newBench(t, "serve")
	halfway := b.runner
	halfway.setDefaults()
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	m, err := halfway.startMaker(write)
	write.Close()
	if err != nil {
		t.Fatal(err)
	}
	defer m.close()
	line, err := json.Marshal(halfway.spec())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.orders.Write(append(line, '\n')); err != nil {
		t.Fatal(err)
	}
	made, err := m.answer()
	if err != nil {
		t.Fatal(err)
	}
	if err := m.child.Kill(); err != nil {
		t.Fatal(err)
	}
	<-m.child.Done()
	if err := unix.Kill(made.PID, 0); err != nil {
		t.Fatalf("the process is gone by itself: %v", err)
	}
	b.start()
	b.pid(made.PID)
	eventually.That(t, patience, "the process is gone", func() error {
		if err := unix.Kill(made.PID, 0); err != unix.ESRCH {
			return fmt.Errorf("process %d: %v", made.PID, err)
		}
		return nil
	})
}

// A stop doesn't wait for a sandbox that doesn't get made.
func TestStopWhileMaking(t *testing.T) {
	b := newBench(t, "serve")
	b.runner.sandbox = filepath.Join(programs, "maker-silent")
	link(t, b.runner.sandbox)
	b.start()
	b.message("Creating service runner")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		b.stop()
	}()
	select {
	case <-stopped:
	case <-ctx.Done():
		t.Fatal("the stop hangs")
	}
}

func link(t *testing.T, name string) {
	t.Helper()
	if err := os.Link(filepath.Join(programs, "prober"), name); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Remove(name) })
}
