package udev

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
)

// rules are those of machine.udev.rules. A goroutine of its own owns them, because a driver may take long to change a
// setting.
type rules struct {
	sysfs, dev string
	log        *slog.Logger
	texts      []string
	parsed     []config.UdevRule
	links      map[string][]string // that were made, by the device below /sys
}

// follow applies the rules to all devices when they change, and to new and changed devices, until ctx ends.
func (r *rules) follow(ctx context.Context, store *resource.Store, events <-chan Uevent) {
	configs := store.Watch(ctx, configuration.Configs.Type())
	for {
		select {
		case _, ok := <-configs:
			if !ok {
				return
			}
			if cfg, err := configuration.Config(store); err == nil && !slices.Equal(cfg.Machine.Udev.Rules, r.texts) {
				r.take(cfg.Machine.Udev.Rules)
				r.applyAll()
			}
		case e, ok := <-events:
			if !ok {
				return
			}
			r.event(e)
		}
	}
}

func (r *rules) take(texts []string) {
	r.texts, r.parsed = texts, nil
	for _, text := range texts {
		if rule, err := config.ParseUdevRule(text); err == nil { // checks refuse the others
			r.parsed = append(r.parsed, rule)
		}
	}
}

func (r *rules) event(e Uevent) {
	switch path := filepath.Join(r.sysfs, e.DevPath); {
	case e.Lost:
		r.applyAll()
	case e.Action == "remove":
		for _, link := range r.links[path] {
			_ = os.Remove(link)
		}
		delete(r.links, path)
	default:
		r.guarded(path, e.Action)
	}
}

// applyAll applies the rules to the existing devices, as if they were new.
func (r *rules) applyAll() {
	if len(r.parsed) == 0 {
		return
	}
	seen := map[string]bool{}
	for _, place := range []string{"class/*/*", "bus/*/devices/*"} {
		paths, _ := filepath.Glob(filepath.Join(r.sysfs, place)) // the pattern is valid
		for _, path := range paths {
			if real, err := filepath.EvalSymlinks(path); err == nil && !seen[real] {
				seen[real] = true
				r.guarded(real, "add")
			}
		}
	}
}

// guarded is apply: this goroutine of PID 1 has no other protection.
func (r *rules) guarded(path, action string) {
	_ = dag.Guard(r.log.With("device", path), func() error { r.apply(path, action); return nil })
}

func (r *rules) apply(path, action string) {
	for _, rule := range r.parsed {
		if !r.fits(rule, path, action) {
			continue
		}
		for _, t := range rule {
			if t.Condition() {
				continue
			}
			if err := r.act(t, path); err != nil {
				r.log.Warn("machine.udev.rules", "device", strings.TrimPrefix(path, r.sysfs), "key", t.Key, "value", t.Value, "err", err)
			}
		}
	}
}

// fits reports whether all conditions of a rule hold for a device. Those of parents must hold for one of them, or for
// the device.
func (r *rules) fits(rule config.UdevRule, path, action string) bool {
	parents := config.UdevRule{}
	for _, t := range rule {
		switch {
		case !t.Condition():
		case t.Key == "ACTION":
			if !t.Matches(action) {
				return false
			}
		case strings.HasSuffix(t.Key, "S"):
			t.Key = strings.TrimSuffix(t.Key, "S")
			parents = append(parents, t)
		case !holds(t, path):
			return false
		}
	}
	for ; len(parents) > 0; path = filepath.Dir(path) {
		if !strings.HasPrefix(path, filepath.Join(r.sysfs, "devices")+"/") {
			return false
		}
		if !slices.ContainsFunc(parents, func(t config.UdevTerm) bool { return !holds(t, path) }) {
			return true
		}
	}
	return true
}

// holds looks at one property of a device.
func holds(t config.UdevTerm, path string) bool {
	switch t.Key {
	case "KERNEL":
		return t.Matches(filepath.Base(path))
	case "SUBSYSTEM", "DRIVER":
		target, _ := os.Readlink(filepath.Join(path, strings.ToLower(t.Key)))
		return t.Matches(strings.TrimPrefix(filepath.Base(target), "."))
	case "ENV":
		return t.Matches(uevent(path, t.Attr))
	}
	text, err := os.ReadFile(filepath.Join(path, t.Attr))
	return err == nil && t.Matches(strings.TrimRight(string(text), " \n\x00"))
}

// uevent is a property of a device; "" if it hasn't got it.
func uevent(path, name string) string {
	text, _ := os.ReadFile(filepath.Join(path, "uevent"))
	return properties(string(text), "\n")[name]
}

func (r *rules) act(t config.UdevTerm, path string) error {
	value := strings.NewReplacer("%k", filepath.Base(path), "$kernel", filepath.Base(path)).Replace(t.Value)
	if t.Key == "ATTR" {
		file, err := os.OpenFile(filepath.Join(path, t.Attr), os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = file.WriteString(value)
		return errors.Join(err, file.Close())
	}
	name := uevent(path, "DEVNAME")
	if name == "" {
		return errors.New("the device has no file below /dev")
	}
	node := filepath.Join(r.dev, name)
	number, _ := strconv.ParseUint(value, 8, 31)
	switch t.Key {
	case "MODE":
		return os.Chmod(node, fs.FileMode(number))
	case "OWNER", "GROUP":
		id, err := strconv.Atoi(value)
		if err != nil {
			return err
		}
		if t.Key == "OWNER" {
			return os.Lchown(node, id, -1)
		}
		return os.Lchown(node, -1, id)
	}
	link := filepath.Join(r.dev, value)
	if err := symlink(node, link); err != nil {
		return err
	}
	if !slices.Contains(r.links[path], link) {
		r.links[path] = append(r.links[path], link)
	}
	return nil
}

// symlink makes a relative link, in place of another one.
func symlink(node, link string) error {
	target, err := filepath.Rel(filepath.Dir(link), node)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(link), 0o755); err != nil {
		return err
	}
	switch old, err := os.Readlink(link); {
	case err == nil && old == target:
		return nil
	case err == nil:
		err = os.Remove(link)
		if err != nil {
			return err
		}
	case !errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%s is there, and isn't a link", link)
	}
	return os.Symlink(target, link)
}
