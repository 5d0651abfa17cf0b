//go:build e2e

// Package host tests the machine that container nodes run on: two real clusters
// are started on it in parallel, one is killed and started again, both are
// removed, and the machine is in the same state as before.
package host

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/container/snapshot"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

// goneBudget is for the kernel to end everything of a cluster: hundreds of
// threads, dozens of mounts and some network namespaces.
const goneBudget = 15 * time.Second

func TestHostIsWhatItWas(t *testing.T) {
	e2etest.Built(t, qemu.Container)
	home := e2etest.Home(t)
	look := func(clusters ...string) snapshot.Snapshot { return snapshot.Take(t, clusters...) }
	before := look("host-a", "host-b")
	if n := len(before[snapshot.Settings]); n < 500 {
		t.Fatalf("only %d kernel settings can be read", n)
	}

	a := e2etest.New(t, "host-a", qemu.Container, home)
	b := e2etest.New(t, "host-b", qemu.Container, home)
	ma, mb := e2etest.Marks(t), e2etest.Marks(t)
	a.Ready(ma)
	b.Ready(mb)
	idA, idB := identity(t, a), identity(t, b)
	if idA == idB {
		t.Fatalf("two clusters have one identity: %s", idA)
	}
	if diff := before.Diff(look("host-a", "host-b"), snapshot.Living...); diff != "" {
		t.Errorf("the host differs while clusters are up:\n%s", diff)
	}

	if err := a.KillHost(); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	// Only cgroups aren't removed by the kernel itself.
	eventually.That(t, goneBudget, "all of the killed cluster is gone but cgroups", func() error {
		if now := look("host-a"); len(now[snapshot.Processes]) > 0 {
			return fmt.Errorf("%q", now[snapshot.Processes])
		}
		return nil
	})
	t.Logf("%7.1fs  after SIGKILL of the host process, nothing of its cluster runs", time.Since(start).Seconds())
	if got := identity(t, b); got != idB {
		t.Errorf("the other cluster was %s, and is %s", idB, got)
	}

	ma = e2etest.Marks(t)
	a.Up()
	a.Ready(ma)
	if got := identity(t, a); got != idA {
		t.Errorf("the killed cluster was %s, and is %s", idA, got)
	}

	// The remains of a kill can be removed too, and the other cluster stays.
	if err := a.KillHost(); err != nil {
		t.Fatal(err)
	}
	a.Down()
	if got := identity(t, b); got != idB {
		t.Errorf("the other cluster was %s, and is %s", idB, got)
	}
	b.Down()
	eventually.That(t, goneBudget, "the host is what it was", func() error {
		if diff := before.Diff(look("host-a", "host-b")); diff != "" {
			return errors.New("left behind:\n" + diff)
		}
		return nil
	})
}

// identity identifies a cluster: by its first objects, and its node.
func identity(t *testing.T, c *e2etest.Cluster) string {
	t.Helper()
	return strings.TrimSpace(c.Kubectl("get", "namespace/kube-system", "node/"+c.Node(), "-o", "jsonpath={.items[*].metadata.uid}"))
}
