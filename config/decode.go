package config

import (
	"cmp"
	"encoding"
	"fmt"
	"net/netip"
	"reflect"
	"strconv"
	"strings"
	"time"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config/tree"
)

// maxExpanded limits the size of a document after its aliases are expanded: nodes
// plus bytes of text, counted at each use. A document without aliases can't reach
// it within MaxSize, even if two of its bytes become three bytes of UTF-8.
const maxExpanded = 2 * MaxSize

// maxEntries limits a list or a mapping. It is far above any real need, and low
// enough for checks that compare each entry with each other.
const maxEntries = 10_000

// decoder fills typed values from nodes. The types limit the depth, so deep
// nesting and aliases that contain themselves end; budget limits the number of
// nodes.
type decoder struct {
	*report
	budget int
	where  place // of the current node
	// unknown, if it isn't nil, gets the places of keys that no field has, by the node of the key. They aren't problems
	// then.
	unknown map[*yaml.Node]string
}

// document decodes the whole document of the report.
func (d *decoder) document(c *Config) { d.value(d.root, reflect.ValueOf(c).Elem()) }

// inside runs f one step deeper.
func (d *decoder) inside(step any, f func()) {
	d.where = append(d.where, step)
	f()
	d.where = d.where[:len(d.where)-1]
}

func (d *decoder) bad(n *yaml.Node, format string, args ...any) {
	d.badNode(n, d.where, format, args...)
}

// spend takes a node from the budget and reports whether the decoder may continue.
func (d *decoder) spend(n *yaml.Node) bool {
	if d.budget < 0 || d.full() {
		return false
	}
	if d.budget -= 1 + len(n.Value); d.budget < 0 {
		d.bad(n, "aliases expand the document to more than %d bytes", maxExpanded)
		return false
	}
	return true
}

var (
	durationType = reflect.TypeFor[time.Duration]()
	addrType     = reflect.TypeFor[netip.Addr]()
	prefixType   = reflect.TypeFor[netip.Prefix]()
	objectType   = reflect.TypeFor[Object]()
)

// lenientLists are the lists for which a single element is accepted.
var lenientLists = map[reflect.Type]bool{reflect.TypeFor[[]WireGuardPeer](): true}

func (d *decoder) value(n *yaml.Node, v reflect.Value) {
	n = resolve(n)
	if !d.spend(n) || tree.IsNull(n) || d.tagged(n) {
		return // null is the same as a missing value
	}
	if v.Type() == objectType {
		d.object(n, v)
		return
	}
	if text, ok := v.Addr().Interface().(encoding.TextUnmarshaler); ok {
		d.text(n, v, text)
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		d.value(n, v.Elem())
	case reflect.Struct:
		d.structure(n, v)
	case reflect.Map:
		d.mapping(n, v)
	case reflect.Slice:
		d.list(n, v)
	default:
		d.scalar(n, v)
	}
}

// tagged reports a tag that has no meaning here.
func (d *decoder) tagged(n *yaml.Node) bool {
	tag := n.ShortTag()
	odd := strings.HasPrefix(tag, "!") && !strings.HasPrefix(tag, "!!") || tag == "!!binary"
	if odd {
		d.bad(n, "the tag %s isn't supported", quote(tag))
	}
	return odd
}

// pairs calls f for each key of a mapping, after it has refused duplicate and invalid keys.
func (d *decoder) pairs(n *yaml.Node, f func(key, value *yaml.Node)) {
	if n.Kind != yaml.MappingNode {
		d.bad(n, "must be a mapping, not %s", kindOf(n))
		return
	}
	if d.crowded(n, len(n.Content)/2) {
		return
	}
	lines := make(map[string]int, len(n.Content)/2)
	for i := 0; i+1 < len(n.Content) && !d.full(); i += 2 {
		key, value := resolve(n.Content[i]), n.Content[i+1]
		d.inside(key.Value, func() {
			first, twice := lines[key.Value]
			switch {
			case key.Kind != yaml.ScalarNode:
				d.bad(n.Content[i], "a key must be text, not %s", kindOf(key))
			case key.ShortTag() == "!!merge":
				d.bad(n.Content[i], "merging with << isn't supported; write the fields out, or use an alias for the whole value")
			case twice:
				d.bad(n.Content[i], "is given twice, first on line %d", first)
			default:
				lines[key.Value] = n.Content[i].Line
				f(n.Content[i], value)
			}
		})
	}
}

// crowded reports too many entries.
func (d *decoder) crowded(n *yaml.Node, entries int) bool {
	if entries > maxEntries {
		d.bad(n, "has %d entries; there may be %d", entries, maxEntries)
	}
	return entries > maxEntries
}

func (d *decoder) structure(n *yaml.Node, v reflect.Value) {
	given := map[string]string{} // canonical name to the spelling used
	d.pairs(n, func(key, value *yaml.Node) {
		spelling := resolve(key).Value
		name := spelling
		field, ok := fieldByName(v.Type(), name)
		if canonical, old := renamed[name]; !ok && old {
			if field, ok = fieldByName(v.Type(), canonical); ok {
				d.warn(d.where, "is deprecated; use %s", canonical)
				name = canonical
			}
		}
		if !ok && d.unknown != nil {
			d.unknown[key] = d.where.String()
			return
		}
		if !ok {
			d.bad(key, "unknown key%s", suggestKey(v.Type(), d.where))
			return
		}
		if other, twice := given[name]; twice {
			d.bad(key, "is the same field as %s; keep only %s", other, name)
			return
		}
		given[name] = spelling
		d.value(value, v.FieldByIndex(field.Index))
	})
}

func fieldByName(t reflect.Type, name string) (reflect.StructField, bool) {
	for f := range t.Fields() {
		if f.Tag.Get("yaml") == name {
			return f, true
		}
	}
	return reflect.StructField{}, false
}

func (d *decoder) mapping(n *yaml.Node, v reflect.Value) {
	m := reflect.MakeMap(v.Type())
	d.pairs(n, func(key, value *yaml.Node) {
		elem, name := reflect.New(v.Type().Elem()).Elem(), resolve(key).Value
		// Arguments and labels are text for us, but can look like numbers and
		// booleans in YAML; null is the empty text.
		if v.Type() == argsType {
			// The programs take _ for - in the name of a flag.
			if name = strings.ReplaceAll(name, "_", "-"); m.MapIndex(reflect.ValueOf(name)).IsValid() {
				d.bad(key, "is the same flag as %s; keep only one of them", name)
			}
			d.argument(resolve(value), elem)
		} else if elem.Kind() == reflect.String {
			if value = resolve(value); value.Kind == yaml.ScalarNode && d.spend(value) {
				if !tree.IsNull(value) {
					elem.SetString(value.Value)
				}
			} else {
				d.bad(value, "must be text, not %s", kindOf(value))
			}
		} else {
			d.value(value, elem)
		}
		m.SetMapIndex(reflect.ValueOf(name), elem)
	})
	if m.Len() > 0 {
		v.Set(m)
	}
}

func (d *decoder) list(n *yaml.Node, v reflect.Value) {
	elems := n.Content
	switch {
	case n.Kind == yaml.MappingNode && lenientLists[v.Type()]:
		d.warn(d.where, "is a list; a single entry is taken for a list of one")
		elems = []*yaml.Node{n}
	case n.Kind != yaml.SequenceNode:
		d.bad(n, "must be a list, not %s", kindOf(n))
		return
	case d.crowded(n, len(n.Content)):
		return
	}
	for i, elem := range elems {
		if d.budget < 0 || d.full() {
			return
		}
		d.inside(i, func() {
			v.Grow(1)
			v.SetLen(i + 1)
			if tree.IsNull(resolve(elem)) {
				d.bad(elem, "is an empty entry of a list")
				return
			}
			d.value(elem, v.Index(i))
		})
	}
}

// text decodes the types that parse their own text. Their errors don't repeat
// the text if it may be a secret.
func (d *decoder) text(n *yaml.Node, v reflect.Value, u encoding.TextUnmarshaler) {
	if n.Kind != yaml.ScalarNode {
		d.bad(n, "must be text, not %s", kindOf(n))
		return
	}
	err := u.UnmarshalText([]byte(n.Value))
	switch {
	case n.Value == "":
		d.bad(n, "is empty")
	case err == nil:
	case v.Type() == addrType:
		d.bad(n, "%s is not an IP address, such as 10.0.0.1", quote(n.Value))
	case v.Type() == prefixType:
		if addr, err := netip.ParseAddr(n.Value); err == nil {
			d.bad(n, "lacks the prefix length; did you mean %s/%d", addr, defaultBits(addr))
			return
		}
		d.bad(n, "%s is not an address with a prefix length, such as 10.0.0.1/24", quote(n.Value))
	default:
		d.bad(n, "%v", err)
	}
}

// defaultBits is the prefix length that is most often meant.
func defaultBits(addr netip.Addr) int {
	switch {
	case addr.IsUnspecified():
		return 0
	case addr.Is4():
		return 24
	}
	return 64
}

func (d *decoder) scalar(n *yaml.Node, v reflect.Value) {
	if n.Kind != yaml.ScalarNode {
		d.bad(n, "must be %s, not %s", nameOf(v.Type()), kindOf(n))
		return
	}
	switch {
	case v.Type() == durationType:
		d.duration(n, v)
	case v.Kind() == reflect.String:
		// A token such as 123456.0123456789012345 looks like a number.
		text := n.Value
		if n.ShortTag() == "!!bool" {
			if text = strings.ToLower(text); v.Type() != reflect.TypeFor[Advertisements]() {
				d.bad(n, "must be text, not a boolean; quote it")
				return
			}
		}
		v.SetString(text)
	case v.Kind() == reflect.Bool:
		if n.ShortTag() != "!!bool" {
			d.bad(n, "must be true or false, not %s", quote(n.Value))
			return
		}
		v.SetBool(strings.EqualFold(n.Value, "true"))
	case v.CanInt():
		i, err := strconv.ParseInt(n.Value, 10, v.Type().Bits())
		if err != nil {
			d.bad(n, "must be a whole number, not %s", quote(n.Value))
		}
		v.SetInt(i)
	case v.CanUint():
		i, err := strconv.ParseUint(n.Value, 10, v.Type().Bits())
		if err != nil {
			d.bad(n, "must be a whole number from 0 to %d, not %s", uint64(1)<<v.Type().Bits()-1, quote(n.Value))
		}
		v.SetUint(i)
	default:
		panic(fmt.Sprintf("config: no way to decode %s", v.Type())) // a test decodes every field
	}
}

func (d *decoder) duration(n *yaml.Node, v reflect.Value) {
	span, err := time.ParseDuration(n.Value)
	switch {
	case err != nil && n.ShortTag() == "!!int":
		d.bad(n, "lacks a unit; did you mean %ss", Shorten(n.Value, maxQuoted))
	case err != nil:
		d.bad(n, "%s is not a duration, such as 30s or 5m", quote(n.Value))
	case span < 0:
		d.bad(n, "must not be negative")
	default:
		v.SetInt(int64(span))
	}
}

func kindOf(n *yaml.Node) string {
	kinds := map[yaml.Kind]string{yaml.MappingNode: "a mapping", yaml.SequenceNode: "a list"}
	tags := map[string]string{"!!int": "a number", "!!float": "a number", "!!bool": "a boolean", "!!null": "nothing"}
	n = resolve(n)
	return cmp.Or(kinds[n.Kind], tags[n.ShortTag()], "text")
}

func nameOf(t reflect.Type) string {
	if t == durationType {
		return "a duration"
	}
	return cmp.Or(map[reflect.Kind]string{reflect.Bool: "true or false", reflect.String: "text"}[t.Kind()], "a whole number")
}
