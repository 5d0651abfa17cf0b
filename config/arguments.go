package config

import (
	_ "embed"
	"maps"
	"path"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config/tree"
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
		case tree.IsNull(value):
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

//go:embed arguments.yaml
var argumentsText []byte

var together = sync.OnceValue(func() (t struct {
	Excludes map[string][]string
	Rules    []argumentRule
}) {
	_ = yaml.Unmarshal(argumentsText, &t) // a test reads it
	return t
})

// argumentRule is one of arguments.yaml, which says what its fields mean.
type argumentRule struct {
	Of                               []string
	Flag, Like, Unlike               pattern
	Beside, Without, Problem, Advice string
	Unmounted                        bool
}

// pattern is an expression that is compiled once.
type pattern struct{ *regexp.Regexp }

// UnmarshalText implements encoding.TextUnmarshaler.
func (p *pattern) UnmarshalText(text []byte) (err error) {
	if p.Regexp, err = regexp.Compile(string(text)); err == nil {
		p.Longest()
	}
	return err
}

// matches reports whether there is no expression, or the text is like it.
func (p pattern) matches(text string) bool { return p.Regexp == nil || p.MatchString(text) }

// Excludes is the argument beside which a program doesn't start with a flag, "" if there is none.
func (a Args) Excludes(flag string) string {
	for _, name := range slices.Sorted(maps.Keys(a)) {
		for first, others := range together().Excludes {
			for _, other := range others {
				this, _ := path.Match(other, flag)
				that, _ := path.Match(other, name)
				if a.Get(name) != "" && (name == first && this || flag == first && that) {
					return name
				}
			}
		}
	}
	return ""
}

// HostPath is where on the node a path of a program's pod is, if a volume has it.
func HostPath(volumes []Volume, name string) (string, bool) {
	for _, v := range volumes {
		if rest, below := strings.CutPrefix(name, v.MountPath); below && (rest == "" || rest[0] == '/') {
			return v.HostPath + rest, true
		}
	}
	return name, false
}

func checkArgs(c *Config, r *report) {
	for _, p := range c.programs() {
		for _, flag := range slices.Sorted(maps.Keys(p.args)) {
			where := p.where.with("extraArgs", flag)
			switch bare := strings.TrimLeft(flag, "-"); {
			case bare == "" || strings.ContainsAny(flag, "= \t\n"):
				r.bad(where, "is not the name of a flag")
			case bare != flag:
				r.bad(where, "is written without dashes; did you mean %s", bare)
			}
			if other := p.args.Excludes(flag); other != "" && other < flag {
				r.bad(where, "the program doesn't start with it beside %s; remove one of them", other)
			}
			p.judge(flag, func(rule argumentRule) {
				if rule.Problem != "" {
					r.bad(where, "%s", rule.Problem)
				}
			})
		}
	}
}

func warnArgs(c *Config, r *report) {
	for _, p := range c.programs() {
		for _, flag := range slices.Sorted(maps.Keys(p.args)) {
			p.judge(flag, func(rule argumentRule) {
				if rule.Advice != "" {
					r.warn(p.where.with("extraArgs", flag), "%s", strings.ReplaceAll(rule.Advice, "VALUE", p.args.Get(flag)))
				}
			})
		}
	}
}

// AboutArgs is everything that is to be said about the arguments of the programs.
func (c *Config) AboutArgs() []string {
	r := &report{}
	checkArgs(c, r)
	warnArgs(c, r)
	return append(texts(r.warnings), texts(r.problems)...)
}

// judge calls f for each rule that an argument breaks.
func (p program) judge(flag string, f func(argumentRule)) {
	value := strings.Join(p.args[flag], ",")
	_, mounted := HostPath(p.volumes, value)
	for _, rule := range together().Rules {
		_, beside := p.args[rule.Beside]
		_, without := p.args[rule.Without]
		whole := slices.Equal(rule.Flag.FindStringIndex(flag), []int{0, len(flag)})
		if (rule.Of == nil || slices.Contains(rule.Of, p.where[len(p.where)-1].(string))) && whole && rule.Like.matches(value) &&
			(rule.Unlike.Regexp == nil || !rule.Unlike.matches(value)) && (rule.Beside == "" || beside) && !without && !(rule.Unmounted && mounted) {
			f(rule)
		}
	}
}
