// Package console takes commands at the machine's own screen and keyboard, and at its serial lines. They need no
// credentials: a person at the machine can press its power button, too. They show what the node does, restart it, and
// give a machine without a configuration its first network settings. None of them shows a secret or changes a
// configuration.
//
//	kernel consoles ─▶ serve: one for each ─▶ line ─▶ command ─▶ answer
//	                   show:  one for each ─▶ the status, when it says something else
package console

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/background"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/slots"
)

// ID is the log.
const ID = "console"

const (
	// activeFile has the names of the kernel's consoles (Documentation/ABI/testing/sysfs-tty).
	activeFile = "/sys/class/tty/console/active"
	// reopenPause is for a device that fails or goes away.
	reopenPause = 10 * time.Second
	// logLines is how many lines `log` shows.
	logLines = 30
	// logBytes is the size of the kernel's log on Debian's kernels (CONFIG_LOG_BUF_SHIFT is 17), twice.
	logBytes = 1 << 18
)

// Options are what the commands and the status stand on.
type Options struct {
	Store *resource.Store
	Log   *slog.Logger
	// Waiting are the services that aren't up, by their names, each with what it waits for.
	Waiting func() []string
	// Problems are what is wrong with the node as far as it knows by itself, the worst first.
	Problems func() []*garboardv1.Finding
	// Fingerprint is that of the certificate that a person has to compare; "": there is none.
	Fingerprint func() string
	// Ending is whether the node stops.
	Ending func() bool

	Network func(n config.Network)     // settings for a machine without a configuration
	Signal  func(syscall.Signal) error // to PID 1
	Unlock  func(key string) error     // the disk, with its recovery key
	Wipe    func(device string) error  // the locked disk

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
	t, err := openTerminal(path)
	if err != nil {
		return err
	}
	defer background.Start(ctx, func(ctx context.Context) {
		_ = dag.Guard(o.Log, func() error { return o.show(ctx, t) })
	})()
	defer context.AfterFunc(ctx, t.close)()
	defer t.close()
	return o.serve(t)
}

// serve answers each line that begins with a word of small letters. A device at the other end may send back what it
// gets: none of the answers is a command, and the answers to them come to an end.
func (o Options) serve(t *terminal) error {
	lines := bufio.NewScanner(t)
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		answer := help()
		if len(words) > 0 {
			if strings.Trim(words[0], "abcdefghijklmnopqrstuvwxyz") != "" || !strings.HasPrefix(lines.Text(), words[0]) {
				continue // the status goes on with blanks
			}
			answer = o.answer(words[0], words[1:], func(prompt string) string { return t.ask(lines, prompt) })
		}
		if err := t.answer(answer + "\n"); err != nil {
			return err
		}
	}
	return lines.Err()
}

// A command is a line: its name, and its arguments.
type command struct {
	name, arguments, help string
	run                   func(o Options, args []string) (string, error)
	// secret asks for the one argument, which is neither shown nor logged. Another machine's console doesn't answer it.
	secret string
}

var commands = []command{
	{"status", "", "name, addresses, state, problems, what to do next, and both slots", Options.status, ""},
	{"log", "", "the last lines of this console", Options.log, ""},
	{"network", "INTERFACE[.VLAN] dhcp|ADDRESS/PREFIX [GATEWAY [DNS]]", "settings until the machine has a configuration; without arguments: DHCP on all interfaces", Options.network, ""},
	{"unlock", "", "open the disk with its recovery key, where no other key opens it", Options.unlock, "Type the recovery key, and Enter. It isn't shown."},
	{"wipe", "", "wipe the disk that no key opens, for good", Options.wipe, "All data of the locked disk is lost for good. Type the name of its device, and Enter. It isn't shown."},
	{"reboot", "", "restart the machine, after its pods have moved where that is possible; again: at once", power("reboots", syscall.SIGINT), ""},
	{"shutdown", "", "power off in the same way", power("powers off", syscall.SIGTERM), ""},
}

func help() string {
	var b strings.Builder
	b.WriteString("Commands, each ended with Enter:\n")
	for _, c := range commands {
		fmt.Fprintf(&b, "> %s: %s\n", strings.TrimSpace(c.name+" "+c.arguments), c.help)
	}
	return strings.TrimSuffix(b.String(), "\n")
}

func (o Options) answer(name string, args []string, ask func(prompt string) string) string {
	i := slices.IndexFunc(commands, func(c command) bool { return c.name == name })
	if i < 0 {
		return fmt.Sprintf("%q is no command: Enter lists them.", name)
	}
	if o.disabled(name) {
		return name + " is disabled by machine.console.disabled."
	}
	prompt := commands[i].secret
	if prompt != "" {
		args = nil
	}
	o.Log.Info("command at the console", "command", strings.Join(append([]string{name}, args...), " "))
	if prompt != "" {
		args = []string{ask(prompt)}
	}
	text, err := commands[i].run(o, args)
	if err != nil {
		return name + ": " + err.Error()
	}
	return text
}

func (o Options) disabled(name string) bool {
	cfg, err := configuration.Config(o.Store)
	return err == nil && slices.Contains(cfg.Machine.Console.Disabled, config.ConsoleCommand(name))
}

func (o Options) status([]string) (string, error) {
	lines := o.lines(o.Waiting(), o.Problems())
	for _, s := range slots.Statuses.List(o.Store) {
		lines = append(lines, fmt.Sprintf("%-*s%s", labelWidth, "slot "+s.ID, slot(s.Spec)))
	}
	return strings.Join(lines, "\n"), nil
}

// slot is what a slot has, and why.
func slot(s slots.Status) string {
	parts := []string{string(s.State), s.Version, resource.Cell(s.Since), s.Reason}
	if s.Next && !s.Running {
		parts[0] += " and boots next"
	}
	if parts[2] != "" {
		parts[2] = "since " + parts[2]
	}
	return strings.Join(slices.DeleteFunc(parts, func(p string) bool { return p == "" }), ", ")
}

func (o Options) configured() bool {
	_, err := configuration.Config(o.Store)
	return err == nil
}

// log shows the last lines that this system has written to the kernel's log.
func (o Options) log([]string) (string, error) {
	var ours []string
	for text := range strings.Lines(o.kernelLog()) {
		if _, text, ok := strings.Cut(text, "[garboard] "); ok {
			ours = append(ours, strings.TrimSpace(text))
		}
	}
	return strings.Join(ours[max(0, len(ours)-logLines):], "\n"), nil
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

func (o Options) unlock(args []string) (string, error) {
	key, err := api.ParseRecoveryKey(args[0])
	if err == nil {
		err = o.Unlock(key)
	}
	return "The disk is unlocked, and the boot goes on.", err
}

func (o Options) wipe(args []string) (string, error) {
	return "The disk is wiped, and the machine waits for a configuration then.", o.Wipe(strings.TrimSpace(args[0]))
}
