// Package cis holds the items of the CIS Kubernetes Benchmark as a table, and checks them
// against what a node writes: command lines, and files with their modes.
//
// Each part of the table belongs to the package that makes these: its test calls Check with
// what its own code has rendered. docs/cis.md is made of the same table.
package cis

import (
	"bytes"
	"cmp"
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"

	"gopkg.in/yaml.v3"
)

//go:embed benchmark.yaml
var table []byte

// item is one of the benchmark. It has checks, or says why it has none.
type item struct {
	ID     string `yaml:"id"`
	What   string `yaml:"what"`
	Manual bool   `yaml:"manual"` // the benchmark leaves it to a person's judgement
	Part   string `yaml:"part"`   // whose test checks it
	Checks []rule `yaml:"checks"` // all of them hold, or with a deviation one doesn't

	Deviation string `yaml:"deviation"` // why the node doesn't do it
	Inapt     string `yaml:"inapt"`     // why it doesn't apply
	Note      string `yaml:"note"`
}

// rule is what is demanded of a flag of a program, of a file, or of a setting in a YAML file.
type rule struct {
	Program string `yaml:"program"`
	Flag    string `yaml:"flag"`
	File    string `yaml:"file"`    // a pattern (path.Match), which at least one file has
	Setting string `yaml:"setting"` // names and indices, with dots between them

	Is    string `yaml:"is"`
	Not   string `yaml:"not"`   // or not set
	Has   string `yaml:"has"`   // in a list
	Lacks string `yaml:"lacks"` // in a list, or not set
	Min   int    `yaml:"min"`
	Unset bool   `yaml:"unset"`
	Mode  string `yaml:"mode"`  // at most
	Owner string `yaml:"owner"` // root, or the user of a program
}

// Node is what a node has, as far as one test knows it.
type Node struct {
	Commands map[string][]string // by program
	Files    map[string]File     // by path, directories too
}

// File is one that was written, or that is going to be.
type File struct {
	Mode    fs.FileMode
	User    string // "": root, as PID 1 is
	Content []byte
}

func items() ([]item, error) {
	var all []item
	d := yaml.NewDecoder(bytes.NewReader(table))
	d.KnownFields(true)
	err := d.Decode(&all)
	return all, err
}

// Check reports the items of a part that don't hold on the node, and deviations that are none.
func Check(t *testing.T, part string, node Node) {
	t.Helper()
	all, err := items()
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range all {
		if i.Part != part {
			continue
		}
		var broken []string
		for _, r := range i.Checks {
			if err := node.check(r); err != nil {
				broken = append(broken, fmt.Sprintf("%s: %v", r, err))
			}
		}
		if held := len(broken) == 0; held != (i.Deviation == "") {
			t.Errorf("CIS %s (%s): holds: %v, deviation: %q\n%s", i.ID, i.What, held, i.Deviation, strings.Join(broken, "\n"))
		}
	}
}

func (n Node) check(r rule) error {
	if r.File == "" {
		value, set := n.flag(r.Program, r.Flag)
		return r.of(value, set)
	}
	found := 0
	for name, f := range n.Files {
		if ok, err := path.Match(r.File, name); err != nil || !ok {
			continue
		}
		found++
		if most, err := strconv.ParseUint(r.Mode, 8, 32); r.Mode != "" && (err != nil || f.Mode.Perm()&^fs.FileMode(most) != 0) {
			return fmt.Errorf("%s has the mode %#o", name, f.Mode.Perm())
		}
		if user := cmp.Or(f.User, "root"); r.Owner != "" && r.Owner != user {
			return fmt.Errorf("%s belongs to %s", name, user)
		}
		if r.Setting != "" {
			var v any
			if err := yaml.Unmarshal(f.Content, &v); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			for key := range strings.SplitSeq(r.Setting, ".") {
				v = within(v, key)
			}
			if err := r.of(fmt.Sprint(v), v != nil); err != nil {
				return err
			}
		}
	}
	if found == 0 {
		return errors.New("no such file")
	}
	return nil
}

// within is what a mapping has under a name, or a list at an index.
func within(v any, key string) any {
	switch v := v.(type) {
	case map[string]any:
		return v[key]
	case []any:
		if i, err := strconv.Atoi(key); err == nil && i < len(v) {
			return v[i]
		}
	}
	return nil
}

// flag is the value of --NAME=VALUE.
func (n Node) flag(program, name string) (value string, set bool) {
	for _, arg := range n.Commands[program] {
		if rest, ok := strings.CutPrefix(arg, "--"+name+"="); ok {
			return rest, true
		}
	}
	return "", false
}

// of compares a value with what is demanded of it.
func (r rule) of(value string, set bool) error {
	list := strings.Split(value, ",")
	number, _ := strconv.Atoi(value)
	var holds bool
	switch {
	case r.Unset:
		holds = !set
	case r.Is != "":
		holds = value == r.Is
	case r.Not != "":
		holds = value != r.Not
	case r.Has != "":
		holds = slices.Contains(list, r.Has)
	case r.Lacks != "":
		holds = !slices.Contains(list, r.Lacks)
	case r.Min != 0:
		holds = number >= r.Min
	default:
		holds = set
	}
	if !holds {
		return fmt.Errorf("it is %q", value)
	}
	return nil
}

// String is the rule in words.
func (r rule) String() string {
	subject := "`" + r.File + "`"
	switch {
	case r.Flag != "":
		subject = fmt.Sprintf("`--%s` of %s", r.Flag, r.Program)
	case r.Setting != "":
		subject = fmt.Sprintf("`%s` in `%s`", r.Setting, r.File)
	}
	switch {
	case r.Unset:
		return subject + " isn't set"
	case r.Is != "":
		return subject + " is `" + r.Is + "`"
	case r.Not != "":
		return subject + " isn't `" + r.Not + "`"
	case r.Has != "":
		return subject + " has `" + r.Has + "`"
	case r.Lacks != "":
		return subject + " doesn't have `" + r.Lacks + "`"
	case r.Min != 0:
		return fmt.Sprintf("%s is at least %d", subject, r.Min)
	case r.Mode != "":
		return subject + " has the mode " + r.Mode + " or less"
	case r.Owner != "":
		return subject + " belongs to " + r.Owner
	}
	return subject + " is set"
}
