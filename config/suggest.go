package config

import (
	"reflect"
	"slices"
	"strings"
)

// renamed maps deprecated names of fields to the current ones, in any struct
// that has the field.
var renamed = map[string]string{"keySlot": "slot"}

// misplaced maps common wrong places of keys to the right ones. All of them
// were seen in real files.
var misplaced = map[string]string{
	"machine.state":           "machine.systemDiskEncryption.state",
	"machine.ephemeral":       "machine.systemDiskEncryption.ephemeral",
	`machine.registries["*"]`: `machine.registries.mirrors["*"]`,
	"network":                 "machine.network",
}

// unsettable are options of bonds that netlink's library has no attribute for, and the kernel no file.
var unsettable = []string{"nsIP6Target", "coupledControl", "broadcastNeighbor"}

// maxDistance is how many typing errors a suggestion may correct.
const maxDistance = 2

// suggestKey ends the message about an unknown key: a known misplaced key, else
// a similar key of the same struct, else the same key elsewhere.
func suggestKey(t reflect.Type, where place) string {
	if place, ok := misplaced[where.String()]; ok {
		return "; did you mean " + place
	}
	key, _ := where[len(where)-1].(string)
	if t == reflect.TypeFor[EncryptionKey]() && key == "recovery" {
		return "; a machine gets its recovery key by gbctl recovery-key add"
	}
	if t == reflect.TypeFor[Bond]() && slices.Contains(unsettable, key) {
		return "; the kernel has this option of a bond only in messages that the node can't send"
	}
	var names []string
	for f := range t.Fields() {
		names = append(names, f.Tag.Get("yaml"))
	}
	if hint := didYouMean(key, names); hint != "" {
		return hint
	}
	if places := placesOf(key); len(places) > 0 {
		return "; did you mean " + strings.Join(places, " or ")
	}
	return "; known here are " + strings.Join(names, ", ")
}

// placesOf lists the paths of the shallowest fields called key.
func placesOf(key string) (places []string) {
	_, paths := schema()
	for _, path := range paths {
		if path[strings.LastIndexByte(path, '.')+1:] != key {
			continue
		}
		if depth := strings.Count(path, "."); len(places) == 0 || depth < strings.Count(places[0], ".") {
			places = []string{path}
		} else if depth == strings.Count(places[0], ".") {
			places = append(places, path)
		}
	}
	return places
}

// element is the struct inside a field's type, and the suffix of its path.
func element(t reflect.Type) (reflect.Type, string) {
	suffix := ""
	for {
		switch t.Kind() {
		case reflect.Pointer:
			t = t.Elem()
		case reflect.Slice, reflect.Map:
			t = t.Elem()
			suffix = "[]"
		case reflect.Struct:
			if t.NumField() > 0 && t.Field(0).Tag.Get("yaml") != "" {
				return t, suffix
			}
			return nil, ""
		default:
			return nil, ""
		}
	}
}

// didYouMean names the most similar candidate, if one is similar enough.
func didYouMean(got string, candidates []string) string {
	if best := Closest(got, candidates); best != "" {
		return "; did you mean " + best
	}
	return ""
}

// Closest returns the most similar candidate, or "" if none is similar enough.
func Closest(got string, candidates []string) (best string) {
	bestDistance := maxDistance + 1
	for _, c := range candidates {
		if d := distance(strings.ToLower(got), strings.ToLower(c)); d < bestDistance && d < len(c) {
			best, bestDistance = c, d
		}
	}
	return best
}

// distance counts the insertions, deletions, replacements and swaps of
// neighbours between two texts; it stops counting above maxDistance.
func distance(a, b string) int {
	rows := [3][]int{make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)}
	for j := range rows[1] {
		rows[1][j] = j
	}
	for i := 1; i <= len(a); i++ {
		before, last, row := rows[0], rows[1], rows[2]
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			row[j] = min(last[j]+1, row[j-1]+1, last[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}
		if slices.Min(row) > maxDistance {
			return maxDistance + 1
		}
		rows = [3][]int{last, row, before}
	}
	return rows[1][len(b)]
}
