package uml

import (
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// modulesDir is where Debian's package has the kernel's modules.
const modulesDir = "/usr/lib/uml/modules"

// loaded are the modules that the guest starts with: those that nearly every test uses, and
// those whose devices have to be there before anybody can ask for them. All others, bonding
// and 8021q among them, come when the kernel asks for them, as on a node (see Modprobe).
var loaded = []string{"ipv6", "veth", "bridge", "loop", "dm-mod", "tun"}

// modules are the kernel's, as depmod lists them.
type modules struct {
	dir   string
	files map[string][]string // by name: the module's file, then those of the modules that it needs
}

func readModules() (*modules, error) {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return nil, err
	}
	m := &modules{dir: filepath.Join(modulesDir, unix.ByteSliceToString(name.Release[:])), files: map[string][]string{}}
	list, err := os.ReadFile(filepath.Join(m.dir, "modules.dep"))
	if err != nil {
		return nil, err
	}
	for entry := range strings.Lines(string(list)) {
		file, needs, _ := strings.Cut(entry, ":")
		m.files[moduleName(file)] = append([]string{file}, strings.Fields(needs)...)
	}
	return m, nil
}

// moduleName is as the kernel writes it: files and people use either character.
func moduleName(file string) string {
	return strings.ReplaceAll(strings.TrimSuffix(path.Base(file), ".ko"), "-", "_")
}

// load inserts a module, after those that it needs. What isn't there as a file is built in,
// or isn't there: whoever needs it sees that.
func (m *modules) load(name string) error {
	files := m.files[moduleName(name)]
	for i := len(files) - 1; i >= 0; i-- {
		if err := insert(filepath.Join(m.dir, files[i])); err != nil {
			return err
		}
	}
	return nil
}

func insert(file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && !errors.Is(err, unix.EEXIST) {
		return &os.PathError{Op: "finit_module", Path: file, Err: err}
	}
	return nil
}

// aliased are the modules that answer to a name which the kernel asks for.
func (m *modules) aliased(name string) ([]string, error) {
	if _, is := m.files[moduleName(name)]; is {
		return []string{name}, nil
	}
	list, err := os.ReadFile(filepath.Join(m.dir, "modules.alias"))
	if err != nil {
		return nil, err
	}
	var found []string
	for entry := range strings.Lines(string(list)) {
		words := strings.Fields(entry) // alias PATTERN MODULE
		if len(words) != 3 || words[0] != "alias" {
			continue
		}
		if match, err := path.Match(words[1], name); err == nil && match {
			found = append(found, words[2])
		}
	}
	return found, nil
}

// Modprobe is the guest's modprobe(8), which the kernel calls as "modprobe -q -- NAME".
func Modprobe(args []string) error {
	if len(args) == 0 || !inside() {
		return fmt.Errorf("%s %q: a guest's kernel calls it, with a name", ModprobeCommand, args)
	}
	m, err := readModules()
	if err != nil {
		return err
	}
	name := args[len(args)-1]
	found, err := m.aliased(name)
	if err != nil {
		return err
	}
	if len(found) == 0 {
		return fmt.Errorf("no module %s in %s", name, m.dir)
	}
	for _, each := range found {
		if err := m.load(each); err != nil {
			return err
		}
	}
	return nil
}
