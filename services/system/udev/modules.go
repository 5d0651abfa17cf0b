package udev

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/lists"
	"golang.org/x/sys/unix"
)

// ErrNoModule is the error of Load for a name that the kernel has neither as a
// module nor built in.
var ErrNoModule = errors.New("no such module")

// Modules is a kernel's module folder, as depmod(8) made it: the modules, their
// dependencies, and the devices that they drive. It is safe for concurrent use.
type Modules struct {
	dir     string
	aliases aliases

	insert func(path, parameters string) error // finit_module(2), or a test's

	mu  sync.Mutex // guards all
	all map[string]*module
}

// module is what is known of one.
type module struct {
	path       string   // below the folder; "": there is no file
	builtin    bool     // into the kernel
	needs      []string // hard dependencies, complete, the nearest first
	before     []string // soft dependencies to be loaded first
	after      []string // and afterwards
	parameters string   // on the kernel's command line

	mu     sync.Mutex // held while it is inserted; guards all below. Several devices may wait for it
	loaded bool
	had    bool // the kernel had it already
}

// of is the module of that name, also of one that there isn't.
func (m *Modules) of(name string) *module {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.all[name] == nil {
		m.all[name] = &module{}
	}
	return m.all[name]
}

// ModulesDir is the module folder of the running kernel.
func ModulesDir() (string, error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "", fmt.Errorf("uname: %w", err)
	}
	return filepath.Join("/lib/modules", unix.ByteSliceToString(u.Release[:])), nil
}

// RunningModules opens the modules of the running kernel, below a root file system.
func RunningModules(root string) (*Modules, error) {
	dir, err := ModulesDir()
	if err != nil {
		return nil, err
	}
	return OpenModules(filepath.Join(root, dir))
}

// OpenModules reads the indexes of a module folder. modules.dep is required;
// other missing files count as empty.
func OpenModules(dir string) (*Modules, error) {
	m := newModules(dir)
	text, err := os.ReadFile(filepath.Join(dir, "modules.dep"))
	if err != nil {
		return nil, fmt.Errorf("open modules: %w", err)
	}
	m.parseDep(string(text))
	var alias string
	for name, parse := range map[string]func(string){
		"modules.softdep": m.parseSoftdep,
		"modules.builtin": func(text string) {
			for line := range strings.Lines(text) {
				m.of(nameOf(strings.TrimSpace(line))).builtin = true
			}
		},
		"modules.alias": func(text string) { alias = text },
	} {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if boot.IgnoreMissing(err) != nil {
			return nil, fmt.Errorf("open modules: %w", err)
		}
		parse(string(text))
	}
	m.aliases = parseAliases(alias)
	line, err := os.ReadFile(procCmdline)
	if err != nil {
		return nil, fmt.Errorf("open modules: %w", err)
	}
	m.Parameters(boot.ParseCmdline(string(line)))
	return m, nil
}

// procCmdline is the kernel's command line.
const procCmdline = "/proc/cmdline"

// Parameters adds the parameters of modules that are on the kernel's command line, as MODULE.NAME=VALUE. The kernel
// itself takes only those of modules that are built in (Documentation/admin-guide/kernel-parameters.rst).
func (m *Modules) Parameters(line boot.Cmdline) {
	for _, p := range line.Params {
		module, name, ok := strings.Cut(p.Key, ".")
		if !ok || module == "" || name == "" {
			continue
		}
		m.of(canonical(module)).parameters += boot.Param{Key: name, Value: p.Value}.String() + " "
	}
}

func newModules(dir string) *Modules {
	return &Modules{dir: dir, insert: insertModule, all: map[string]*module{}}
}

// parseDep reads lines "path: path path …".
func (m *Modules) parseDep(text string) {
	for line := range strings.Lines(text) {
		path, deps, ok := strings.Cut(strings.TrimSpace(line), ":")
		if !ok {
			continue
		}
		mod := m.of(nameOf(path))
		mod.path, mod.needs = path, lists.Of(strings.Fields(deps), nameOf)
	}
}

// parseSoftdep reads lines "softdep name pre: a b post: c" (modprobe.d(5)).
func (m *Modules) parseSoftdep(text string) {
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) < 3 || fields[0] != "softdep" {
			continue
		}
		mod := m.of(canonical(fields[1]))
		into := &mod.before
		for _, f := range fields[2:] {
			switch f {
			case "pre:":
				into = &mod.before
			case "post:":
				into = &mod.after
			default:
				*into = append(*into, canonical(f))
			}
		}
	}
}

// Load loads a module and its dependencies. A module that is loaded already, or
// built in, is no error.
func (m *Modules) Load(name string) error { return m.load(canonical(name), nil) }

// LoadFor loads all modules for a device with this modalias, and returns their
// names. A module that doesn't find its device is no error.
func (m *Modules) LoadFor(modalias string) (loaded []string, err error) {
	for _, name := range m.aliases.match(modalias) {
		switch e := m.Load(name); {
		case e == nil:
			loaded = append(loaded, name)
		case errors.Is(e, unix.ENODEV):
		default:
			err = errors.Join(err, fmt.Errorf("device %s: %w", modalias, e))
		}
	}
	return loaded, err
}

// load is Load; chain has the modules that led to this call, so that a circle
// of soft dependencies ends.
func (m *Modules) load(name string, chain []string) error {
	mod := m.of(name)
	switch {
	case mod.path == "" && !mod.builtin:
		return fmt.Errorf("load module %s: %w", name, ErrNoModule)
	case mod.path == "" || slices.Contains(chain, name):
		return nil
	}
	chain = append(chain[:len(chain):len(chain)], name)
	// modules.dep lists the nearest dependency first, and its own dependencies later.
	for _, need := range slices.Backward(mod.needs) {
		if err := m.loadOne(need, chain); err != nil {
			return fmt.Errorf("load module %s: %w", name, err)
		}
	}
	return m.loadOne(name, chain)
}

// loadOne loads a module whose hard dependencies are loaded. While it waits for another
// goroutine that loads the same module, it holds no lock that the other one needs.
func (m *Modules) loadOne(name string, chain []string) error {
	mod := m.of(name)
	mod.mu.Lock()
	loaded := mod.loaded
	mod.mu.Unlock()
	if loaded {
		return nil
	}
	for _, soft := range mod.before {
		m.loadSoft(soft, chain)
	}
	first, err := m.insertOnce(mod)
	if err != nil {
		return fmt.Errorf("load module %s: %w", name, err)
	}
	if first {
		for _, soft := range mod.after {
			m.loadSoft(soft, chain)
		}
	}
	return nil
}

// insertOnce inserts a module, unless that has succeeded before: the device of one that failed may be added later.
func (m *Modules) insertOnce(mod *module) (first bool, err error) {
	mod.mu.Lock()
	defer mod.mu.Unlock()
	if mod.loaded {
		return false, nil
	}
	err = m.insert(filepath.Join(m.dir, mod.path), strings.TrimSpace(mod.parameters))
	if mod.had = errors.Is(err, unix.EEXIST); mod.had {
		err = nil
	}
	mod.loaded = err == nil
	return true, err
}

// loadSoft loads a soft dependency: a name or an alias. It is no error if there
// is no such module (modprobe.d(5)).
func (m *Modules) loadSoft(name string, chain []string) {
	if m.of(name).path != "" {
		m.load(name, chain)
		return
	}
	for _, module := range m.aliases.match(name) {
		m.load(module, chain)
	}
}

// insertModule is finit_module(2). The image holds modules uncompressed.
func insertModule(path, parameters string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.FinitModule(int(f.Fd()), parameters, 0)
}

// hadBefore tells of a module that Load has loaded whether the kernel had it already.
func (mod *module) hadBefore() bool {
	mod.mu.Lock()
	defer mod.mu.Unlock()
	return mod.had
}

// nameOf turns kernel/net/8021q/8021q.ko into 8021q.
func nameOf(path string) string {
	base, _, _ := strings.Cut(filepath.Base(path), ".")
	return canonical(base)
}

// canonical returns a module's name as the kernel spells it: file names have
// both dashes and underscores.
func canonical(name string) string { return strings.ReplaceAll(name, "-", "_") }
