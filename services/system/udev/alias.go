package udev

import (
	"cmp"
	"path"
	"slices"
	"sort"
	"strings"
)

// aliases finds the modules that drive a device, by the patterns of a
// modules.alias file (modules.alias(5), fnmatch(3)):
//
//	alias pci:v00008086d00001533sv*sd*bc*sc*i* igb
//
// There are some 15,000 patterns, and a machine has hundreds of devices. So the
// patterns are sorted by the text before their first wildcard. A device is
// compared only with the patterns whose literal prefix its modalias has: one
// binary search for each length of a prefix.
type aliases struct {
	entries []alias // sorted by prefix, then by place in the file
	lengths []int   // lengths of all prefixes, ascending
}

type alias struct {
	prefix  string // literal prefix of the pattern
	rest    string // from the first wildcard on; "" if there is none
	module  string
	ordinal int32 // line in the file: depmod lists modules in the order of the kernel build
}

// parseAliases reads the text of a modules.alias file. It ignores lines that
// aren't aliases.
func parseAliases(text string) *aliases {
	a := &aliases{}
	text = canonicalPattern(text)
	modules := map[string]string{} // one string for each module's name
	seen := map[int]bool{}
	ordinal := int32(0)
	for line := range strings.Lines(text) {
		rest, ok := strings.CutPrefix(strings.TrimSpace(line), "alias ")
		if !ok {
			continue
		}
		// The name of a module has no blank, but a pattern may have one.
		cut := strings.LastIndexByte(rest, ' ')
		if cut <= 0 {
			continue
		}
		pattern, name := rest[:cut], rest[cut+1:]
		if known, ok := modules[name]; ok {
			name = known
		} else {
			modules[name] = name
		}
		literal := strings.IndexAny(pattern, "*?[\\")
		if literal < 0 {
			literal = len(pattern)
		}
		seen[literal] = true
		a.entries = append(a.entries, alias{pattern[:literal], pattern[literal:], name, ordinal})
		ordinal++
	}
	slices.SortFunc(a.entries, func(x, y alias) int {
		return cmp.Or(strings.Compare(x.prefix, y.prefix), cmp.Compare(x.ordinal, y.ordinal))
	})
	for n := range seen {
		a.lengths = append(a.lengths, n)
	}
	slices.Sort(a.lengths)
	return a
}

// match lists the modules for a device's modalias, in the order of the file,
// each once.
func (a *aliases) match(modalias string) []string {
	modalias = canonicalPattern(modalias)
	var found []alias
	for _, n := range a.lengths {
		if n > len(modalias) {
			break
		}
		prefix, rest := modalias[:n], modalias[n:]
		first := sort.Search(len(a.entries), func(i int) bool { return a.entries[i].prefix >= prefix })
		for _, e := range a.entries[first:] {
			if e.prefix != prefix {
				break
			}
			if ok, err := path.Match(e.rest, rest); ok && err == nil {
				found = append(found, e)
			}
		}
	}
	slices.SortFunc(found, func(x, y alias) int { return int(x.ordinal - y.ordinal) })
	var modules []string
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
