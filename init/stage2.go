package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime/debug"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/boot/meta"
	"github.com/garboard-os/garboard/services"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/process"
)

const (
	// failureDelay is the time to read the console after a node has failed, before
	// the machine reboots, unless panic= is set.
	failureDelay = 30 * time.Second

	// afterPanic is the pause before one of PID 1's own loops runs again after a
	// panic: a loop that panics at once again must not use a whole processor.
	afterPanic = time.Second
)

// node is what PID 1 runs: services.Node, or a test's.
type node interface {
	// Run returns after ctx was cancelled and all services have stopped, or if the
	// node can't continue.
	Run(ctx context.Context) error
	// End ends the machine in order, after its pods have moved away. It returns
	// when that is under way.
	End(ctx context.Context, p boot.Power, why string) error
	// Marked reports whether a reset has marked anything, which Erase then wipes.
	Marked() bool
	// EraseTime is how much longer Erase may take than usual.
	EraseTime() time.Duration
	Erase(ctx context.Context) error
}

// pid1 is the state of stage 2.
type pid1 struct {
	mode      boot.Mode
	cmdline   boot.Cmdline
	logs      *logs.Logs
	log       *slog.Logger // own log, "init"
	processes *process.Table

	requests  chan request         // to the exit funnel; the first one counts
	leaving   atomic.Bool          // the funnel has been entered
	pressed   atomic.Bool          // a user at the machine has asked for its end
	node      atomic.Pointer[node] // nil before it runs
	heartbeat chan chan struct{}   // the watchdog sends, the main loop answers
	watchdog  *watchdog            // nil in a container

	prepare  []step                                                  // before the node is created
	newNode  func(services.Options) (node, error)                    // services.NewNode
	leave    func(intent) error                                      // the last step: reboot(2)
	findMeta func() (string, error)                                  // the device of partition META
	phases   func(request, context.CancelFunc, <-chan error) []phase // the phases of the exit
}

// gcPercent is how much the heap grows before garbage is collected, in percent of what is used. PID 1 is idle most of
// the time, and its memory is the pods' otherwise.
const gcPercent = 50

// stage2 doesn't return.
func stage2(mode boot.Mode) {
	debug.SetGCPercent(gcPercent)
	p := &pid1{
		mode:      mode,
		processes: process.New(),
		requests:  make(chan request, 1),
		heartbeat: make(chan chan struct{}),
		newNode:   func(o services.Options) (node, error) { return services.NewNode(o) },
		leave:     leaveFor(mode),
		findMeta:  func() (string, error) { return meta.Find("/sys/class/block", "/dev") },
	}
	p.useLogs(logs.New(logs.Plain(os.Stdout)))
	if mode == boot.Machine {
		for _, s := range []step{ // before logs and requests are possible
			{"mount the kernel's filesystems", func() error { return mountAll(earlyMounts, nil) }},
			{"open the kernel's log", p.openConsole},
			{"read the kernel command line", p.readCmdline},
		} {
			if err := s.run(); err != nil {
				giveUp(p.logs, err)
			}
		}
		p.watchdog = newWatchdog(p)
	}
	p.prepare = p.bootSteps()
	p.phases = p.orderlyPhases
	p.run()
}

func (p *pid1) useLogs(l *logs.Logs) {
	p.logs = l
	p.log = l.Logger("init")
}

// run is the main function of PID 1. The boot and the node run in one goroutine,
// signals and devices in others, and the main loop here, which ends in the exit funnel.
func (p *pid1) run() {
	ctx, cancel := context.WithCancel(context.Background())
	p.catchSignals()

	ended := make(chan error, 1)
	go func() { ended <- dag.Guard(p.log, func() error { return p.bootAndRun(ctx) }) }()

	var r request
	for r.why == "" {
		select {
		case r = <-p.requests:
		case err := <-ended:
			ended <- err // the funnel receives it, too
			r = p.failure(err)
		case answer := <-p.heartbeat:
			close(answer)
		}
	}
	p.exit(r, cancel, ended)
}

// bootAndRun prepares the machine and runs the node; it returns only if one of
// the two has failed, or ctx has ended.
func (p *pid1) bootAndRun(ctx context.Context) error {
	for _, s := range p.prepare {
		if err := s.run(); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return nil
		}
	}
	n, err := p.newNode(services.Options{
		Mode: p.mode, Cmdline: p.cmdline, Processes: p.processes, Logs: p.logs, Power: p.power,
	})
	if err != nil {
		return fmt.Errorf("put the node together: %w", err)
	}
	p.node.Store(&n)
	return n.Run(ctx)
}

// bootSteps are the steps of a machine, or a container, before its first service.
func (p *pid1) bootSteps() []step {
	steps := []step{
		{"set the environment", setEnvironment},
		{"apply kernel settings", func() error {
			applySettings("/proc/sys", settingsFor(p.mode), func(s boot.Setting, err error) {
				p.log.Info("kernel setting not applied", "name", s.Name, "value", s.Value, "err", err)
			})
			return nil
		}},
		{"mount filesystems", func() error {
			return mountAll(forMode(mounts, p.mode), func(m mountPoint, err error) {
				p.log.Info("doing without a mount", "err", err, "why that is no harm", m.without)
			})
		}},
		{"name the system", func() error {
			if err := nameSystem("/etc/os-release"); err != nil { // a name keeps no machine off
				p.log.Info("the system has the name of its release only", "err", err)
			}
			return nil
		}},
		{"share mounts", shareMounts},
		{"link devices", linkDevices},
		{"delegate cgroups", p.delegateCgroups},
		{"raise resource limits", raiseLimits},
	}
	if p.mode == boot.Container {
		return steps
	}
	return append(steps,
		step{"find the slot", p.findSlot},
		// The kernel sends SIGINT to PID 1 then, instead of rebooting at once (reboot(2), LINUX_REBOOT_CMD_CAD_OFF).
		step{"take ctrl-alt-del", func() error { return unix.Reboot(unix.LINUX_REBOOT_CMD_CAD_OFF) }},
		step{"set the first hostname", func() error { return unix.Sethostname([]byte(boot.FirstHostname)) }},
		step{"watch the power button and the watchdog", p.watchDevices},
	)
}

// nameSystem replaces the link in the writable /etc. A customized system may have no such file.
func nameSystem(path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return boot.IgnoreMissing(err)
	}
	return boot.WriteFile(path, []byte(boot.Named(string(text))), 0o644)
}

func (p *pid1) openConsole() error {
	l, err := kernelConsole()
	if err != nil {
		return err
	}
	p.useLogs(l)
	return nil
}

func (p *pid1) readCmdline() error {
	line, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return err
	}
	p.cmdline = boot.ParseCmdline(string(line))
	return nil
}

// findSlot completes the command line of a system that is signed for Secure Boot.
func (p *pid1) findSlot() error {
	if _, given := p.cmdline.Get(boot.ParamSlot); !given {
		p.cmdline.Params = append(p.cmdline.Params, esp.Selected(esp.FirmwareDir)...)
	}
	return nil
}

// delegateCgroups continues without a controller that the kernel doesn't have:
// the kubelet reports it if it needs it.
func (p *pid1) delegateCgroups() error {
	if err := delegateCgroups(cgroupRoot); err != nil {
		p.log.Warn("cgroups are incomplete", "err", err)
	}
	return nil
}

// setEnvironment gives children a PATH, with nothing that pods can write: PID 1 gets none from the kernel.
func setEnvironment() error {
	return errors.Join(
		os.Setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
		os.Setenv("HOME", "/"),
	)
}

// forever runs one of PID 1's own loops in a goroutine. After a panic it logs
// it (one line on the console, the stack in the log) and runs the loop again. It ends when loop returns.
func (p *pid1) forever(name string, loop func()) {
	once := func() (done bool) {
		defer func() {
			if r := recover(); r != nil {
				p.log.Error("panic in PID 1", "where", name, "panic", fmt.Sprint(r))
				fmt.Fprintf(p.logs.Writer("init"), "%s", debug.Stack())
			}
		}()
		loop()
		return true
	}
	go func() {
		for !once() {
			time.Sleep(afterPanic)
		}
	}()
}
