// Package console takes commands at the machine's own screen and keyboard, and at its serial lines. They need no credentials: a person at
// the machine can press its power button, too. They show what the node does, restart it, and give a machine without a configuration its
// first network settings. None of them shows a secret or changes a configuration.
//
//	kernel consoles ─▶ serve: one for each ─▶ line ─▶ command ─▶ answer
//	                   show:  one for each ─▶ the status, when it has changed
package console

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/background"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/system/machine"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/garboard-os/garboard/services/system/slots"
)

// ID is the log.
const ID = "console"

const (
	// activeFile has the names of the kernel's consoles (Documentation/ABI/testing/sysfs-tty).
	activeFile = "/sys/class/tty/console/active"
	// reopenPause is for a device that fails or goes away.
	reopenPause = 10 * time.Second
	// logLines and problemLines are how many lines `log` and `status` show.
	logLines     = 30
	problemLines = 5
	// logBytes is the size of the kernel's log on Debian's kernels (CONFIG_LOG_BUF_SHIFT is 17), twice.
	logBytes = 1 << 18
	// warning is the priority of warnings (syslog(3)).
	warning = 4
	// settlePause is what a status has to stay for to be shown by itself, and showPause is the shortest time between two.
	settlePause = 5 * time.Second
	showPause   = time.Minute
)

// Options are what the commands stand on.
type Options struct {
	Store   *resource.Store
	Log     *slog.Logger
	Waiting func() string              // what the node isn't up for
	Network func(n config.Network)     // settings for a machine without a configuration
	Signal  func(syscall.Signal) error // to PID 1

	kernelLog func() string // tests have their own
}

// Run serves all consoles until ctx ends.
func Run(ctx context.Context, o Options) {
	active, err := os.ReadFile(activeFile)
	if err != nil {
		o.Log.Warn("no commands at the console", "err", err)
		return
	}
	o.kernelLog = kernelLog
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, name := range strings.Fields(string(active)) {
		wg.Go(func() {
			for range sleep.Every(ctx, reopenPause) {
				// A device may come later, such as a serial line by USB. A defect here must not end PID 1.
				_ = dag.Guard(o.Log, func() error { return o.open(ctx, filepath.Join("/dev", name)) })
			}
		})
	}
}

// open serves one console until it fails or ctx ends.
func (o Options) open(ctx context.Context, path string) error {
	tty, err := os.OpenFile(path, os.O_RDWR|unix.O_NOCTTY|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer background.Start(ctx, func(ctx context.Context) {
		_ = dag.Guard(o.Log, func() error { return o.show(ctx, tty) })
	})()
	defer context.AfterFunc(ctx, func() { tty.Close() })()
	defer tty.Close()
	return o.serve(tty)
}

// show writes the status when it has changed. New problems alone are no reason: the console has shown them.
func (o Options) show(ctx context.Context, tty io.Writer) error {
	var seen, shown string
	var next time.Time
	for sleep.For(ctx, settlePause) {
		state, now := o.state(), time.Now()
		if state == seen && state != shown && now.After(next) && !o.disabled("status") {
			if _, err := io.WriteString(tty, strings.TrimSuffix(state+o.problems(), "\n")+"\n"); err != nil {
				return err
			}
			shown, next = state, now.Add(showPause)
		}
		seen = state
	}
	return nil
}

// serve answers each line that begins with a word of small letters. A device at the other end may send back what it gets: none of the
// answers is a command, and the answers to them come to an end.
func (o Options) serve(tty io.ReadWriter) error {
	lines := bufio.NewScanner(tty)
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		answer := help()
		if len(words) > 0 {
			if strings.Trim(words[0], "abcdefghijklmnopqrstuvwxyz") != "" {
				continue
			}
			answer = o.answer(words[0], words[1:])
		}
		if _, err := io.WriteString(tty, answer+"\n"); err != nil {
			return err
		}
	}
	return lines.Err()
}

// A command is a line: its name, and its arguments.
type command struct {
	name, arguments, help string
	run                   func(o Options, args []string) (string, error)
}

var commands = []command{
	{"status", "", "addresses, release, both slots, what the node waits for, and the last problems", Options.status},
	{"log", "", "the last lines of this console", Options.log},
	{"network", "INTERFACE[.VLAN] dhcp|ADDRESS/PREFIX [GATEWAY [DNS]]", "settings until the machine has a configuration; without arguments: DHCP on all interfaces", Options.network},
	{"reboot", "", "restart the machine, after its pods have moved where that is possible; again: at once", power("reboots", syscall.SIGINT)},
	{"shutdown", "", "power off in the same way", power("powers off", syscall.SIGTERM)},
}

func help() string {
	var b strings.Builder
	b.WriteString("Commands, each ended with Enter:\n")
	for _, c := range commands {
		fmt.Fprintf(&b, "> %s: %s\n", strings.TrimSpace(c.name+" "+c.arguments), c.help)
	}
	return strings.TrimSuffix(b.String(), "\n")
}

func (o Options) answer(name string, args []string) string {
	i := slices.IndexFunc(commands, func(c command) bool { return c.name == name })
	if i < 0 {
		return fmt.Sprintf("%q is no command: Enter lists them.", name)
	}
	if o.disabled(name) {
		return name + " is disabled by machine.console.disabled."
	}
	o.Log.Info("command at the console", "command", strings.Join(append([]string{name}, args...), " "))
	text, err := commands[i].run(o, args)
	if err != nil {
		return name + ": " + err.Error()
	}
	return text
}

func (o Options) disabled(name string) bool {
	cfg, err := machine.Config(o.Store)
	return err == nil && slices.Contains(cfg.Machine.Console.Disabled, config.ConsoleCommand(name))
}

func (o Options) status([]string) (string, error) {
	state := o.state()
	if waits := o.Waiting(); waits != "" {
		state += "not up yet  " + waits + "\n"
	}
	return strings.TrimSuffix(state+o.problems(), "\n"), nil
}

// state is the status without what the node waits for, which changes with each second, and without its problems.
func (o Options) state() string {
	var b strings.Builder
	fmt.Fprintf(&b, "Garboard %s", boot.Version)
	for _, s := range slots.Statuses.List(o.Store) {
		if s.Spec.Running {
			fmt.Fprintf(&b, " in slot %s, which is %s", s.ID, s.Spec.State)
		}
	}
	b.WriteString("\n")
	for _, s := range slots.Statuses.List(o.Store) {
		fmt.Fprintf(&b, "slot %s      %s\n", s.ID, slot(s.Spec))
	}
	if name, err := network.Hostnames.Get(o.Store, network.HostnameID); err == nil {
		fmt.Fprintf(&b, "name        %s\n", name.Spec)
	}
	if a, err := network.Addresses.Get(o.Store, network.AddressID); err == nil {
		for _, p := range a.Spec.All {
			fmt.Fprintf(&b, "address     %s\n", p)
		}
	}
	if stage, err := machine.Stages.Get(o.Store, machine.StageID); err == nil {
		up := ""
		if o.Waiting() == "" {
			up = ", all services are up"
		}
		fmt.Fprintf(&b, "stage       %s%s\n", stage.Spec, up)
	}
	if s, err := network.Statuses.Get(o.Store, network.ID); err == nil {
		for _, p := range s.Spec.Problems {
			fmt.Fprintf(&b, "problem     %s\n", p)
		}
	}
	if !o.configured() {
		lines := o.lines()
		if i := slices.IndexFunc(lines, func(l line) bool { return strings.Contains(l.text, "maintenance mode: ") }); i >= 0 {
			fmt.Fprintf(&b, "%s\n", lines[i].text)
		}
	}
	return b.String()
}

func (o Options) problems() string {
	return last(slices.DeleteFunc(o.lines(), func(l line) bool { return l.priority > warning }), problemLines)
}

// slot is what a slot has, and why.
func slot(s slots.Status) string {
	parts := []string{string(s.State), s.Version, s.SinceText(), s.Reason}
	if s.Next && !s.Running {
		parts[0] += " and boots next"
	}
	if parts[2] != "" {
		parts[2] = "since " + parts[2]
	}
	return strings.Join(slices.DeleteFunc(parts, func(p string) bool { return p == "" }), ", ")
}

func (o Options) log([]string) (string, error) { return last(o.lines(), logLines), nil }

func (o Options) configured() bool {
	_, err := machine.Config(o.Store)
	return err == nil
}

// A line of the kernel's log.
type line struct {
	priority int
	text     string
}

// lines are those that this system has written to the kernel's log, the newest first.
func (o Options) lines() (all []line) {
	for text := range strings.Lines(o.kernelLog()) {
		var priority int
		if _, err := fmt.Sscanf(text, "<%d>", &priority); err != nil {
			continue
		}
		if _, text, ours := strings.Cut(text, "[garboard] "); ours {
			all = append(all, line{priority & 7, strings.TrimSpace(text)})
		}
	}
	slices.Reverse(all)
	return all
}

// last are the newest lines, in their order.
func last(lines []line, most int) string {
	text := lists.Of(lines[:min(len(lines), most)], func(l line) string { return l.text })
	slices.Reverse(text)
	return strings.Join(text, "\n")
}

func kernelLog() string {
	buffer := make([]byte, logBytes)
	n, err := unix.Klogctl(unix.SYSLOG_ACTION_READ_ALL, buffer)
	if err != nil {
		return ""
	}
	return string(buffer[:n])
}

func power(what string, s syscall.Signal) func(Options, []string) (string, error) {
	return func(o Options, _ []string) (string, error) {
		return "The machine " + what + ".", o.Signal(s)
	}
}

func (o Options) network(args []string) (string, error) {
	if o.configured() {
		return "", fmt.Errorf("the machine has a configuration, and its network is part of that: gbctl edit mc")
	}
	n, err := settings(args)
	if err == nil {
		o.Network(n)
	}
	return "These settings count until the machine has a configuration, or restarts. `status` shows the addresses.", err
}
