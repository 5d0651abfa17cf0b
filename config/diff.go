package config

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"reflect"
	"slices"
	"strings"
)

// Op is the kind of a change.
type Op string

const (
	Added   Op = "added"
	Removed Op = "removed"
	Changed Op = "changed"
)

// Change is one field that differs between two configurations. Old and New are
// for display: secrets are "(secret)" and long texts are shortened.
type Change struct {
	Path     string // such as machine.network.interfaces[eth0].mtu
	Op       Op
	Old, New string // "" if there is no value
	Effect   Effect
	Note     string // what a user should know about the effect, or ""
}

func (c Change) String() string {
	what := cmp.Or(map[Op]string{Added: "added " + c.New, Removed: "removed " + c.Old}[c.Op], c.Old+" → "+c.New)
	return fmt.Sprintf("%s: %s (%s)", c.Path, what, strings.TrimSuffix(string(c.Effect)+": "+c.Note, ": "))
}

// Diff lists the changes from one configuration to the other, in the order of
// the document, with the effect that each change has on a running node. Both
// are as Load returns them: a default that was written out is no change. nil
// stands for no configuration.
func Diff(old, new *Config) []Change {
	d := differ{from: old, to: new}
	if old == nil {
		old, d.from = &Config{}, new
	}
	if new == nil {
		d.to, new = old, &Config{}
	}
	d.fields("", nil, reflect.ValueOf(old).Elem(), reflect.ValueOf(new).Elem())
	return d.changes
}

// differ compares two values of one type.
type differ struct {
	// from and to have the effects; where there is no configuration, both are the other one.
	from, to *Config
	changes  []Change
}

// fields compares two structs of this package. path is their place in the
// schema, where their place in the document.
func (d *differ) fields(path string, where place, a, b reflect.Value) {
	for i := range a.NumField() {
		f := a.Type().Field(i)
		name := f.Tag.Get("yaml")
		from := len(d.changes)
		d.field(join(path, name), where.with(name), f, a.Field(i), b.Field(i))
		if holdsSecret(a, name) || holdsSecret(b, name) {
			d.redact(from)
		}
	}
}

// redact hides the values of the changes from index from on.
func (d *differ) redact(from int) {
	for i := range d.changes[from:] {
		c := &d.changes[from+i]
		for _, text := range []*string{&c.Old, &c.New} {
			if *text != "" {
				*text = redacted
			}
		}
	}
}

func (d *differ) field(path string, where place, f reflect.StructField, a, b reflect.Value) {
	inner, suffix := element(f.Type)
	switch {
	case inner == nil && f.Type.Kind() == reflect.Map:
		d.texts(path, where, a, b)
	case inner == nil:
		d.leaf(path, where, a, b)
	case f.Type.Kind() == reflect.Map:
		for _, key := range keysOf(a, b) {
			d.fields(path+suffix, where.with(key.String()), orZero(a.MapIndex(key), inner), orZero(b.MapIndex(key), inner))
		}
	case f.Type.Kind() == reflect.Slice:
		d.entries(path+suffix, where, keysOfTag(f.Tag), a, b)
	default:
		d.fields(path, where, orZero(reflect.Indirect(a), inner), orZero(reflect.Indirect(b), inner))
	}
}

// orZero is v, or the zero value of t if v is not valid.
func orZero(v reflect.Value, t reflect.Type) reflect.Value {
	if v.IsValid() {
		return v
	}
	return reflect.Zero(t)
}

// keysOf are the keys of two maps, sorted.
func keysOf(a, b reflect.Value) []reflect.Value {
	keys := a.MapKeys()
	for _, key := range b.MapKeys() {
		if !a.MapIndex(key).IsValid() {
			keys = append(keys, key)
		}
	}
	slices.SortFunc(keys, func(x, y reflect.Value) int { return strings.Compare(x.String(), y.String()) })
	return keys
}

// texts compares two maps of text, key by key.
func (d *differ) texts(path string, where place, a, b reflect.Value) {
	for _, key := range keysOf(a, b) {
		x, y := a.MapIndex(key), b.MapIndex(key)
		if x.IsValid() && y.IsValid() && same(x, y) {
			continue
		}
		from := len(d.changes)
		d.change(path, where.with(key.String()), x, y, x.IsValid(), y.IsValid())
		if a.Type() == envType && !openEnv(key.String()) {
			d.redact(from)
		}
	}
}

func (d *differ) leaf(path string, where place, a, b reflect.Value) {
	if !same(a, b) {
		d.change(path, where, a, b, !a.IsZero(), !b.IsZero())
	}
}

// change is between two values, of which one may not be there.
func (d *differ) change(path string, where place, a, b reflect.Value, had, has bool) {
	c := Change{}
	if c.Op = Added; had {
		c.Op, c.Old = Changed, show(a)
	}
	if has {
		c.New = show(b)
	} else {
		c.Op = Removed
	}
	d.add(path, where, c)
}

// same compares leaves; an empty list is the same as none.
func same(a, b reflect.Value) bool {
	if a.Kind() == reflect.Slice && a.Len() == 0 && b.Len() == 0 {
		return true
	}
	return reflect.DeepEqual(a.Interface(), b.Interface())
}

func (d *differ) add(path string, where place, c Change) {
	c.Path = where.String()
	row := rowOf(path)
	if c.Effect, c.Note = row.Effect, row.Note; row.Refine != "" {
		c.Effect, c.Note = refinements[row.Refine](row, where, c, d.from, d.to)
	}
	d.changes = append(d.changes, c)
}

// entries compares two lists of structs by the key of the entries. If a key occurs
// twice, the second entry is compared with the second one in the other list.
func (d *differ) entries(path string, where place, keys []string, a, b reflect.Value) {
	key := keys[0]
	old, names := byKey(keys, a)
	new, order := byKey(keys, b)
	var common []entry
	for _, name := range names { // the keys in both lists, in the order of old
		if _, kept := new[name]; kept {
			common = append(common, name)
		} else {
			order = append(order, name)
		}
	}
	inner := a.Type().Elem()
	before := len(d.changes)
	for _, name := range order {
		x, y := old[name], new[name]
		at := len(d.changes)
		d.fields(path, where.with(name), orZero(x, inner), orZero(y, inner))
		if x.IsValid() != y.IsValid() {
			d.unname(at, where.with(name, key))
		}
	}
	kept := slices.DeleteFunc(order, func(name entry) bool { return !old[name].IsValid() || !new[name].IsValid() })
	if before == len(d.changes) && key != keyOfSlots && !slices.Equal(common, kept) {
		d.add(path+"."+key, where, Change{Op: Changed, Old: show(reflect.ValueOf(common)), New: show(reflect.ValueOf(kept))})
	}
}

// keyOfSlots is the key of the only list whose order has no meaning.
const keyOfSlots = "slot"

// unname drops the change of the key itself from the changes of a whole entry:
// the paths of the others name it. If it is the only change, it stays.
func (d *differ) unname(from int, key place) {
	if len(d.changes)-from < 2 {
		return
	}
	text := key.String()
	rest := slices.DeleteFunc(d.changes[from:], func(c Change) bool { return c.Path == text })
	d.changes = d.changes[:from+len(rest)]
}

// entry is the key of a list's entry, as an element of a place.
type entry string

// byKey finds entries by the text of the first key that they have, and lists the keys.
func byKey(keys []string, list reflect.Value) (map[entry]reflect.Value, []entry) {
	entries := make(map[entry]reflect.Value, list.Len())
	seen := map[entry]int{}
	var order []entry
	for i := range list.Len() {
		v := list.Index(i)
		var base entry
		for _, key := range keys {
			f, _ := fieldByName(v.Type(), key)
			if base == "" {
				base = entry(plainShow(v.FieldByIndex(f.Index)))
			}
		}
		name := base
		for entries[name].IsValid() { // more than once if a key itself ends in #2
			seen[base]++
			name = base + entry(fmt.Sprintf("#%d", 1+seen[base]))
		}
		entries[name] = v
		order = append(order, name)
	}
	return entries, order
}

// show is a leaf for display.
func show(v reflect.Value) string { return showString(plainShow(v)) }

// plainShow is a leaf as one text, with secrets redacted.
func plainShow(v reflect.Value) string {
	switch x := v.Interface().(type) {
	case PEM:
		if len(x) == 0 {
			return ""
		}
		sum := sha256.Sum256(x)
		return fmt.Sprintf("(PEM, sha256 %x)", sum[:digestBytes])
	case URL:
		return x.Redacted()
	case fmt.Stringer:
		if v.Kind() != reflect.Pointer {
			return x.String()
		}
	}
	switch v.Kind() {
	case reflect.Pointer:
		if v.IsNil() {
			return ""
		}
		if v.Elem().Kind() == reflect.Struct {
			return "{}"
		}
		return plainShow(v.Elem())
	case reflect.Slice:
		texts := make([]string, v.Len())
		for i := range texts {
			texts[i] = plainShow(v.Index(i))
		}
		return strings.Join(texts, ", ")
	}
	return fmt.Sprint(v.Interface())
}

const (
	// maxShown is the longest text that a change repeats, in bytes: a few lines of
	// a terminal.
	maxShown = 200
	// digestBytes is how much of a digest is shown, enough to distinguish two texts.
	digestBytes = 6
)

// showString is one line, without secrets, and not longer than maxShown.
func showString(s string) string {
	if len(s) > maxShown || strings.ContainsAny(s, "\n\r") {
		sum := sha256.Sum256([]byte(s))
		return fmt.Sprintf("(%d bytes, sha256 %x)", len(s), sum[:digestBytes])
	}
	return RedactText(s)
}
