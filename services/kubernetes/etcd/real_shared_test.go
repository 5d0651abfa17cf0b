//go:build e2e

package etcd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// journal is the steps of an operation's coordinators, in order.
type journal struct {
	mu    sync.Mutex // guards lines
	lines []string
}

func (j *journal) note(format string, args ...any) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.lines = append(j.lines, fmt.Sprintf(format, args...))
}

func (j *journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return strings.Join(j.lines, "; ")
}

// operations runs the operations of a node: one with a step on each of three
// nodes, which stops at n2 until it is released.
func (n *realNode) operations(done *journal, release <-chan struct{}) (r *operation.Runner, end func()) {
	t := n.rig.t
	nodes := operation.Data[[]string]{Key: "nodes"}
	steps := []operation.Step{
		{ID: "look", What: "find the nodes", Deadline: time.Minute, Run: func(_ context.Context, p *operation.Progress) error {
			return nodes.Put(p, []string{"n1", "n2", "n3"})
		}},
		{ID: "each", What: "do it on each node", Deadline: time.Hour, Run: func(ctx context.Context, p *operation.Progress) error {
			found, err := nodes.Get(p)
			if err != nil {
				return err
			}
			var parts []operation.Part
			for _, name := range found {
				parts = append(parts, operation.Part{ID: name, What: "do it on " + name, Run: func(ctx context.Context, _ *operation.Progress) error {
					done.note("%s begins %s", n.name, name)
					if name == "n2" {
						select {
						case <-release:
						case <-ctx.Done():
							return ctx.Err()
						}
					}
					done.note("%s ends %s", n.name, name)
					return nil
				}})
			}
			return p.Each(ctx, 1, parts...)
		}},
	}
	r, err := operation.New(operation.Options{
		Store: resource.NewStore(), Log: slog.New(slog.NewTextHandler(io.Discard, nil)), Dir: filepath.Join(n.path("state"), "operations"), Shared: n.Shared(),
		Definitions: []operation.Definition{{
			Name: "each", Shared: true,
			Plan: func(context.Context, operation.Request) (operation.Plan, error) {
				return operation.Plan{Steps: steps}, nil
			},
			Steps: func(operation.Request) ([]operation.Step, error) { return steps, nil },
		}},
	})
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = r.Run(ctx) }()
	r.Open()
	return r, func() { cancel(); <-ended }
}

// The coordinator of an operation is killed in the middle of a step with a part for each
// of three nodes. Another control plane takes the operation over and ends it, with only
// the record in etcd. After its return, the former coordinator doesn't continue it.
func TestRealTakeOver(t *testing.T) {
	t.Parallel()
	r, node := realRig(t)
	a, b, c := node("a", config.Init), node("b", config.ControlPlane), node("c", config.ControlPlane)
	a.start()
	a.serves()
	r.knows(0, a.addr)
	for _, n := range []*realNode{b, c} {
		n.start()
		n.serves()
	}
	var done journal
	release := make(chan struct{})
	first, endFirst := a.operations(&done, release)
	second, endSecond := b.operations(&done, release)
	defer endSecond()
	begun, err := first.Start(t.Context(), operation.Ask{Name: "each", By: "jo"})
	must(t, err)
	eventually.That(t, 30*time.Second, "the part of n2 to run", func() error {
		if at := done.String(); at != "a begins n1; a ends n1; a begins n2" {
			return errors.New(at)
		}
		return nil
	})
	there, err := second.Elsewhere(t.Context())
	must(t, err)
	if len(there) != 1 || there[0].ID != begun.ID || there[0].Coordinator != "a" || there[0].Orphaned || there[0].Steps[1].Summary() != "1 of 3 done, n2" {
		t.Fatalf("b sees %+v", there)
	}
	if _, err := second.TakeOver(t.Context(), begun.ID, "eve", anyone); !errors.As(err, new(operation.Refusal)) || !strings.Contains(err.Error(), "node a is running each") {
		t.Fatalf("its coordinator is there: %v", err)
	}

	a.kill()
	endFirst()
	close(release)
	// The lease of the coordinator ends by itself.
	eventually.That(t, lockTTL+30*time.Second, "b to take it over", func() error {
		_, err := second.TakeOver(t.Context(), begun.ID, "eve", anyone)
		return err
	})
	eventually.That(t, 30*time.Second, "its end", func() error {
		o, err := second.Get(begun.ID)
		if err == nil && o.State != operation.Done {
			err = fmt.Errorf("it is %s: %s", o.State, o.Error)
		}
		return err
	})
	const want = "a begins n1; a ends n1; a begins n2; b begins n2; b ends n2; b begins n3; b ends n3"
	if got := done.String(); got != want {
		t.Errorf("done: %s", got)
	}

	a.start()
	a.serves()
	back, endBack := a.operations(&done, release)
	defer endBack()
	eventually.That(t, 30*time.Second, "a to know its end", func() error {
		o, err := back.Get(begun.ID)
		if err == nil && (o.State != operation.Done || o.Coordinator != "b") {
			err = fmt.Errorf("it is %s on %s: %s", o.State, o.Coordinator, o.Error)
		}
		return err
	})
	if got := done.String(); got != want {
		t.Errorf("done: %s", got)
	}
}

// anyone lets any node take an operation over.
func anyone(operation.Operation) error { return nil }
