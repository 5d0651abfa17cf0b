package process

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/garboard-os/garboard/tools/testing/eventually"
	"golang.org/x/sys/unix"
)

// The figures: so many orphans, while so many own children each get
// their exact exit code.
const (
	stormOrphans  = 10_000
	stormForkers  = 40
	stormChildren = 600
	stormParallel = 24
)

// Runs in a process of its own, which becomes a subreaper: no root needed.
func TestTenThousandOrphansAndNoExitStatusLost(t *testing.T) {
	out, err := helper("storm").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Logf("%s", out)
}

// helperForget starts args[0] processes that end at once, and leaves without
// waiting for them: orphans.
func helperForget(args []string) {
	n, err := strconv.Atoi(args[0])
	check(err)
	for range n {
		cmd := exec.Command("/bin/true")
		check(cmd.Start())
	}
}

// helperOrphans is forget with a detour, so that whole groups move at once.
func helperOrphans(args []string) {
	cmd := helper("forget", args...)
	check(cmd.Start())
}

func helperStorm([]string) {
	becomeReaper()
	table := New()
	// As PID 1 does: a sweep per SIGCHLD, which merge.
	chld := make(chan os.Signal, 1)
	signal.Notify(chld, unix.SIGCHLD)
	stop, swept := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(swept)
		for {
			select {
			case <-chld:
				_, err := table.Reap()
				check(err)
			case <-stop:
				return
			}
		}
	}()

	start := time.Now()
	var wg sync.WaitGroup
	jobs := make(chan func() error)
	problems := make(chan error, stormChildren+stormForkers)
	for range stormParallel {
		wg.Go(func() {
			for job := range jobs {
				if err := job(); err != nil {
					problems <- err
				}
			}
		})
	}
	all := make([]func() error, 0, stormChildren+stormForkers)
	for range stormForkers {
		all = append(all, func() error { return ownChild(table, helper("orphans", strconv.Itoa(stormOrphans/stormForkers)), 0) })
	}
	for i := range stormChildren {
		code := i % 100
		all = append(all, func() error {
			return ownChild(table, exec.Command("/bin/sh", "-c", "exit "+strconv.Itoa(code)), code)
		})
	}
	rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	for _, job := range all {
		jobs <- job
	}
	close(jobs)
	wg.Wait()
	close(problems)
	for err := range problems {
		check(err)
	}
	// The detours and the true orphans: each must go without a further sweep of
	// ours than those that signals ask for.
	want := uint64(stormOrphans + stormForkers)
	deadline := time.After(eventually.Scale(2 * time.Minute))
	poll := time.NewTicker(5 * time.Millisecond)
	defer poll.Stop()
	for late := false; table.Reaped() < want && !late; {
		select {
		case <-poll.C:
		case <-deadline:
			late = true
		}
	}
	close(stop)
	<-swept
	if got := table.Reaped(); got != want {
		check(fmt.Errorf("%d orphans reaped, %d expected", got, want))
	}
	check(noZombies())
	fmt.Printf("%d orphans and %d own children in %s\n", want, len(all), time.Since(start).Round(time.Millisecond))
}

func ownChild(table *Table, cmd *exec.Cmd, code int) error {
	c, err := table.Start(cmd)
	if err != nil {
		return err
	}
	if err := c.Wait(); exitCode(err) != code {
		return fmt.Errorf("child %d: exit code %d expected: %v", c.Pid(), code, err)
	}
	return nil
}

func noZombies() error {
	pid, err := firstZombie()
	if err != nil {
		return err
	}
	if pid != 0 {
		stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		return fmt.Errorf("zombie left: %s", strings.TrimSpace(string(stat)))
	}
	return nil
}

// Our own zombie stands first in the kernel's list and the orphan behind it, which goes when ours is collected.
func TestSweepGoesPastOurOwnZombie(t *testing.T) {
	if out, err := helper("behind").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

func helperBehind([]string) {
	becomeReaper()
	table := New()
	// The kernel lists children by the thread that forked them: one thread, so
	// that ours comes first.
	runtime.LockOSThread()
	own := exec.Command("/bin/true")
	check(own.Start())
	awaitExit(own.Process.Pid)
	orphan := exec.Command("/bin/true")
	check(orphan.Start())
	awaitExit(orphan.Process.Pid)
	c := &Child{table: table, cmd: own, pid: own.Process.Pid, tail: new(Tail), done: make(chan struct{})}
	table.known[c.pid] = c

	n, err := table.Reap()
	check(err)
	if n != 0 {
		check(fmt.Errorf("%d reaped past our own zombie", n))
	}
	c.collect()
	check(c.Wait())
	if table.Reaped() != 1 {
		check(errors.New("the orphan behind our own zombie was forgotten"))
	}
	check(noZombies())
}
