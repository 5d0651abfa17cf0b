package config

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// UdevRule is a rule of udev(7), with those of its keys that a node has.
type UdevRule []UdevTerm

// UdevTerm is a condition of a rule, or an action.
type UdevTerm struct {
	Key   string // such as KERNEL
	Attr  string // in braces
	Op    string // ==, !=, = or +=
	Value string
}

// Condition reports whether the term is one.
func (t UdevTerm) Condition() bool { return t.Op == "==" || t.Op == "!=" }

// Matches compares a text with the patterns of a condition, which a bar separates.
func (t UdevTerm) Matches(text string) bool {
	// In udev, an asterisk stands for slashes, too.
	plain := func(s string) string { return strings.NewReplacer("/", "\x00", "[!", "[^").Replace(s) }
	found := slices.ContainsFunc(strings.Split(t.Value, "|"), func(pattern string) bool {
		ok, err := path.Match(plain(pattern), plain(text))
		return err == nil && ok
	})
	return found == (t.Op == "==")
}

var (
	udevTerm = regexp.MustCompile(`^\s*([A-Z]+)(?:\{([^}]*)\})?\s*(==|!=|\+=|=)\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)`)
	udevMode = regexp.MustCompile(`^0?[0-7]{3}$`)

	// udevKeys are the operators of each key. Keys with braces end in {}.
	udevKeys = map[string]string{
		"ACTION": "== !=", "KERNEL": "== !=", "SUBSYSTEM": "== !=", "DRIVER": "== !=", "ENV{}": "== !=", "ATTR{}": "== != =",
		// of the device or one of its parents
		"KERNELS": "== !=", "SUBSYSTEMS": "== !=", "DRIVERS": "== !=", "ATTRS{}": "== !=",
		"MODE": "=", "OWNER": "=", "GROUP": "=", "SYMLINK": "+=",
	}
)

// ParseUdevRule reads one rule.
func ParseUdevRule(text string) (rule UdevRule, err error) {
	rest := strings.TrimSpace(text)
	acts := false
	for rest != "" {
		m := udevTerm.FindStringSubmatch(rest)
		if m == nil {
			return nil, fmt.Errorf("can't be read from %s on: a rule is KEY==\"value\" and KEY=\"value\", with commas between them", quote(rest))
		}
		rest = rest[len(m[0]):]
		t := UdevTerm{Key: m[1], Attr: m[2], Op: m[3], Value: strings.ReplaceAll(m[4], `\"`, `"`)}
		if err := t.check(); err != nil {
			return nil, err
		}
		rule, acts = append(rule, t), acts || !t.Condition()
	}
	if !acts {
		return nil, errors.New("does nothing: a rule has ATTR{…}=, MODE=, OWNER=, GROUP= or SYMLINK+=")
	}
	return rule, nil
}

func (t UdevTerm) check() error {
	name := t.Key
	if t.Attr != "" {
		name += "{}"
	}
	ops, known := udevKeys[name]
	switch {
	case !known && t.Key == "RUN":
		return errors.New("RUN: a node has no programs for rules. A setting below /sys is ATTR{…}=")
	case !known:
		return fmt.Errorf("%s isn't a key that a node has; it has ACTION, KERNEL, SUBSYSTEM, DRIVER, ENV{…}, ATTR{…}, KERNELS, SUBSYSTEMS, DRIVERS, ATTRS{…}, MODE, OWNER, GROUP and SYMLINK", name)
	case !slices.Contains(strings.Fields(ops), t.Op):
		return fmt.Errorf("%s %s: the operator must be one of %s", name, t.Op, ops)
	case strings.HasPrefix(t.Key, "ATTR") && !fs.ValidPath(t.Attr):
		return fmt.Errorf("%s: %s is not a path below the device", name, quote(t.Attr))
	case t.Key == "MODE" && !udevMode.MatchString(t.Value):
		return fmt.Errorf("MODE: %s is not octal permissions, such as 0660", quote(t.Value))
	case t.Key == "SYMLINK" && (!fs.ValidPath(t.Value) || t.Value == "."):
		return fmt.Errorf("SYMLINK: %s is not a path below /dev", quote(t.Value))
	}
	if t.Key == "OWNER" || t.Key == "GROUP" {
		if _, err := strconv.ParseUint(t.Value, 10, 31); err != nil {
			return fmt.Errorf("%s: %s is not a number; a node has no names of users and groups", t.Key, quote(t.Value))
		}
	}
	return nil
}
