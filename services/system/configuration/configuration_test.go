package configuration

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/source"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/resource"
)

// document is a configuration that a node can use.
func document(t *testing.T) []byte {
	t.Helper()
	endpoint, err := config.ParseURL("https://10.5.0.2:6443")
	if err != nil {
		t.Fatal(err)
	}
	c, err := config.Generate(config.Options{ClusterName: "test", Endpoint: endpoint.String(), Type: config.Init, InstallDisk: "/dev/vda", Now: time.Now()})
	if err != nil {
		t.Fatal(err)
	}
	data, err := c.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// node is machined with a place where a configuration may be.
type node struct {
	mu   sync.Mutex // guards data
	data []byte     // nil: none there

	installed bool
	unlocked  chan struct{}

	store   *resource.Store
	graph   *dag.Graph
	applier *Applier
}

func run(t *testing.T, n *node, mount func(context.Context) (State, error)) {
	t.Helper()
	n.store = resource.NewStore()
	found := source.Source{Name: "test", Read: func(context.Context) ([]byte, error) {
		n.mu.Lock()
		defer n.mu.Unlock()
		if n.data == nil {
			return nil, fmt.Errorf("nothing on the desk: %w", boot.ErrNone)
		}
		return n.data, nil
	}}
	n.applier = NewApplier(ApplierOptions{Store: n.store, Log: slog.New(slog.DiscardHandler), StateDir: t.TempDir()})
	var err error
	n.graph, err = dag.New(dag.Options{}, Service(Options{Store: n.store, Applier: n.applier, Sources: []source.Source{found}, MountState: mount, Installed: n.installed, Unlocked: n.unlocked}))
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- n.graph.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	synctest.Wait()
}

func (n *node) put(data []byte) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.data = data
}

// events counts the events with a text.
func (n *node) events(text string) (count int) {
	for _, e := range n.graph.Events() {
		if e.Service == ID && strings.Contains(e.Message, text) {
			count++
		}
	}
	return count
}

func (n *node) up() bool {
	s, _ := n.graph.Status(ID)
	return s.Up
}

// S-269: what was found is a resource, and the service says from where.
func TestS269ConfigurationIsPublished(t *testing.T) {
	data := document(t)
	synctest.Test(t, func(t *testing.T) {
		n := &node{data: data}
		run(t, n, nil)
		c, err := Config(n.store)
		if err != nil || c.Machine.Type != config.Init {
			t.Fatalf("configuration %v, error %v", c, err)
		}
		if !n.up() || n.events("configuration from test") != 1 {
			t.Errorf("up %v, events %v", n.up(), n.graph.Events())
		}
	})
}

// A machine without a configuration, or with a broken one, says so once per
// finding, and takes a good one when it comes.
func TestMissingThenBrokenThenGood(t *testing.T) {
	data := document(t)
	synctest.Test(t, func(t *testing.T) {
		n := &node{}
		run(t, n, nil)
		time.Sleep(10 * time.Minute) // virtual
		synctest.Wait()
		if n.up() || n.events("nothing on the desk") != 1 {
			t.Errorf("without one: up %v, told %d times", n.up(), n.events("nothing on the desk"))
		}
		n.put(bytes.Replace(data, []byte("type: init"), []byte("typ: init"), 1))
		time.Sleep(retryMax + time.Second)
		synctest.Wait()
		if n.up() || n.events("did you mean type") != 1 {
			t.Errorf("with a broken one: up %v, told %d times", n.up(), n.events("did you mean type"))
		}
		if _, err := Config(n.store); !errors.Is(err, resource.ErrNotFound) {
			t.Errorf("a broken configuration was published: %v", err)
		}
		n.put(data)
		time.Sleep(retryMax + time.Second)
		synctest.Wait()
		if !n.up() {
			t.Error("a good one isn't taken")
		}
	})
}

// Maintenance mode is over once there is a configuration: machined must not open
// it again as it looks for one anew, or the node would be anybody's.
func TestMaintenanceNeverComesBack(t *testing.T) {
	data := document(t)
	synctest.Test(t, func(t *testing.T) {
		n := &node{}
		run(t, n, nil)
		if _, err := n.applier.Apply(t.Context(), Request{Text: data, First: true}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if err := n.graph.Restart(t.Context(), ID); err != nil {
			t.Fatal(err)
		}
		time.Sleep(answerGrace + time.Second)
		synctest.Wait()
		stage, err := Stages.Get(n.store, StageID)
		if err != nil || stage.Spec != Configured || !n.up() {
			t.Errorf("stage %v, %v, up %v", stage.Spec, err, n.up())
		}
		if _, err := n.applier.Apply(t.Context(), Request{Text: data, First: true}); !errors.Is(err, ErrConfigured) {
			t.Errorf("a second first configuration: %v", err)
		}
	})
}

// A source that isn't reached gets the network, and maintenance mode stays closed meanwhile.
func TestNetworkOfASource(t *testing.T) {
	data := document(t)
	synctest.Test(t, func(t *testing.T) {
		store := resource.NewStore()
		a := NewApplier(ApplierOptions{Store: store, Log: slog.New(slog.DiscardHandler), StateDir: t.TempDir()})
		stage := func(want Stage) {
			t.Helper()
			if s, err := Stages.Get(store, StageID); err != nil || s.Spec != want {
				t.Errorf("stage %v, %v, want %s", s.Spec, err, want)
			}
		}
		began := time.Now()
		if err := a.NeedNetwork(t.Context(), time.Second); err != nil || time.Since(began) != time.Second {
			t.Errorf("after %s: %v", time.Since(began), err)
		}
		stage(Searching)
		waits, stop := context.WithTimeout(t.Context(), time.Second)
		defer stop()
		if err := Decided(store).Wait(waits); err == nil {
			t.Error("others take it for decided")
		}
		if err := a.maintain(Maintenance); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(a.NeedNetwork(t.Context(), time.Second), Decided(store).Wait(t.Context())); err != nil {
			t.Error(err)
		}
		stage(Maintenance)
		if err := a.maintain(Searching); err != nil { // a STATE came late, and the node has had a configuration
			t.Fatal(err)
		}
		stage(Searching)
		if err := a.begin("test", data); err != nil {
			t.Fatal(err)
		}
		stage(Configured)
	})
}

// Before the disk is there that this boot is from, nobody can give the node another configuration.
func TestDiskOfThisBootIsAwaited(t *testing.T) {
	data := document(t)
	synctest.Test(t, func(t *testing.T) {
		var came, gone atomic.Bool
		n := &node{data: data}
		n.installed = true
		run(t, n, func(context.Context) (State, error) {
			switch {
			case gone.Load():
				return StateAbsent, errors.New("a newer system")
			case !came.Load():
				return StateLate, errors.New("the disk isn't there")
			}
			return StateMounted, nil
		})
		maintained := func() bool {
			s, err := Stages.Get(n.store, StageID)
			return err == nil && s.Spec == Maintenance
		}
		if n.up() || maintained() || n.events("the disk isn't there; looking again in 2s, later at least every 30s; maintenance mode stays closed: the disk or the TPM of this boot may still come") != 1 {
			t.Errorf("up %v, maintenance mode %v, events %v", n.up(), maintained(), n.graph.Events())
		}
		gone.Store(true)
		time.Sleep(retryMax + time.Second)
		synctest.Wait()
		if !maintained() {
			t.Error("nobody can give it a configuration")
		}
		came.Store(true)
		gone.Store(false)
		time.Sleep(retryMax + time.Second)
		synctest.Wait()
		if !n.up() {
			t.Error("it isn't looked at again")
		}
	})
}

// A machine whose keys don't open STATE waits for its recovery key, and takes no configuration, from whatever source.
// It goes on at once when it is unlocked.
func TestLockedStateWaitsForItsRecoveryKey(t *testing.T) {
	data := document(t)
	synctest.Test(t, func(t *testing.T) {
		var open atomic.Bool
		n := &node{data: data, unlocked: make(chan struct{}, 1)}
		run(t, n, func(context.Context) (State, error) {
			if open.Load() {
				return StateMounted, nil
			}
			return StateLocked, errors.New("the nodeID key of slot 0: no key with this passphrase")
		})
		if stage, err := Stages.Get(n.store, StageID); err != nil || stage.Spec != Locked || n.up() {
			t.Errorf("%v, %v, up %v", stage, err, n.up())
		}
		if n.events("looking again in 2s, later at least every 30s: waiting for its recovery key (gbctl -n ADDRESS unlock --insecure, or unlock at the console)") != 1 {
			t.Errorf("events %v", n.graph.Events())
		}
		time.Sleep(time.Hour + time.Second)
		open.Store(true)
		n.unlocked <- struct{}{}
		synctest.Wait()
		if stage, err := Stages.Get(n.store, StageID); err != nil || stage.Spec != Configured || !n.up() {
			t.Errorf("%v, %v, up %v", stage, err, n.up())
		}
	})
}

// STATE is where the node's own configuration is: as long as it can't be looked
// at, no other is taken.
func TestBrokenStateIsNotPassedBy(t *testing.T) {
	data := document(t)
	synctest.Test(t, func(t *testing.T) {
		var broken atomic.Bool
		broken.Store(true)
		n := &node{data: data}
		run(t, n, func(context.Context) (State, error) {
			if broken.Load() {
				return StateBroken, errors.New("structure needs cleaning")
			}
			return StateMounted, nil
		})
		if n.up() || n.events("mount STATE: structure needs cleaning") != 1 {
			t.Errorf("up %v, events %v", n.up(), n.graph.Events())
		}
		broken.Store(false)
		time.Sleep(retryMax + time.Second)
		synctest.Wait()
		if !n.up() {
			t.Error("it isn't looked at again")
		}
	})
}
