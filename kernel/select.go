package kernel

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Select closes the table over the dependencies of its modules, as the indexes in modulesDir (a folder on which depmod
// ran) state them: hard ones always, soft ones where the kernel has them. All modules that the flavour owes and lacks
// are reported at once. The result are paths relative to the folder, sorted.
func Select(modulesDir string, flavour Flavour, table []Row) ([]string, error) {
	index, err := readIndex(modulesDir)
	if err != nil {
		return nil, fmt.Errorf("select modules: %w", err)
	}
	taken := make(map[string]bool)
	var missing []error
	var take func(name string)
	take = func(name string) {
		file, ok := index.files[name]
		if !ok || taken[file] {
			return
		}
		taken[file] = true
		for _, dep := range index.needs[name] {
			take(dep)
		}
	}
	for _, row := range table {
		if row.Only != "" && row.Only != flavour {
			continue
		}
		for _, name := range strings.Fields(row.Names) {
			switch {
			case index.files[name] != "":
				take(name)
			case !index.builtin[name] && !row.Optional:
				missing = append(missing, fmt.Errorf("%s: neither a module nor built in (wanted for: %s)", name, row.Why))
			}
		}
	}
	if len(missing) > 0 {
		return nil, fmt.Errorf("select modules of %s for %s: %w", filepath.Base(modulesDir), flavour, errors.Join(missing...))
	}
	return slices.Sorted(maps.Keys(taken)), nil
}

// copyModules writes modules, decompressed, and the lists that depmod reads, from a module folder to a new one.
func copyModules(files []string, from, to string) error {
	for _, file := range files {
		if err := copyModule(file, from, to); err != nil {
			return fmt.Errorf("copy module %s: %w", file, err)
		}
	}
	for _, name := range []string{"modules.builtin", "modules.builtin.modinfo"} {
		data, err := os.ReadFile(filepath.Join(from, name))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(to, name), data, 0o644); err != nil {
			return err
		}
	}
	return copyOrder(files, from, to)
}

// copyOrder writes the lines of modules.order whose modules are there; the order decides which of two drivers for one
// device comes first. Kernels name the modules .o in it (6.12) or .ko.
func copyOrder(files []string, from, to string) error {
	data, err := os.ReadFile(filepath.Join(from, "modules.order"))
	if err != nil {
		return err
	}
	selected := map[string]bool{}
	for _, file := range files {
		selected[moduleName(file)] = true
	}
	var kept strings.Builder
	for line := range strings.Lines(string(data)) {
		if selected[moduleName(strings.TrimSpace(line))] {
			kept.WriteString(line)
		}
	}
	return os.WriteFile(filepath.Join(to, "modules.order"), []byte(kept.String()), 0o644)
}

func copyModule(file, from, to string) error {
	in, err := os.Open(filepath.Join(from, file))
	if err != nil {
		return err
	}
	defer in.Close()
	name, plain, err := PlainModule(file, in)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(filepath.Join(to, name)), 0o755); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(to, name), plain, 0o644)
}

// index is what depmod and the kernel's build know about a kernel's modules, by name.
type index struct {
	files   map[string]string   // path relative to the module folder
	needs   map[string][]string // hard and soft dependencies
	builtin map[string]bool
}

func readIndex(dir string) (*index, error) {
	x := &index{files: map[string]string{}, needs: map[string][]string{}, builtin: map[string]bool{}}
	// modules.dep: "path: path path …", the dependencies complete (modules.dep(5)).
	err := eachLine(filepath.Join(dir, "modules.dep"), func(line string) {
		file, deps, _ := strings.Cut(line, ":")
		name := moduleName(file)
		x.files[name] = file
		for _, dep := range strings.Fields(deps) {
			x.needs[name] = append(x.needs[name], moduleName(dep))
		}
	})
	if err != nil {
		return nil, err
	}
	// modules.softdep: "softdep name pre: name … post: name …" (modprobe.d(5)). Names may also be aliases, which are
	// nobody's file.
	err = eachLine(filepath.Join(dir, "modules.softdep"), func(line string) {
		fields := strings.Fields(line)
		if len(fields) < 3 || fields[0] != "softdep" {
			return
		}
		name := canonical(fields[1])
		for _, dep := range fields[2:] {
			if !strings.HasSuffix(dep, ":") {
				x.needs[name] = append(x.needs[name], canonical(dep))
			}
		}
	})
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	err = eachLine(filepath.Join(dir, "modules.builtin"), func(line string) { x.builtin[moduleName(line)] = true })
	return x, err
}

func eachLine(path string, do func(string)) error {
	text, err := os.ReadFile(path)
	for line := range strings.Lines(string(text)) {
		if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
			do(line)
		}
	}
	return err
}

// moduleName turns kernel/net/8021q/8021q.ko.xz into 8021q.
func moduleName(path string) string {
	base, _, _ := strings.Cut(filepath.Base(path), ".")
	return canonical(base)
}

// canonical writes a module's name as the kernel does: file names mix dashes and underscores, which mean the same.
func canonical(name string) string { return strings.ReplaceAll(name, "-", "_") }
