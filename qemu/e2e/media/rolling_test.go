//go:build e2e && long

package media

import (
	"context"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/network/registry"
)

const (
	// rollingBudget is for one machine of three to be upgraded, and to be healthy.
	rollingBudget = 4 * time.Minute
	writeBudget   = 30 * time.Second
)

// Three control planes are upgraded by one command, one after the other, while a client writes: no acknowledged write is lost. Then one of them
// is upgraded without its data: it leaves etcd, and joins again. How long the API was gone is printed, and isn't asserted: the machines are
// emulated, three of them on the processors of one.
func TestUpgradeOfThreeMachines(t *testing.T) {
	layout, upgrade := e2etest.Installer(t, media.Options{Args: args, Version: "v2.0.0"})
	back, former := e2etest.Installer(t, media.Options{Args: args, Version: "v1.0.0"})
	images := httptest.NewServer(registry.New(layout, back))
	t.Cleanup(images.Close)
	c, m := e2etest.Ready(t, "rolling", qemu.QEMU, e2etest.Nodes(3, 0), e2etest.DiskImage(t, media.Options{Args: args, Version: "v1.0.0"}), func(o *qemu.Options) {
		o.CPUs, o.MemoryMiB, o.Mirrors = 1, 2048, map[string][]string{e2etest.InstallerHost: {images.URL}}
	})
	var names []string
	for _, n := range c.Nodes {
		names = append(names, n.Name)
	}
	all, last := strings.Join(names, ","), names[len(names)-1]
	store := e2etest.KubernetesStore(c.Endpoint())
	load := c.Write(store)
	load.Goes(writeBudget, "before the upgrade")
	c = c.Patient(time.Duration(len(names)) * rollingBudget)
	runs := func(node, version string) {
		t.Helper()
		if out := c.Gbctl("-n", node, "get", "slots"); !regexp.MustCompile(`good +` + regexp.QuoteMeta(version) + ` .*yes +yes`).MatchString(out) {
			t.Errorf("%s doesn't run %s:\n%s", node, version, out)
		}
	}
	s := c.Session("-n", all, "upgrade", "--image", upgrade)
	if err := s.End(time.Duration(len(names)) * rollingBudget); err != nil {
		t.Fatalf("%v\n%s", err, s.Text())
	}
	t.Log(s.Text())
	for _, name := range names {
		runs(name, "v2.0.0")
	}
	load.Goes(writeBudget, "during the upgrade of three machines")
	m.Reached("the machines are upgraded")

	s = c.Session("-n", last, "upgrade", "--preserve=false", "--image", former)
	if err := s.End(2 * rollingBudget); err != nil {
		t.Fatalf("%v\n%s", err, s.Text())
	}
	t.Log(s.Text())
	runs(last, "v1.0.0")
	load.Goes(writeBudget, "while a machine is upgraded without its data")
	m.Reached("a machine is upgraded without its data")
	load.Stop()
	if members := c.Gbctl("-n", names[0], "etcd", "members"); strings.Count(members, " yes ")+strings.Count(members, " no ") < len(names) {
		t.Errorf("members of etcd:\n%s", members)
	}
	load.Complete(writeBudget, map[string]func(context.Context) (map[string]string, error){"the API server": store.Read})
	c.Ready(m)
}
