package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/operations/lifecycle"
)

// Real-time signals count from 34 in the names of C libraries (signal(7)).
// systemd and container runtimes use them to stop an init.
const rtmin = syscall.Signal(34)

// signalIntents is the meaning of signals to PID 1.
var signalIntents = map[syscall.Signal]request{
	syscall.SIGTERM: {intent: powerOff, why: "SIGTERM"},
	syscall.SIGINT:  {intent: reboot, why: "ctrl-alt-del"},
	syscall.SIGUSR1: {intent: halt, why: "SIGUSR1"},        // as with System V's init
	syscall.SIGUSR2: {intent: powerOff, why: "SIGUSR2"},    // the same
	syscall.SIGPWR:  {intent: powerOff, why: "SIGPWR"},     // an uninterruptible power supply, or LXC
	rtmin + 3:       {intent: powerOff, why: "SIGRTMIN+3"}, // what podman and Kubernetes send
	rtmin + 4:       {intent: powerOff, why: "SIGRTMIN+4"},
	rtmin + 5:       {intent: reboot, why: "SIGRTMIN+5"},
}

// catchSignals reaps orphans and turns signals into requests. It also catches
// all other signals and ignores them: by default several of them would end a Go
// program, and the end of PID 1 is a kernel panic.
func (p *pid1) catchSignals() {
	children := make(chan os.Signal, 1) // signals merge: each sweep takes all there are
	signal.Notify(children, syscall.SIGCHLD)
	p.forever("reaper", func() { p.reap(children) })

	// Each signal has its own channel: a common channel would drop signals while it is full.
	for s := range signalIntents {
		arrived := make(chan os.Signal, 1) // signals merge: two of the same are one
		signal.Notify(arrived, s)
		p.forever("signal "+s.String(), func() {
			for range arrived {
				p.signalled(s)
			}
		})
	}
	ignored := make(chan os.Signal, 1) // nothing receives from it: signals that don't fit are dropped
	for s := syscall.Signal(1); s <= 64; s++ {
		// URG is how the Go runtime wakes its own threads.
		if _, means := signalIntents[s]; !means && s != syscall.SIGCHLD && s != syscall.SIGURG && !uncatchable(s) {
			signal.Notify(ignored, s)
		}
	}
}

// uncatchable are the signals that a program can't handle: some by the kernel's
// rules, and 32 to 34, which C libraries use among threads, by those of the Go
// runtime. The kernel drops the latter for PID 1, which has no handler for them
// (pid_namespaces(7)), except for a race while a thread is being created.
func uncatchable(s syscall.Signal) bool {
	return s == syscall.SIGKILL || s == syscall.SIGSTOP || 32 <= s && s <= 34
}

func (p *pid1) signalled(s syscall.Signal) {
	r, ok := signalIntents[s]
	if !ok {
		return
	}
	if s == syscall.SIGINT && p.mode == boot.Container {
		// There is no ctrl-alt-del in a container: this is a ctrl-C in its terminal.
		r = request{intent: powerOff, why: "SIGINT"}
	}
	p.press(r)
}

// press is a request by a user at the machine, or by its host: the power button,
// a signal, ctrl-alt-del. The first one works like `gbctl shutdown` and `gbctl
// reboot`, within lifecycle.PressBudget; the second one ends the machine at once.
func (p *pid1) press(r request) {
	n := p.node.Load()
	if n == nil || r.intent == halt || p.leaving.Load() || !p.pressed.CompareAndSwap(false, true) {
		p.ask(r)
		return
	}
	p.logs.Printf("%s asked for by %s: pods move to other nodes first, where there are some, for %s at most; press again: at once", r.intent, r.why, lifecycle.PressBudget)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), lifecycle.PressBudget)
		defer cancel()
		begun := make(chan error, 1) // an operation that hangs must not keep the machine from its end
		go func() {
			begun <- dag.Guard(p.log, func() error {
				return (*n).End(ctx, r.intent, r.why)
			})
		}()
		select {
		case err := <-begun:
			if err == nil {
				<-ctx.Done() // the operation ends the machine before that, or takes too long
			} else {
				p.logs.Printf("%s at once: %v", r.intent, err)
			}
		case <-ctx.Done():
		}
		if !p.leaving.Load() {
			p.ask(r)
		}
	}()
}

func (p *pid1) reap(children <-chan os.Signal) {
	for {
		if _, err := p.processes.Reap(); err != nil {
			p.log.Warn("reap orphans", "err", err)
		}
		<-children
	}
}
