package udev

import (
	"cmp"
	"path"
	"slices"
	"strings"
)

// aliases finds the modules that drive a device, by the patterns of a
// modules.alias file (modules.alias(5), fnmatch(3)):
//
//	alias pci:v00008086d00001533sv*sd*bc*sc*i* igb
//
// There are some 15,000 patterns, and a machine has hundreds of devices. So the
// patterns are sorted by the text before their first wildcard, then by place in the file. A device is
// compared only with the patterns whose literal prefix its modalias has: one
// binary search for each length of a prefix.
type aliases []alias

type alias struct {
	prefix  string // literal prefix of the pattern
	rest    string // from the first wildcard on; "" if there is none
	module  string
	ordinal int // line in the file: depmod lists modules in the order of the kernel build
}

// parseAliases reads the text of a modules.alias file. It ignores lines that
// aren't aliases.
func parseAliases(text string) (all aliases) {
	for line := range strings.Lines(canonicalPattern(text)) {
		rest, ok := strings.CutPrefix(strings.TrimSpace(line), "alias ")
		// The name of a module has no blank, but a pattern may have one.
		cut := strings.LastIndexByte(rest, ' ')
		if !ok || cut <= 0 {
			continue
		}
		pattern := rest[:cut]
		literal := strings.IndexAny(pattern, "*?[\\")
		if literal < 0 {
			literal = len(pattern)
		}
		all = append(all, alias{pattern[:literal], pattern[literal:], rest[cut+1:], len(all)})
	}
	slices.SortFunc(all, func(x, y alias) int { return cmp.Or(strings.Compare(x.prefix, y.prefix), x.ordinal-y.ordinal) })
	return all
}

// match lists the modules for a device's modalias, in the order of the file,
// each once.
func (a aliases) match(modalias string) (modules []string) {
	modalias = canonicalPattern(modalias)
	var found aliases
	for n := range len(modalias) + 1 {
		prefix, rest := modalias[:n], modalias[n:]
		first, _ := slices.BinarySearchFunc(a, prefix, func(e alias, prefix string) int { return strings.Compare(e.prefix, prefix) })
		for _, e := range a[first:] {
			if e.prefix != prefix {
				break
			}
			if fits, _ := path.Match(e.rest, rest); fits { // a wrong pattern fits nothing
				found = append(found, e)
			}
		}
	}
	slices.SortFunc(found, func(x, y alias) int { return x.ordinal - y.ordinal })
	for _, e := range found {
		if !slices.Contains(modules, e.module) {
			modules = append(modules, e.module)
		}
	}
	return modules
}

// canonicalPattern replaces dashes by underscores, which mean the same in names
// of modules and in aliases, except between brackets, where a dash is a range. It replaces
// slashes, too: a star of path.Match matches none, and one of fnmatch(3) does.
func canonicalPattern(s string) string {
	if !strings.ContainsAny(s, "-/") {
		return s
	}
	b := []byte(s)
	inside := false
	for i, c := range b {
		switch {
		case c == '[':
			inside = true
		case c == ']' || c == '\n':
			inside = false
		case c == '/' || c == '-' && !inside:
			b[i] = '_'
		}
	}
	return string(b)
}
