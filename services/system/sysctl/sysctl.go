// Package sysctl sets the kernel parameters of machine.sysctls, and the settings of machine.sysfs, which are files in
// the same way.
//
// There is a controller for each. Before it sets a parameter for the first time it notes
// the value that is there, be it the kernel's or our own from boot; a parameter
// that leaves the configuration goes back to it. A kernel may lack a parameter,
// or get it only with a module or a link, and it may refuse a value: that is said
// once and tried again, and never fails the node. Others write parameters too
// (the kubelet does at its start), so they are looked at from time to time.
package sysctl

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
	"golang.org/x/sys/unix"
)

const (
	// checkEvery is how often parameters are compared with the configuration: soon
	// enough after a module brought one or a program changed one.
	checkEvery = 30 * time.Second
	// maxValue is what the kernel takes at most in one write: a page.
	maxValue = 4096
	// reservedPorts are what the kernel doesn't give to connections. What init has
	// reserved for the node's own servers stays so beside what is configured: apid
	// couldn't listen while a connection has its port.
	reservedPorts = "net/ipv4/ip_local_reserved_ports"
)

// Status is one parameter of the configuration; its ID is the name there.
type Status struct {
	Value   string `yaml:"value" column:"VALUE"`     // what the kernel has now
	Default string `yaml:"default" column:"DEFAULT"` // what it had before
	Problem string `yaml:"problem,omitempty" column:"PROBLEM"`
}

// Statuses has an object for each parameter of machine.sysctls.
var Statuses = resource.Define[Status](resource.Definition{
	Type: "SysctlStatuses.runtime.garboard.dev", Kind: "SysctlStatus", Aliases: []string{"sysctls", "sysctl"}, Namespace: "runtime",
})

// SysfsStatuses has an object for each setting of machine.sysfs.
var SysfsStatuses = resource.Define[Status](resource.Definition{
	Type: "SysfsStatuses.runtime.garboard.dev", Kind: "SysfsStatus", Aliases: []string{"sysfs"}, Namespace: "runtime",
})

// files are the parameters of one field of the configuration.
type files struct {
	controls string // the name of the controller
	root     string // tests have their own
	field    string
	wanted   func(*config.Config) map[string]string
	path     func(name string) string
	statuses *resource.Kind[Status]
	// own says which ones a container has for itself.
	own func(path string) bool
}

var (
	procSys = files{"runtime.SysctlController", "/proc/sys", "machine.sysctls", func(c *config.Config) map[string]string { return c.Machine.Sysctls }, config.SysctlPath, Statuses, own}
	sysfs   = files{"runtime.SysfsController", "/sys", "machine.sysfs", func(c *config.Config) map[string]string { return c.Machine.Sysfs }, func(name string) string { return name }, SysfsStatuses, func(string) bool { return false }}
)

// parameters are what the controller looks after.
type parameters struct {
	files
	mode boot.Mode
	// set is what this boot's configurations have set, by path below root. Only
	// makeSo uses it.
	set map[string]*parameter
}

// parameter is one that was set, or is to be.
type parameter struct {
	name   string // as in the configuration
	before string // its value before us
	known  bool   // whether before is known: some can't be read
	wrote  string // what was last written, "" for nothing
	after  string // what the kernel made of it
	logged string // the problem that was logged last
}

// Controllers make the parameters, and the settings below /sys, what the configuration says.
func Controllers(mode boot.Mode) []resource.Controller {
	return []resource.Controller{procSys.controller(mode), sysfs.controller(mode)}
}

func (f files) controller(mode boot.Mode) resource.Controller {
	return resource.Controller{
		Name: f.controls, Reconcile: (&parameters{files: f, mode: mode, set: map[string]*parameter{}}).makeSo,
		Inputs:  []resource.Input{{Type: configuration.Configs.Type(), ID: configuration.ConfigID}},
		Outputs: []string{f.statuses.Type()},
	}
}

func (c *parameters) makeSo(_ context.Context, v resource.View) (time.Duration, error) {
	wanted, err := configuration.Wanted(v, c.wanted)
	if err != nil {
		return 0, err
	}
	names := map[string]string{} // by path: the last of those that mean one parameter
	for _, name := range slices.Sorted(maps.Keys(wanted)) {
		names[c.path(name)] = name
	}
	c.restore(names, v.Log())

	statuses := map[string]Status{}
	for _, name := range slices.Sorted(maps.Keys(wanted)) {
		if other := names[c.path(name)]; other != name {
			statuses[name] = Status{Problem: "is the same parameter as " + other}
		} else {
			statuses[name] = c.apply(name, wanted[name], v.Log())
		}
	}
	if err := c.statuses.Replace(v, statuses); err != nil || len(c.set) == 0 {
		return 0, err
	}
	return checkEvery, nil
}

// restore gives back what isn't configured any more, last first: a parameter of
// one link may have been set after that of all.
func (c *parameters) restore(names map[string]string, log *slog.Logger) {
	for _, path := range slices.Backward(slices.Sorted(maps.Keys(c.set))) {
		p := c.set[path]
		switch {
		case names[path] != "":
			continue
		case p.wrote == "":
		case !p.known:
			log.Warn(fmt.Sprintf("%s isn't configured any more, and what it was before can't be read: it stays until the next boot", p.name))
		default:
			_, err := c.write(path, p.before)
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				c.warnOnce(p, log, fmt.Sprintf("give %s back its value %q: %s", p.name, p.before, why(err)))
				continue
			}
			if err == nil {
				log.Info(fmt.Sprintf("%s is %s again: it isn't configured any more", p.name, p.before))
			}
		}
		delete(c.set, path)
	}
}

// apply sets one parameter unless it has its value already.
func (c *parameters) apply(name, value string, log *slog.Logger) Status {
	path := c.path(name)
	p := c.set[path]
	if p == nil {
		p = &parameter{}
		c.set[path] = p
	}
	p.name = name
	problem := c.reconcile(path, p, value, log)
	if problem != "" {
		c.warnOnce(p, log, name+": "+problem)
	} else {
		p.logged = ""
	}
	return Status{Value: p.after, Default: p.before, Problem: problem}
}

// reconcile returns why the parameter isn't what it is to be, or "".
func (c *parameters) reconcile(path string, p *parameter, value string, log *slog.Logger) (problem string) {
	switch {
	case !filepath.IsLocal(path):
		return "is not the name of a kernel parameter"
	case c.mode == boot.Container && !c.own(path):
		return "belongs to the host of this container, and is set there"
	case len(value) > maxValue:
		return fmt.Sprintf("the value has %d bytes, and the kernel takes %d", len(value), maxValue)
	}
	now, err := c.read(path)
	if err == nil && p.wrote == "" {
		p.before, p.known = now, true
	}
	if path == reservedPorts {
		value = strings.Trim(p.before+","+value, ",")
	}
	switch {
	case errors.Is(err, fs.ErrPermission): // it can only be written, and to do so each time would be an act
		if p.wrote == value {
			return ""
		}
	case err != nil:
		p.after = ""
		return why(err)
	case p.wrote == "":
	case p.wrote == value && p.after == now:
		return ""
	case p.after != now && p.after != "":
		log.Info(fmt.Sprintf("%s was changed to %q by another program; setting it to %q", p.name, now, value))
	}
	if p.after = now; p.wrote == "" && slices.Equal(strings.Fields(now), strings.Fields(value)) {
		p.wrote = value
		return ""
	}
	after, err := c.write(path, value)
	if err != nil {
		return fmt.Sprintf("the kernel refuses the value %q: %s", value, why(err))
	}
	p.wrote, p.after = value, after
	log.Info(fmt.Sprintf("%s = %s (before: %s)", p.name, value, p.before))
	return ""
}

func (c *parameters) read(path string) (string, error) {
	data, err := os.ReadFile(filepath.Join(c.root, path))
	text := strings.TrimRight(string(data), "\n")
	if m := choice.FindStringSubmatch(text); m != nil {
		text = m[1]
	}
	return text, err
}

// choice is what a file in /sys says that has a choice: all values, and the chosen one in brackets.
var choice = regexp.MustCompile(`^(?:[^\[\]]* )?\[([^\[\] ]+)\](?: [^\[\]]*)?$`)

// write returns what the kernel made of the value: it may round it, or separate
// its parts by tabs.
func (c *parameters) write(path, value string) (after string, err error) {
	f, err := os.OpenFile(filepath.Join(c.root, path), os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return "", err
	}
	// In one write: the kernel takes each as a value of its own.
	_, err = f.WriteString(value + "\n")
	if err := errors.Join(err, f.Close()); err != nil {
		return "", err
	}
	after, err = c.read(path)
	if errors.Is(err, fs.ErrPermission) {
		return value, nil
	}
	return after, err
}

// warnOnce logs each problem once.
func (c *parameters) warnOnce(p *parameter, log *slog.Logger, problem string) {
	if p.logged != problem {
		log.Warn(c.field + ": " + problem)
	}
	p.logged = problem
}

// why is the reason without the path, which the name says already.
func why(err error) string {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "there is no such parameter; it is set as soon as a module, a device or a link brings it"
	case errors.Is(err, unix.EROFS):
		return "it can't be written here"
	}
	if path, ok := errors.AsType[*fs.PathError](err); ok {
		return path.Err.Error()
	}
	return err.Error()
}

// ownParameters are those of a container's own namespaces: network and IPC
// (namespaces(7)). All others are the host's.
var ownParameters = []string{"net/", "fs/mqueue/", "kernel/msg", "kernel/sem", "kernel/shm", "kernel/domainname"}

func own(path string) bool {
	return slices.ContainsFunc(ownParameters, func(prefix string) bool { return strings.HasPrefix(path, prefix) })
}
