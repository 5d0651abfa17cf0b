package kernel

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
)

// described is what a module says about itself, in the section .modinfo.
type described struct {
	file, name string
	order      int // in modules.order
	needs      []string
	aliases    []string
	soft       []string
}

// Index makes the indexes of a module folder (modules.dep(5), depmod(8)), by the name of the file. Files are all paths
// in the folder. It refuses modules that need one that isn't there. The binary indexes are for modprobe in containers
// that mount /lib/modules.
func Index(files []string, read func(name string) ([]byte, error)) (map[string][]byte, error) {
	all, err := describe(files, read)
	if err != nil {
		return nil, err
	}
	builtin, err := builtinNames(read)
	if err != nil {
		return nil, err
	}
	byName := map[string]*described{}
	for _, m := range all {
		byName[m.name] = m
	}
	var dep, alias, soft, nodes strings.Builder
	var depKeys, aliasKeys, builtinKeys, builtinAliases keys
	alias.WriteString("# Names of modules, from the modules themselves.\n")
	for _, m := range all {
		order, err := m.closure(byName, builtin)
		if err != nil {
			return nil, err
		}
		line := m.file + ":"
		for _, need := range order {
			line += " " + byName[need].file
		}
		dep.WriteString(line + "\n")
		depKeys.add(m.name, line, m.order)
		for _, a := range m.aliases {
			fmt.Fprintf(&alias, "alias %s %s\n", a, m.name)
			aliasKeys.add(normal(a), m.name, m.order)
		}
		if node, ok := m.node(); ok {
			nodes.WriteString(node + "\n")
		}
		for _, s := range m.soft {
			fmt.Fprintf(&soft, "softdep %s %s\n", m.name, s)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(builtin)) {
		builtinKeys.add(name, "", 0)
	}
	result := map[string][]byte{
		"modules.dep": []byte(dep.String()), "modules.alias": []byte(alias.String()), "modules.softdep": []byte(soft.String()),
		"modules.devname": []byte(nodes.String()),
		"modules.dep.bin": depKeys.index(), "modules.alias.bin": aliasKeys.index(), "modules.builtin.bin": builtinKeys.index(),
	}
	// Without this list, the index of the kernel's own names stays as it is.
	said, err := optional(read, "modules.builtin.modinfo")
	if err != nil || said == nil {
		return result, err
	}
	for field := range bytes.SplitSeq(said, []byte{0}) { // NAME.alias=…
		if name, value, ok := strings.Cut(string(field), ".alias="); ok {
			builtinAliases.add(normal(value), canonical(name), 0)
		}
	}
	result["modules.builtin.alias.bin"] = builtinAliases.index()
	return result, nil
}

func optional(read func(string) ([]byte, error), name string) ([]byte, error) {
	data, err := read(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return data, err
}

func builtinNames(read func(string) ([]byte, error)) (map[string]bool, error) {
	data, err := optional(read, "modules.builtin")
	names := map[string]bool{}
	for line := range strings.Lines(string(data)) {
		names[moduleName(strings.TrimSpace(line))] = true
	}
	return names, err
}

// describe reads the modules, in the order in which the kernel's build lists them. Those that it doesn't list come
// last.
func describe(files []string, read func(string) ([]byte, error)) ([]*described, error) {
	list, err := optional(read, "modules.order")
	if err != nil {
		return nil, err
	}
	order := map[string]int{}
	for line := range strings.Lines(string(list)) {
		order[moduleName(strings.TrimSpace(line))] = len(order)
	}
	var all []*described
	for _, file := range files {
		if path.Ext(file) != ".ko" {
			continue
		}
		content, err := read(file)
		if err != nil {
			return nil, err
		}
		m, err := describeModule(file, content)
		if err != nil {
			return nil, fmt.Errorf("module %s: %w", file, err)
		}
		place, listed := order[m.name]
		if m.order = place; !listed {
			m.order = len(order)
		}
		all = append(all, m)
	}
	all = preferred(all)
	slices.SortStableFunc(all, func(a, b *described) int {
		if a.order != b.order {
			return a.order - b.order
		}
		return strings.Compare(a.file, b.file)
	})
	return all, nil
}

// preferred keeps one file for each module: an update, or else one from elsewhere, and not that of the kernel
// (depmod.d(5): search).
func preferred(all []*described) []*described {
	rank := func(m *described) int {
		top, _, _ := strings.Cut(m.file, "/")
		return map[string]int{"kernel": -1, "updates": 1}[top]
	}
	best := map[string]*described{}
	for _, m := range all {
		if b := best[m.name]; b == nil || rank(m) > rank(b) {
			best[m.name] = m
		}
	}
	return slices.DeleteFunc(all, func(m *described) bool { return best[m.name] != m })
}

// modinfo reads the fields of a module, as KEY=VALUE.
func modinfo(content []byte) ([]string, error) {
	file, err := elf.NewFile(bytes.NewReader(content))
	if err != nil {
		return nil, err
	}
	section := file.Section(".modinfo")
	if section == nil {
		return nil, errors.New("it is no module: it has no section .modinfo")
	}
	data, err := section.Data()
	return strings.Split(string(data), "\x00"), err
}

func describeModule(file string, content []byte) (*described, error) {
	fields, err := modinfo(content)
	if err != nil {
		return nil, err
	}
	m := &described{file: file, name: moduleName(file)}
	for _, field := range fields {
		key, value, _ := strings.Cut(field, "=")
		switch key {
		case "depends":
			for need := range strings.SplitSeq(value, ",") {
				if need != "" {
					m.needs = append(m.needs, canonical(need))
				}
			}
		case "alias":
			m.aliases = append(m.aliases, value)
		case "softdep":
			m.soft = append(m.soft, value)
		}
	}
	return m, nil
}

// node is the device node at whose first use the kernel loads a module: the module, its name and numbers. The module
// has both among its aliases.
func (m *described) node() (line string, ok bool) {
	name, numbers := "", ""
	for _, a := range m.aliases {
		if n, found := strings.CutPrefix(a, "devname:"); found {
			name = n
		}
		for prefix, kind := range map[string]string{"char-major-": "c", "block-major-": "b"} {
			major, minor, both := strings.Cut(strings.TrimPrefix(a, prefix), "-")
			if strings.HasPrefix(a, prefix) && both && !strings.ContainsAny(major+minor, "*-") {
				numbers = kind + major + ":" + minor
			}
		}
	}
	return m.name + " " + name + " " + numbers, name != "" && numbers != ""
}

// Magic is the kernel that a module is for: its release, the first word of the field vermagic.
func Magic(module []byte) (string, error) {
	fields, err := modinfo(module)
	for _, field := range fields {
		if value, ok := strings.CutPrefix(field, "vermagic="); ok {
			release, _, _ := strings.Cut(value, " ")
			return release, nil
		}
	}
	return "", err
}

// closure lists what a module needs: each one before what it needs itself. modprobe loads them from the end.
func (m *described) closure(byName map[string]*described, builtin map[string]bool) ([]string, error) {
	var order []string
	seen := map[string]bool{m.name: true}
	var visit func(m *described) error
	visit = func(m *described) error {
		for _, need := range m.needs {
			if seen[need] || builtin[need] {
				continue
			}
			seen[need] = true
			next := byName[need]
			if next == nil {
				return fmt.Errorf("module %s needs %s, which isn't there", m.name, need)
			}
			if err := visit(next); err != nil {
				return err
			}
			order = append(order, need)
		}
		return nil
	}
	err := visit(m)
	slices.Reverse(order)
	return order, err
}

// normal is the form in which names are compared: _ for -, but not in brackets.
func normal(alias string) string {
	var b strings.Builder
	inside := false
	for _, c := range alias {
		switch {
		case c == '[':
			inside = true
		case c == ']':
			inside = false
		case c == '-' && !inside:
			c = '_'
		}
		b.WriteRune(c)
	}
	return b.String()
}

// The binary index (kmod, libkmod-index.c) is a tree of the keys' characters, from the leaves to the root. A node has
// the characters that all keys below it begin with, the places of the nodes that the next character leads to, and the
// values of the key that ends here. Numbers are big-endian. Flags in a node's place say which of these it has.
const (
	indexMagic   = 0xb007f457
	indexVersion = 0x00020001

	nodePrefix   = 0x80000000
	nodeValues   = 0x40000000
	nodeChildren = 0x20000000
)

type key struct {
	name, value string
	order       int
}

type keys []key

func (k *keys) add(name, value string, order int) { *k = append(*k, key{name, value, order}) }

func (k keys) index() []byte {
	sorted := slices.Clone(k)
	slices.SortStableFunc(sorted, func(a, b key) int {
		if a.name != b.name {
			return strings.Compare(a.name, b.name)
		}
		return a.order - b.order
	})
	out := binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, indexMagic), indexVersion)
	root := len(out)
	out = append(out, 0, 0, 0, 0)
	if len(sorted) > 0 {
		var at uint32
		out, at = sorted.node(out, 0)
		binary.BigEndian.PutUint32(out[root:], at)
	}
	return out
}

// node adds the nodes for sorted keys, of which the first skip characters lead here, and returns the place of the last
// one.
func (k keys) node(out []byte, skip int) ([]byte, uint32) {
	first, last := k[0].name[skip:], k[len(k)-1].name[skip:]
	shared := 0
	for shared < min(len(first), len(last)) && first[shared] == last[shared] {
		shared++
	}
	end := skip + shared
	here := 0
	for here < len(k) && len(k[here].name) == end {
		here++
	}
	rest := k[here:]
	var places []uint32
	for left := rest; len(left) > 0; {
		c, n := left[0].name[end], 0
		for n < len(left) && left[n].name[end] == c {
			n++
		}
		places = append(places, make([]uint32, int(c-rest[0].name[end])-len(places))...)
		var at uint32
		out, at = left[:n].node(out, end+1)
		places, left = append(places, at), left[n:]
	}
	at := uint32(len(out))
	if shared > 0 {
		out = append(append(out, first[:shared]...), 0)
		at |= nodePrefix
	}
	if len(rest) > 0 {
		out = append(out, rest[0].name[end], rest[len(rest)-1].name[end])
		for _, place := range places {
			out = binary.BigEndian.AppendUint32(out, place)
		}
		at |= nodeChildren
	}
	if here > 0 {
		out = binary.BigEndian.AppendUint32(out, uint32(here))
		for _, v := range k[:here] {
			out = append(append(binary.BigEndian.AppendUint32(out, uint32(v.order)), v.value...), 0)
		}
		at |= nodeValues
	}
	return out, at
}
