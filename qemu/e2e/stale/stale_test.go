//go:build e2e && long

// Package stale tests a machine that was part of another cluster: its disk still has the
// etcd data of that cluster, under the same address (S-225).
package stale

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

// tellBudget is for a node to boot, and to examine its data.
const tellBudget = 60 * time.Second

// kept are the files of etcd on EPHEMERAL.
var kept = []string{"etcd", "etcd.owner"}

func TestS225StaleData(t *testing.T) {
	old, m := e2etest.Ready(t, "stale-old", qemu.Container)
	old.Kubectl("create", "configmap", "old")
	must(t, old.Cut(t.Context(), old.Node()))
	disk := t.TempDir()
	for _, name := range kept {
		must(t, copyTo(filepath.Join(disk, name), filepath.Join(old.Dir(), old.Node(), "var", "lib", name)))
	}
	old.Down()
	m.Reached("the old cluster is gone")

	c := e2etest.New(t, "stale", qemu.Container, func(o *qemu.Options) {
		o.Prepare = func(dir string) error {
			for _, name := range kept {
				if err := copyTo(filepath.Join(dir, "var", "lib", name), filepath.Join(disk, name)); err != nil {
					return err
				}
			}
			return nil
		}
	})
	c.Eventually(tellBudget, "the service says what it found", func() error {
		return says(c, []string{"Preparing", "holds data of another etcd cluster", "gbctl -n " + c.Nodes[0].Address.String() + " reset"}, "service", "etcd")
	})
	c.Eventually(tellBudget, "the doctor says it, too", func() error {
		return says(c, []string{"etcd-foreign-data", "reset --graceful=false"}, "doctor")
	})
	if err := says(c, []string{"isn't empty"}, "bootstrap"); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(c.Dir(), c.Node(), "var", "lib", "etcd", "member", "wal")); err != nil {
		t.Errorf("the data that nobody has decided about: %v", err)
	}
	m.Reached("the data is named")
	c.Gbctl("reset", "--graceful=false", "--system-labels-to-wipe", "EPHEMERAL", "--reboot", "--yes")
	c.Eventually(tellBudget, "it looks anew", func() error {
		out, err := c.TryGbctl("service", "etcd")
		if err == nil && strings.Contains(out, "another etcd cluster") {
			err = fmt.Errorf("service etcd:\n%s", out)
		}
		return err
	})
	c.Ready(m)
	if out, err := c.Try("get", "configmap", "old"); err == nil || !strings.Contains(err.Error(), "not found") {
		t.Errorf("the old cluster's data: %v: %s", err, out)
	}
	t.Log(c.Gbctl("service", "etcd"))

	// The twin: the cluster's own data exists as well, and is used without a question.
	c.Kubectl("create", "configmap", "own")
	must(t, c.Cut(t.Context(), c.Node()))
	must(t, c.On(t.Context(), c.Node()))
	c.Ready(m)
	c.Eventually(tellBudget, "its own data is there", func() error {
		_, err := c.Try("get", "configmap", "own")
		return err
	})
	if says(c, []string{"another etcd cluster"}, "service", "etcd") == nil || says(c, []string{"etcd-foreign-data"}, "doctor") == nil {
		t.Error("its own data is taken for another cluster's")
	}
}

// says is nil if the output of gbctl, with or without an error, has all parts.
func says(c *e2etest.Cluster, parts []string, args ...string) error {
	out, err := c.TryGbctl(args...)
	if err != nil {
		out += err.Error()
	}
	for _, part := range parts {
		if !strings.Contains(out, part) {
			return fmt.Errorf("gbctl %s doesn't say %q:\n%s", strings.Join(args, " "), part, out)
		}
	}
	return nil
}

// copyTo copies a file or a directory.
func copyTo(to, from string) error {
	info, err := os.Stat(from)
	if err != nil {
		return err
	}
	if info.IsDir() {
		return os.CopyFS(to, os.DirFS(from))
	}
	data, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, data, 0o600)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
