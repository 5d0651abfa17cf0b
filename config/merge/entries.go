package merge

import (
	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/tree"
)

// maxCompared is how many pairs of entries are compared, in a second at most.
const maxCompared = 4_000_000

// list is one whose entries have an identity: config.ListKeys.
type list struct {
	path  string
	keys  []string
	apart string
}

// value is the text of a field, "" if the entry doesn't have it.
func value(entry *yaml.Node, key string) string {
	if n := tree.Field(entry, key); n != nil && !tree.IsNull(n) {
		return n.Value
	}
	return ""
}

// alike are the entries with the identity of another one.
func (l list) alike(entries []*yaml.Node, entry *yaml.Node) (found []int) {
	for i, other := range entries {
		for _, key := range l.keys {
			a, b := value(entry, key), value(other, key)
			if a == "" || b == "" {
				continue
			}
			if a == b && (l.apart == "" || value(entry, l.apart) == value(other, l.apart)) {
				found = append(found, i)
			}
			break
		}
	}
	return found
}

// choose is the entry that one of a patch means: the one that has its values. If several entries have other values than
// the patch and none has that of the patch, it is a new one (-1): which of theirs it would replace isn't said, and the
// lists exist to have several.
func (l list) choose(entries []*yaml.Node, among []int, patch *yaml.Node) int {
	if len(among) < 2 {
		return append(among, -1)[0]
	}
	best, points, isNew, told := among[0], map[int]int{}, false, false
	for f := 0; f+1 < len(patch.Content); f += 2 {
		name, wanted := patch.Content[f].Value, patch.Content[f+1]
		if keys, _ := config.ListKeys(l.path + "[]." + name); len(keys) > 0 || wanted.Kind == yaml.MappingNode {
			continue // these are merged
		}
		var same, other []int
		for _, i := range among {
			if v := tree.Field(entries[i], name); v != nil && tree.Equal(v, wanted) {
				same = append(same, i)
			} else if v != nil {
				other = append(other, i)
			}
		}
		switch {
		case len(same) == 1 && len(other) > 0: // it tells the entries apart
			points[same[0]] += len(patch.Content)
			told = true
		case len(same) == 0 && len(other) > 1 && !tree.IsNull(wanted):
			isNew = true
		case len(same) == 0 && len(other) > 0: // the value to change
			points[other[0]]++
		}
	}
	if isNew && !told {
		return -1
	}
	for _, i := range among {
		if points[i] > points[best] {
			best = i
		}
	}
	return best
}
