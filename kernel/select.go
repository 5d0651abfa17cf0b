package kernel

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Selection is the part of a kernel's module folder that an image takes.
type Selection struct {
	// Files are paths of modules relative to the module folder, sorted.
	Files []string
	// Builtin are the asked-for modules that need no file, sorted.
	Builtin []string

	from string
}

// Names gives back the names of the modules in the selection, sorted, as /proc/modules writes them.
func (s *Selection) Names() []string {
	names := make([]string, 0, len(s.Files))
	for _, file := range s.Files {
		names = append(names, moduleName(file))
	}
	slices.Sort(names)
	return names
}

// Select closes the table over the dependencies of its modules, as the indexes in modulesDir (a folder on which depmod
// ran) state them: hard ones always, soft ones where the kernel has them. All modules that the flavour owes and lacks
// are reported at once.
func Select(modulesDir string, flavour Flavour, table []Row) (*Selection, error) {
	index, err := readIndex(modulesDir)
	if err != nil {
		return nil, fmt.Errorf("select modules: %w", err)
	}
	s := &Selection{from: modulesDir}
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
			case index.builtin[name]:
				s.Builtin = append(s.Builtin, name)
			case !row.Optional:
				missing = append(missing, fmt.Errorf("%s: neither a module nor built in (wanted for: %s)", name, row.Why))
			}
		}
	}
	if len(missing) > 0 {
		return nil, fmt.Errorf("select modules of %s for %s: %w", filepath.Base(modulesDir), flavour, errors.Join(missing...))
	}
	s.Files = slices.Sorted(maps.Keys(taken))
	slices.Sort(s.Builtin)
	s.Builtin = slices.Compact(s.Builtin)
	return s, nil
}

// copyTo writes the selected modules, decompressed, and the lists that depmod reads, to a new module folder.
func (s *Selection) copyTo(dir string) error {
	for _, file := range s.Files {
		plain := strings.TrimSuffix(strings.TrimSuffix(file, ".xz"), ".zst")
		if err := copyModule(filepath.Join(s.from, file), filepath.Join(dir, plain)); err != nil {
			return fmt.Errorf("copy module %s: %w", file, err)
		}
	}
	for _, name := range []string{"modules.builtin", "modules.builtin.modinfo"} {
		data, err := os.ReadFile(filepath.Join(s.from, name))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
			return err
		}
	}
	return s.copyOrder(dir)
}

// copyOrder writes the lines of modules.order whose modules are selected; the order decides which of two drivers for
// one device comes first. Kernels name the modules .o in it (6.12) or .ko.
func (s *Selection) copyOrder(dir string) error {
	data, err := os.ReadFile(filepath.Join(s.from, "modules.order"))
	if err != nil {
		return err
	}
	selected := s.Names()
	var kept strings.Builder
	for line := range strings.Lines(string(data)) {
		if slices.Contains(selected, moduleName(strings.TrimSpace(line))) {
			kept.WriteString(line)
		}
	}
	return os.WriteFile(filepath.Join(dir, "modules.order"), []byte(kept.String()), 0o644)
}

func copyModule(from, to string) error {
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	plain, err := decompressor(from, in)
	if err != nil {
		return err
	}
	defer plain.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, plain); err != nil {
		out.Close()
		return err
	}
	return out.Close()
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
