package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/system/udev"
	"golang.org/x/sys/unix"
)

const (
	// watchdogTimeout is how long PID 1 may hang before the hardware resets the
	// machine: longer than shutdownBudget, so that a slow shutdown isn't cut off.
	watchdogTimeout = 60 * time.Second

	// stage2Budget is when the kernel's own watchdog resets the machine unless stage 2 has opened it. Emulated machines
	// take some seconds.
	stage2Budget = 2 * time.Minute

	// watchdogPeriod allows for several missed keepalives, also on a machine under
	// emulation, and for devices that round the timeout down to half.
	watchdogPeriod = 10 * time.Second
)

// watchdogTimer is a watchdog device that was opened, which armed it
// (Documentation/watchdog/watchdog-api.rst).
type watchdogTimer interface {
	SetTimeout(time.Duration) error
	Keepalive() error
	Disarm() error
}

// watchdog sends keepalives to the device as long as the main loop answers. So
// it watches the main loop, not only a goroutine of its own.
type watchdog struct {
	open     func(path string) (watchdogTimer, error)
	software func(path string) bool // the kernel's own one
	beats    <-chan time.Time
	alive    func(within time.Duration) bool
	logf     func(format string, args ...any)
	again    func(name string, loop func()) // runs a goroutine

	mu       sync.Mutex    // guards all below
	seen     []string      // devices that were looked at
	device   watchdogTimer // nil: none yet
	soft     bool          // the device is the kernel's own one
	released bool          // no more keepalives, and no more devices are opened
}

func newWatchdog(p *pid1) *watchdog {
	return &watchdog{
		open:     openWatchdog,
		software: isSoftdog,
		beats:    time.Tick(watchdogPeriod),
		alive:    p.alive,
		logf:     p.logs.Printf,
		again:    p.forever,
	}
}

// alive asks the main loop for an answer.
func (p *pid1) alive(within time.Duration) bool {
	answer := make(chan struct{})
	select {
	case p.heartbeat <- answer:
		return true
	case <-time.After(within):
		return false
	}
}

// start uses a watchdog device, unless there is one already. One of the hardware takes the place of the kernel's own
// one, which stage 1 has armed and which therefore must be used, or disarmed.
func (w *watchdog) start(path string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	software, former := w.software(path), w.device
	if w.released || slices.Contains(w.seen, path) || former != nil && !w.soft && !software {
		return
	}
	w.seen = append(w.seen, path)
	device, err := w.open(path)
	if err != nil {
		w.logf("watchdog %s isn't used: %v", path, err)
		return
	}
	if former != nil && software {
		w.disarm(device)
		return
	}
	if err := device.SetTimeout(watchdogTimeout); err != nil {
		// Its own timeout is used, which is a minute for most.
		w.logf("watchdog %s keeps its own timeout: %v", path, err)
	}
	w.device, w.soft = device, software
	w.logf("watchdog %s: resets the machine when PID 1 is stuck for %s", path, watchdogTimeout)
	if former != nil {
		w.disarm(former)
		return
	}
	w.again("watchdog", w.loop)
}

func (w *watchdog) disarm(device watchdogTimer) {
	if err := device.Disarm(); err != nil {
		w.logf("watchdog: %v", err)
	}
}

func (w *watchdog) loop() {
	for {
		if w.alive(watchdogPeriod) && !w.keepalive() {
			return
		}
		<-w.beats
	}
}

func (w *watchdog) keepalive() (goOn bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.released {
		return false
	}
	if err := w.device.Keepalive(); err != nil {
		w.logf("watchdog: %v", err)
	}
	return true
}

// release ends the keepalives. A machine that reboots stays watched until the
// firmware takes over: if the reboot hangs, the watchdog resets it. A machine
// that powers off or halts must not be reset, so the watchdog is disarmed.
func (w *watchdog) release(i intent) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.released = true
	if w.device == nil {
		return
	}
	do := w.device.Disarm
	if i == reboot {
		do = w.device.Keepalive
	}
	if err := do(); err != nil {
		w.logf("watchdog: %v", err)
	}
}

// armSoftdog loads the kernel's own watchdog. It resets the machine unless stage 2 opens it in time: a new system that
// hangs there, or while it loads the driver of the hardware's watchdog, doesn't stay
// (Documentation/watchdog/watchdog-parameters.rst).
func armSoftdog() error {
	modules, err := udev.RunningModules(newRoot)
	if err != nil {
		return err
	}
	modules.Parameters(boot.ParseCmdline(fmt.Sprintf("softdog.soft_active_on_boot=1 softdog.soft_margin=%d", int(stage2Budget/time.Second))))
	return modules.Load("softdog")
}

// isSoftdog reports whether a watchdog is the kernel's own one.
func isSoftdog(path string) bool {
	identity, err := os.ReadFile(filepath.Join("/sys/class/watchdog", filepath.Base(path), "identity"))
	return err == nil && strings.TrimSpace(string(identity)) == "Software Watchdog"
}

// kernelWatchdog is a watchdog device of the kernel.
type kernelWatchdog struct{ file *os.File }

func openWatchdog(path string) (watchdogTimer, error) {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return nil, err
	}
	return kernelWatchdog{f}, nil
}

func (d kernelWatchdog) SetTimeout(timeout time.Duration) error {
	if err := unix.IoctlSetPointerInt(int(d.file.Fd()), unix.WDIOC_SETTIMEOUT, int(timeout/time.Second)); err != nil {
		return fmt.Errorf("set timeout of %s: %w", d.file.Name(), err)
	}
	return nil
}

func (d kernelWatchdog) Keepalive() error {
	_, err := d.file.Write([]byte{'1'})
	return err
}

// Disarm is the "magic close": without the V, the watchdog stays armed after the close.
func (d kernelWatchdog) Disarm() error {
	if _, err := d.file.Write([]byte{'V'}); err != nil {
		return err
	}
	return d.file.Close()
}
