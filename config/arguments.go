package config

import (
	"maps"
	"reflect"
	"slices"

	"gopkg.in/yaml.v3"
)

// Args are arguments of a program: flags without dashes, and their values.
type Args map[string]Values

// Values of a flag. One that may be repeated can have several, in YAML a list.
type Values []string

var argsType = reflect.TypeFor[Args]()

// argument decodes one text or a list of them.
func (d *decoder) argument(n *yaml.Node, v reflect.Value) {
	if n.Kind == yaml.ScalarNode {
		n = &yaml.Node{Kind: yaml.SequenceNode, Content: []*yaml.Node{n}}
	}
	if n.Kind != yaml.SequenceNode || len(n.Content) == 0 {
		d.bad(n, "must be text, or a list of texts, not %s", kindOf(n))
		return
	}
	var texts Values
	for _, value := range n.Content {
		switch value = resolve(value); {
		case !d.spend(value):
		case value.Kind != yaml.ScalarNode:
			d.bad(value, "must be text, not %s", kindOf(value))
		case isNull(value):
			texts = append(texts, "")
		default:
			texts = append(texts, value.Value)
		}
	}
	v.Set(reflect.ValueOf(texts))
}

// Get is the value of a flag: the last one, as for a program, or "".
func (a Args) Get(flag string) string {
	if values := a[flag]; len(values) > 0 {
		return values[len(values)-1]
	}
	return ""
}

// CommandLine is the one of a program that has these flags by default: the arguments take the place of
// those of the same name.
func (a Args) CommandLine(program string, defaults map[string]string) []string {
	all := Args{}
	for flag, value := range defaults {
		all[flag] = Values{value}
	}
	maps.Copy(all, a)
	command := []string{program}
	for _, flag := range slices.Sorted(maps.Keys(all)) {
		for _, value := range all[flag] {
			command = append(command, "--"+flag+"="+value)
		}
	}
	return command
}
