package doctor

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/source"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/system/clock"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/volumes"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

func TestMaintenance(t *testing.T) {
	t.Parallel()
	n := start(t, config.Init, func(n *node, services map[string]*dag.Service) {
		n.config, n.text = nil, nil
		// The service as it is, with sources of its own.
		applier := configuration.NewApplier(configuration.ApplierOptions{Store: n.store, Log: n.logs.Logger("machined"), StateDir: n.path("state")})
		given := configuration.Service(configuration.Options{Store: n.store, Applier: applier, Sources: []source.Source{
			{Name: "seed", Read: func(context.Context) ([]byte, error) {
				return []byte("version: v1alpha1\nmachine:\n  typ: init\n"), nil
			}},
		}})
		services["machined"] = &given
	})
	n.finds("maintenance", failure, "machine.typ", "did you mean type", "apply-config --insecure")
	// The console has it, too, without a look at anything.
	known := New(Options{
		Store: n.store, Statuses: n.graph.Statuses, Events: n.graph.Events, SinceBoot: n.sinceBoot,
		statfs: func(path string) (space, bool) { t.Errorf("it looks at %s", path); return space{}, false },
	}).Known()
	if len(known) == 0 || known[0].Id != "maintenance" {
		t.Errorf("%v", known)
	}
	// What waits for a configuration isn't repaired by itself.
	for _, f := range n.diagnose() {
		if f.Id != "maintenance" && f.Severity > info {
			t.Errorf("beside it:\n%s", show(f))
		}
	}
}

func TestDiskNotReady(t *testing.T) {
	t.Parallel()
	n := start(t, config.Init, func(_ *node, services map[string]*dag.Service) {
		services["disks"].Run = func(ctx context.Context, h *dag.Handle) error {
			h.Event(`Waiting for disk "/dev/sdz" to appear`)
			<-ctx.Done()
			return nil
		}
	})
	n.finds("disks-not-ready", info, `disk "/dev/sdz" to appear`)
	n.later(startTime)
	n.finds("disks-not-ready", failure, `disk "/dev/sdz" to appear`)
	n.finds("kubelet-not-running", info, "Follows from disks-not-ready")
}

func TestDiskFull(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		id    string
		space space
	}{
		{"disk-full", space{size: 10 << 30, free: 10 << 20, nodes: 1000, left: 900}},
		{"disk-full", space{size: 10 << 30, free: 5 << 30, nodes: 1000, left: 1}},
		{"disk-nearly-full", space{size: 10 << 30, free: 600 << 20, nodes: 1000, left: 900}},
	} {
		n := start(t, config.Worker, func(n *node, _ map[string]*dag.Service) {
			n.full = func(path string) (space, bool) {
				if path == n.path(boot.EphemeralDir) {
					return c.space, true
				}
				return space{size: 1 << 30, free: 1 << 29}, true
			}
		})
		severity := failure
		if c.id == "disk-nearly-full" {
			severity = warning
		}
		n.finds(c.id, severity, "EPHEMERAL", "/var")
		eventually.That(t, patience, "nothing beside it", func() error { // the node starts
			if all := n.diagnose(); len(all) != 1 {
				return errors.New(showAll(all))
			}
			return nil
		})
	}
}

func TestMemoryLow(t *testing.T) {
	t.Parallel()
	n := start(t, config.Worker, func(n *node, _ map[string]*dag.Service) {
		n.write("MemTotal:  2000000 kB\nMemAvailable:  50000 kB\n", "/proc/meminfo")
	})
	n.finds("memory-low", warning, "48 MiB of 1953 MiB", "MemAvailable: 50000 kB")
	n.write("MemTotal:  2000000 kB\nMemAvailable:  1500000 kB\n", "/proc/meminfo")
	n.healthy()
}

func TestClockNotSynced(t *testing.T) {
	t.Parallel()
	n := start(t, config.Worker, func(n *node, _ map[string]*dag.Service) {
		n.must(clock.Statuses.Put(n.store.As(clock.ID), clock.StatusID, clock.Status{Source: clock.SourceNone, Message: "10.5.0.1:123: read udp 10.5.0.2:41000->10.5.0.1:123: i/o timeout"}))
	})
	n.finds("clock-not-synced", warning, "10.5.0.1:123", "machine.time.servers")
	n.must(clock.Statuses.Put(n.store.As(clock.ID), clock.StatusID, clock.Status{Message: "a 1s, b 5s", Reason: clock.ServersDisagree}))
	n.finds("clock-not-synced", warning, "don't agree")
	n.must(clock.Statuses.Put(n.store.As(clock.ID), clock.StatusID, clock.Status{Message: "by a it is 2030", Reason: clock.Unconfirmed}))
	n.finds("clock-not-synced", warning, "by a it is 2030", "at least two servers", "gbctl -n ADDRESS time set")
	n.must(clock.Statuses.Put(n.store.As(clock.ID), clock.StatusID, clock.Status{Message: "by a it is 2020", Reason: clock.Impossible}))
	n.finds("clock-not-synced", warning, "by a it is 2020", "gbctl -n ADDRESS time set")
	n.must(clock.Statuses.Put(n.store.As(clock.ID), clock.StatusID, clock.Status{Synced: true, Unusable: []string{"10.5.0.3: i/o timeout"}}))
	n.finds("time-server-unusable", warning, "10.5.0.3: i/o timeout", "machine.time.servers")
	n.must(clock.Statuses.Put(n.store.As(clock.ID), clock.StatusID, clock.Status{Synced: true}))
	n.healthy()
}

func TestClockWrong(t *testing.T) {
	t.Parallel()
	n := start(t, config.Worker)
	n.now = func() time.Time { return time.Now().Add(-2 * time.Hour) }
	n.finds("clock-wrong", failure, "off by -2h", " it is ")
	n.now = func() time.Time { return time.Now().Add(-30 * 24 * time.Hour) }
	n.finds("clock-wrong", failure, "before the time", "is valid from")
	n.now = time.Now
	n.healthy()
}

// A look that hangs is told, and not repeated until it has returned.
func TestCollectorUnanswered(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	n := start(t, config.Worker)
	n.healthy()
	d := n.doctor()
	calls := 0
	d.o.statfs = func(string) (space, bool) {
		calls++
		<-release
		return space{}, false
	}
	for range 2 {
		began := time.Now()
		found, _ := d.Diagnose(t.Context())
		if err := pace().Kept(began, time.Now(), budget); err != nil {
			t.Error(err)
		}
		if len(found) != 1 || found[0].Id != "look-unanswered" || !strings.Contains(found[0].Evidence[0], "free space") {
			t.Errorf("found:\n%s", showAll(found))
		}
	}
	close(release)
	eventually.That(t, patience, "the look to return", func() (err error) {
		d.stuck.Range(func(look, _ any) bool { err = fmt.Errorf("%s hangs", look); return false })
		return err
	})
	if calls > 2 { // STATE and EPHEMERAL
		t.Errorf("%d calls, while the first one hung", calls)
	}
}

// All that ask at once share one diagnosis, and one that gives up gets nothing.
func TestDiagnosisIsShared(t *testing.T) {
	t.Parallel()
	asked := make(chan struct{}, 100)
	n := start(t, config.Worker)
	n.api.fail("/readyz", func(w http.ResponseWriter) {
		asked <- struct{}{}
		w.WriteHeader(http.StatusOK)
	})
	d := n.doctor()
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if found, checked := d.Diagnose(gone); found != nil || checked != nil {
		t.Errorf("who gave up got %v, %v", found, checked)
	}
	results := make(chan int, 10)
	for range 10 {
		go func() {
			_, checked := d.Diagnose(t.Context())
			results <- len(checked)
		}()
	}
	for range 10 {
		if <-results == 0 {
			t.Error("nothing was checked")
		}
	}
	if len(asked) > 6 { // two questions of each of at most three runs
		t.Errorf("the API server was asked %d times", len(asked))
	}
}

func TestRecoveryKeys(t *testing.T) {
	t.Parallel()
	n := start(t, config.Worker)
	n.must(volumes.Statuses.Put(n.store.As("runtime.VolumeController"), boot.LabelState, volumes.Status{Layers: "LUKS2 (0 nodeID), xfs", NoRecovery: true}))
	n.finds("recovery-key-missing", info, "STATE is encrypted without a recovery key", "LUKS2 (0 nodeID)", "gbctl -n ADDRESS recovery-key add")
	n = start(t, config.Worker, func(n *node, _ map[string]*dag.Service) { n.config, n.text = nil, nil })
	n.must(configuration.Stages.Put(n.store.As(configuration.ID), configuration.StageID, configuration.Locked))
	n.finds("disk-locked", failure, "No key of this machine opens STATE", "unlock --insecure")
}
