//go:build e2e && long

// Package load tests the upgrade of a machine while clients write. It measures a promise, so that no other test may run
// beside it.
package load

import (
	"context"
	"errors"
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

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	// bootBudget is for a machine to boot, and systemBudget for an operation that restarts it, until its node is Ready
	// again.
	bootBudget   = 40 * time.Second
	systemBudget = 3 * time.Minute
	writeBudget  = 30 * time.Second
	// writePeriod is what an emulated member of etcd can follow.
	writePeriod = 200 * time.Millisecond
	// silence is a promise to clients: the longest time without an acknowledged write.
	silence = 2 * time.Second
)

var args = e2etest.SerialArgs()

// inEmulation are the settings of an emulated control plane among others: as a member of etcd it never wants to lead,
// and its controllers don't fail for want of a lease.
const inEmulation = `
machine: {install: {disk: /dev/vda}}
cluster:
  etcd: {extraArgs: {heartbeat-interval: "1000", election-timeout: "10000"}}
  controllerManager: {extraArgs: {leader-elect-lease-duration: 150s, leader-elect-renew-deadline: 100s, leader-elect-retry-period: 20s}}
  scheduler: {extraArgs: {leader-elect-lease-duration: 150s, leader-elect-renew-deadline: 100s, leader-elect-retry-period: 20s}}
`

// One of three control planes is a machine, which joins two containers. It is upgraded while clients write, and again
// without its data: it leaves etcd before, and joins the cluster after it. No acknowledged write is lost. Three
// machines would be too slow in emulation: they miss every timeout of etcd and Kubernetes. (S-191, S-192)
func TestMachineIsUpgradedUnderLoad(t *testing.T) {
	next, upgrade := e2etest.Installer(t, media.Options{Args: args, Version: "v2.0.0"})
	again, wiped := e2etest.Installer(t, media.Options{Args: args, Version: "v3.0.0"})
	images := httptest.NewServer(registry.New(next, again))
	t.Cleanup(images.Close)
	disk := e2etest.DiskImage(t, media.Options{Args: args, Version: "v1.0.0"})
	c, m := e2etest.Start(t, "load", qemu.Container, func(o *qemu.Options) {
		o.ControlPlanes, o.Later, o.Mirrors = 3, 1, map[string][]string{e2etest.InstallerHost: {images.URL}}
	})
	containers, last := c.Nodes[:2], c.Nodes[2]
	etcd := c.Etcd(c.Network(), c.Nodes...)
	c.Eventually(2*e2etest.ReadyBudget, "two control planes are Ready", func() error {
		return errors.Join(c.NodesReady(containers...), c.InSync(etcd, containers...))
	})
	m.Reached("two control planes are Ready")
	machine := c.Machine(last, disk, inEmulation).Patient(systemBudget)
	t.Attr(e2etest.Booted, qemu.QEMU)
	complete := func(version string) {
		t.Helper()
		machine.Eventually(systemBudget, "all control planes are Ready", func() error {
			return errors.Join(c.NodesReady(c.Nodes...), c.InSync(etcd, c.Nodes...))
		})
		machine.Eventually(bootBudget, version+" is good", func() error {
			out, err := machine.TryGbctl("-n", last.Name, "get", "slots")
			if err == nil && !regexp.MustCompile(`good +`+regexp.QuoteMeta(version)+` .*yes +yes`).MatchString(out) {
				err = errors.New(out)
			}
			return err
		})
	}
	complete("v1.0.0")
	m.Reached("a machine has joined")
	store := e2etest.KubernetesStore(c.Endpoint())
	store.Every = writePeriod
	load := c.Write(store)
	load.Goes(writeBudget, "before the upgrade")
	for _, step := range []struct {
		version string
		args    []string
	}{
		{"v2.0.0", []string{"--image", upgrade}},
		{"v3.0.0", []string{"--image", wiped, "--preserve=false"}},
	} {
		out, err := machine.Patient(3 * systemBudget).TryGbctl(append([]string{"-n", last.Name, "upgrade"}, step.args...)...)
		if t.Log(out); err != nil {
			t.Fatal(err)
		}
		longest := load.Longest() // Goes begins a new one
		complete(step.version)
		load.Goes(writeBudget, "after the upgrade to "+step.version)
		t.Logf("the longest time without an acknowledged write was %s, from %s on", longest.Took, longest.From.Format(time.TimeOnly))
		if err := c.Promised(longest.From, longest.From.Add(longest.Took), silence); err != nil {
			t.Errorf("without an acknowledged write: %v", err)
		}
		m.Reached(strings.Join(append([]string{"upgraded"}, step.args...), " "))
	}
	load.Stop()
	readers := map[string]func(context.Context) (map[string]string, error){"the endpoint": store.Read}
	for _, n := range c.Nodes {
		readers["that on "+n.Name] = e2etest.KubernetesStore(c.Server(c.Network(), n)).Read
	}
	load.Complete(writeBudget, readers)
	t.Log(machine.Gbctl("-n", last.Name, "get", "slots"))
}
