//go:build linux

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/api/client"
	"github.com/garboard-os/garboard/qemu"
	"go.yaml.in/yaml/v3"
)

// mergeAccess makes a cluster the current one of gbctl and kubectl. It replaces entries
// of an earlier cluster with the same name whose directory was deleted.
func (a *app) mergeAccess(c *qemu.Cluster) error {
	other, err := client.Load(c.ClientConfig())
	if err != nil {
		return err
	}
	config, path, err := a.load()
	if err != nil {
		return err
	}
	if old := config.Contexts[c.Name]; old != nil && local(old) {
		delete(config.Contexts, c.Name)
	}
	config.Merge(other)
	if err := config.Save(path); err != nil {
		return err
	}
	kubeconfig, err := defaultKubeconfig()
	if err != nil {
		return err
	}
	add, err := os.ReadFile(c.Kubeconfig())
	if err != nil {
		return err
	}
	m := merging{local: true}
	if err := m.into(kubeconfig, add); err != nil {
		return err
	}
	fmt.Fprintf(a.out, "gbctl's context is %q now, in %s\nkubectl's context is %q now, in %s\n", config.Context, path, m.context, kubeconfig)
	return nil
}

// local reports whether a context is for a cluster on this machine.
func local(c *client.Context) bool {
	for _, to := range c.Via {
		if !strings.HasPrefix(to, loopbackPrefix) {
			return false
		}
	}
	return len(c.Via) > 0
}

// access identifies a cluster: its certificate authorities, in base64.
type access struct{ machine, kubernetes string }

// accessOf returns an empty value if the files of the cluster can't be read: then nothing
// is removed from the files of the user.
func accessOf(name string) (a access) {
	c, err := qemu.Open(name)
	if err != nil {
		return a
	}
	if config, err := client.Load(c.ClientConfig()); err == nil {
		if context, err := config.Current(""); err == nil {
			a.machine = context.CA
		}
	}
	if data, err := os.ReadFile(c.Kubeconfig()); err == nil {
		if k, err := parseKube(data); err == nil {
			a.kubernetes = text(get(k.entry("clusters", name), "cluster"), "certificate-authority-data")
		}
	}
	return a
}

// removeAccess removes a cluster from the files of the user. If it was the current
// context, there is no current context any more, so that no command uses another cluster
// by accident.
func (a *app) removeAccess(of access) error {
	return errors.Join(a.removeContexts(of.machine), removeKubeconfig(of.kubernetes))
}

func (a *app) removeContexts(ca string) error {
	config, path, err := a.load()
	if err != nil {
		return err
	}
	before := len(config.Contexts)
	maps.DeleteFunc(config.Contexts, func(_ string, c *client.Context) bool { return ca != "" && c.CA == ca })
	if len(config.Contexts) == before {
		return nil
	}
	if config.Contexts[config.Context] == nil {
		config.Context = ""
	}
	return config.Save(path)
}

func removeKubeconfig(ca string) error {
	path, err := defaultKubeconfig()
	if err != nil {
		return err
	}
	old, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) || ca == "" {
		return nil
	}
	if err != nil {
		return err
	}
	kept, changed, err := withoutCluster(old, ca)
	if err != nil {
		return fmt.Errorf("remove the cluster from %s: %w", path, err)
	}
	if !changed {
		return nil
	}
	return writeKubeconfig(path, kept)
}

// withoutCluster removes the clusters with a given authority from a kubeconfig, with
// their contexts and with the users that no other context uses.
func withoutCluster(old []byte, ca string) (kept []byte, changed bool, err error) {
	k, err := parseKube(old)
	if err != nil {
		return nil, false, err
	}
	clusters := k.remove("clusters", func(e *yaml.Node) bool {
		return text(get(e, "cluster"), "certificate-authority-data") == ca
	})
	if len(clusters) == 0 {
		return old, false, nil
	}
	users := map[string]bool{}
	contexts := k.remove("contexts", func(e *yaml.Node) bool {
		c := get(e, "context")
		ours := slices.Contains(clusters, text(c, "cluster"))
		if ours {
			users[text(c, "user")] = true
		}
		return ours
	})
	if l := get(k.root, "contexts"); l != nil {
		for _, e := range l.Content {
			delete(users, text(get(e, "context"), "user"))
		}
	}
	k.remove("users", func(e *yaml.Node) bool { return users[text(e, "name")] })
	if slices.Contains(contexts, text(k.root, "current-context")) {
		set(k.root, "current-context", "")
	}
	kept, err = k.encode()
	return kept, true, err
}

// remove removes entries from a list, and returns their names.
func (k kubeFile) remove(list string, gone func(*yaml.Node) bool) (names []string) {
	l := get(k.root, list)
	if l == nil || l.Kind != yaml.SequenceNode {
		return nil
	}
	l.Content = slices.DeleteFunc(l.Content, func(e *yaml.Node) bool {
		if !gone(e) {
			return false
		}
		names = append(names, text(e, "name"))
		return true
	})
	if len(l.Content) == 0 {
		l.Style = yaml.FlowStyle // []
	}
	return names
}
