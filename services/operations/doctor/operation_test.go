package doctor

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/system/slots"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// An operation that waits for a person, and then fails, is told of until one of its
// name does well, or nobody can want to know any more.
func TestOperations(t *testing.T) {
	t.Parallel()
	n := start(t, config.Worker)
	ask := operation.Step{ID: "ask", What: "ask", Deadline: time.Minute, Run: func(ctx context.Context, p *operation.Progress) error {
		answer, err := p.Ask(ctx, operation.Question{ID: "go-on", Text: "Go on?", Timeout: time.Hour})
		if err == nil && answer != "yes" {
			err = errors.New("the disk is gone")
		}
		return err
	}}
	steps := []operation.Step{ask}
	runner, err := operation.New(operation.Options{
		Store: n.store, Log: slog.New(slog.DiscardHandler), Dir: filepath.Join(t.TempDir(), "operations"),
		Definitions: []operation.Definition{{
			Name: "upgrade", Exclusive: true,
			Plan: func(context.Context, operation.Request) (operation.Plan, error) {
				return operation.Plan{Steps: steps}, nil
			},
			Steps: func(operation.Request) ([]operation.Step, error) { return steps, nil },
		}},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- runner.Run(ctx) }()
	defer func() { cancel(); <-ended }()
	runner.Open()
	run := func(answer string) string {
		var o operation.Operation
		eventually.That(t, patience, "another one to begin", func() (err error) {
			o, err = runner.Start(t.Context(), operation.Ask{Name: "upgrade", By: "jo"})
			return err
		})
		n.finds("operation-asks", warning, o.ID+" waits for an answer: Go on?", "gbctl -n ADDRESS operation answer "+o.ID)
		if err := runner.Answer(o.ID, "go-on", answer, "jo"); err != nil {
			t.Fatal(err)
		}
		return o.ID
	}
	id := run("no")
	n.finds("operation-failed", warning, id+" has failed: ask: the disk is gone")
	n.lacks("operation-asks")
	run("yes")
	n.healthy()
	run("no")
	n.finds("operation-failed", warning, "the disk is gone")
	n.now = func() time.Time { return time.Now().Add(failedTime + time.Hour) }
	n.lacks("operation-failed")
}

// A system that was staged fails with nobody there: whoever asks on the next day hears it.
func TestSystemFailed(t *testing.T) {
	t.Parallel()
	n := start(t, config.Worker)
	put := func(name string, status slots.Status) {
		n.must(slots.Statuses.Put(n.store.As(slots.ID), name, status))
	}
	put("A", slots.Status{State: boot.SlotGood, Version: "v1", Running: true, Next: true, Since: time.Now()})
	put("B", slots.Status{State: boot.SlotTrying, Version: "v2", Since: time.Now()})
	n.healthy()
	failed := slots.Status{State: boot.SlotBad, Version: "v2", Since: time.Now(), Reason: "not healthy within 10m0s: kubelet"}
	put("B", failed)
	n.finds("system-failed", warning, "Garboard v2 in slot B has failed: not healthy within 10m0s: kubelet")
	n.must(operation.Operations.Put(n.store.As(operation.ID), "upgrade-1", operation.Spec{Name: "reset", State: operation.Failed, Began: failed.Since, Ended: time.Now(), Error: "no room"}))
	n.finds("system-failed", warning)
	n.must(operation.Operations.Put(n.store.As(operation.ID), "upgrade-1", operation.Spec{Name: "upgrade", State: operation.Failed, Began: failed.Since, Ended: time.Now(), Error: "slot B is bad"}))
	n.lacks("system-failed")
	n.must(operation.Operations.Delete(n.store.As(operation.ID), "upgrade-1"))
	n.finds("system-failed", warning)
	n.now = func() time.Time { return time.Now().Add(failedTime + time.Hour) }
	n.lacks("system-failed")
}
