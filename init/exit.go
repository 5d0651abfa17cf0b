package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/meta"
	"github.com/garboard-os/garboard/services/core/logs"
)

// intent is what happens to the machine after the exit.
type intent = boot.Power

const (
	powerOff = boot.PowerOff
	reboot   = boot.Reboot
	halt     = intent("halt")
)

// request asks for the end of the machine.
type request struct {
	intent intent
	why    string        // never empty
	failed bool          // by a failure, not by a user
	delay  time.Duration // before the first phase, so that why can be read
}

// ask sends a request to the main loop. Only the first one counts: a second
// ctrl-alt-del must not start the shutdown again.
func (p *pid1) ask(r request) {
	if p.leaving.Load() {
		p.logs.Printf("%s asked for by %s: the machine is shutting down already", r.intent, r.why)
	}
	select {
	case p.requests <- r:
	default:
	}
}

// power is a request of the node itself: by its API, or because of a change of
// its configuration.
func (p *pid1) power(what boot.Power, why string) { p.ask(request{intent: what, why: why}) }

// The parts of shutdownBudget, which is a promise: a machine that is asked to
// power off does so within 30 s, whatever a service does. The rest is left for
// the kernel itself.
const (
	recordBudget  = 1 * time.Second  // one small file
	revertBudget  = 1 * time.Second  // one sector of META
	serviceBudget = 14 * time.Second // the end of the node kills pods anyway, so only a clean end of etcd counts
	termBudget    = 3 * time.Second  // for processes that belong to no service: shims and containers
	killBudget    = 2 * time.Second  // SIGKILL takes effect at once, except in a hanging system call
	unmountBudget = 4 * time.Second
	syncBudget    = 3 * time.Second
	consoleBudget = 1 * time.Second // for a console with a slow reader, in a container

	shutdownBudget = recordBudget + revertBudget + serviceBudget + termBudget + killBudget + unmountBudget + syncBudget + consoleBudget

	// eraseBudget is for a node that is being reset, in addition to the promise: half a GiB
	// of zeros on a slow USB disk, or a million files on a host. The next boot does the rest.
	eraseBudget = 90 * time.Second
)

// phase is one step of the exit. If it isn't done within its budget, the exit continues without it.
type phase struct {
	what   string
	budget time.Duration
	do     func(ctx context.Context) error
}

// orderlyPhases are the phases of an orderly exit: stop stops the node, and
// ended receives its error.
func (p *pid1) orderlyPhases(r request, stop context.CancelFunc, ended <-chan error) []phase {
	phases := []phase{
		{"record the reason", recordBudget, func(context.Context) error { return recordReason(boot.StateDir, r) }},
		{"go back to the system that is known to work", revertBudget, func(context.Context) error { return p.revert(r) }},
		{"stop services", serviceBudget, func(ctx context.Context) error {
			stop()
			select {
			case err := <-ended:
				return err
			case <-ctx.Done():
				return ctx.Err()
			}
		}},
		{"end processes", termBudget, func(ctx context.Context) error { return endProcesses(ctx, unix.SIGTERM) }},
		{"kill processes", killBudget, func(ctx context.Context) error { return endProcesses(ctx, unix.SIGKILL) }},
		{unmountPhase, unmountBudget, func(ctx context.Context) error {
			p.logs.Release() // otherwise its files keep /var busy
			return unmountAll(ctx, p.mode)
		}},
		{"write what is in memory to disk", syncBudget, func(context.Context) error { unix.Sync(); return nil }},
	}
	n := p.node.Load()
	if n == nil || !(*n).Marked() {
		return phases
	}
	// A disk is erased after nothing is mounted from it, a container's directories
	// while they are still mounted.
	at := slices.IndexFunc(phases, func(ph phase) bool { return ph.what == unmountPhase })
	if p.mode == boot.Machine {
		at++
	}
	return slices.Insert(phases, at, phase{erasePhase, eraseBudget + (*n).EraseTime(), func(ctx context.Context) error {
		p.logs.Release()
		return (*n).Erase(ctx)
	}})
}

const (
	unmountPhase = "unmount filesystems"
	erasePhase   = "erase what a reset wipes"
)

// exit is the one exit funnel; it doesn't return.
func (p *pid1) exit(r request, stop context.CancelFunc, ended <-chan error) {
	start := time.Now()
	p.leaving.Store(true)
	p.log.Warn(string(r.intent), "because", r.why)
	p.wait(r)
	for _, ph := range p.phases(r, stop, ended) {
		p.do(ph)
	}
	p.logs.Printf("%s now, after %s", r.intent, time.Since(start).Round(time.Millisecond))
	p.logs.Flush(consoleBudget)
	if p.watchdog != nil {
		p.watchdog.release(r.intent)
	}
	err := p.leave(r.intent)
	// This is reached only if the last system call failed.
	p.logs.Printf("%s: %v", r.intent, err)
	for {
		unix.Pause()
	}
}

// wait waits for the delay of a request. The next request ends it early: a user
// who presses ctrl-alt-del has read the console.
func (p *pid1) wait(r request) {
	if r.delay == 0 {
		return
	}
	p.logs.Printf("%s in %s; ctrl-alt-del or the power button: at once", r.intent, r.delay)
	answering(p.heartbeat, p.requests, r.delay)
}

// answering waits for a message, for some time at most, and answers the watchdog meanwhile.
func answering[T any](heartbeat <-chan chan struct{}, c <-chan T, most time.Duration) (message T, came bool) {
	for late := time.After(most); ; {
		select {
		case message = <-c:
			return message, true
		case <-late:
			return message, false
		case answer := <-heartbeat:
			close(answer)
		}
	}
}

// do runs a phase within its budget, and answers the watchdog meanwhile.
func (p *pid1) do(ph phase) {
	ctx, cancel := context.WithTimeout(context.Background(), ph.budget)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		done <- step{ph.what, func() error { return ph.do(ctx) }}.run()
	}()
	// A phase that respects its context returns soon after; one that hangs doesn't.
	const grace = 100 * time.Millisecond
	switch err, ended := answering(p.heartbeat, done, ph.budget+grace); {
	case ended && err == nil:
		return
	case ended:
		p.logs.Printf("%v", err)
	default:
		p.logs.Printf("%s: not done after %s; going on without", ph.what, ph.budget)
	}
	p.leaveUndone(ph)
}

// leaveUndone logs the consequence of a phase that isn't done, if users rely on
// it: a disk that was reset may be given away.
func (p *pid1) leaveUndone(ph phase) {
	if ph.what == erasePhase {
		p.logs.Printf("this node is NOT wiped: its next boot does it, before it uses anything of what is left. Let it boot before you give its disk away")
	}
}

// failure is the request after the node has ended by itself.
func (p *pid1) failure(err error) request {
	why := "the node ended by itself"
	if err != nil {
		why = err.Error()
	}
	r := request{intent: reboot, why: why, failed: true}
	if p.mode == boot.Machine {
		r.intent, r.delay = afterFailure(p.cmdline)
	}
	return r
}

// recordReason writes the reason for the next boot. Before STATE is mounted it
// can't be written, and isn't needed.
func recordReason(dir string, r request) error {
	there, err := mountedAt()
	if err != nil || !slices.Contains(there, dir) {
		return err
	}
	line := fmt.Sprintf("%s %s: %s\n", time.Now().UTC().Format(time.RFC3339), r.intent, r.why)
	return boot.WriteFile(filepath.Join(dir, filepath.Base(boot.ExitFile)), []byte(line), 0o600)
}

// revert makes the slot of this machine bad if its system has failed before it
// has proved itself: the next boot is from the other slot. If a user ends such
// a machine, it loses only this try.
func (p *pid1) revert(r request) error {
	slot, there := p.cmdline.Get(boot.ParamSlot)
	if !there || !r.failed {
		return nil
	}
	path, err := p.findMeta()
	if err != nil {
		return err
	}
	return meta.Use(path, func(c meta.Change) error {
		slots, err := boot.SlotsKey.In(c)
		if err != nil || !slots.Unproven(slot) {
			return err
		}
		if slots, err = boot.ChangeSlots(c, func(s *boot.Slots) error { return s.Fail(slot, r.why, time.Now()) }); err == nil {
			p.logs.Printf("slot %s is bad: %s; slot %s boots next", slot, r.why, slots.Next())
		}
		return err
	})
}

// leaveFor is the last system call of a mode.
func leaveFor(mode boot.Mode) func(intent) error {
	return func(i intent) error {
		if os.Getpid() != 1 {
			return fmt.Errorf("not PID 1: the machine isn't ours")
		}
		// In a PID namespace reboot(2) ends only the namespace, and tells the parent
		// which of the two it was; a power off is a normal end there.
		if mode == boot.Container && i != reboot {
			os.Exit(0)
		}
		return unix.Reboot(map[intent]int{
			powerOff: unix.LINUX_REBOOT_CMD_POWER_OFF,
			reboot:   unix.LINUX_REBOOT_CMD_RESTART,
			halt:     unix.LINUX_REBOOT_CMD_HALT,
		}[i])
	}
}

// afterFailure is what a machine does after a failure, by the kernel's own
// panic= (Documentation/admin-guide/kernel-parameters.txt): reboot after that
// many seconds, at once when negative, never when 0.
func afterFailure(cmdline boot.Cmdline) (intent, time.Duration) {
	text, _ := cmdline.Get("panic")
	seconds, err := strconv.Atoi(text)
	switch {
	case err != nil:
		return reboot, failureDelay
	case seconds == 0:
		return halt, 0
	}
	return reboot, time.Duration(max(seconds, 0)) * time.Second
}

// giveUp is the exit of stage 1, where nothing runs that could be stopped.
func giveUp(console *logs.Logs, err error) {
	line, _ := os.ReadFile("/proc/cmdline") // none before /proc is mounted
	next, delay := afterFailure(boot.ParseCmdline(string(line)))
	console.Printf("this machine can't boot: %v; what follows: %s in %s", err, next, delay)
	time.Sleep(delay)
	console.Flush(consoleBudget)
	unix.Sync()
	console.Printf("%s: %v", next, leaveFor(boot.Machine)(next))
	for {
		unix.Pause()
	}
}
