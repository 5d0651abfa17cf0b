package doctor

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/operation"
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
		n.finds("operation-asks", warning, o.ID+" waits for an answer: Go on?", "gbctl operation answer "+o.ID)
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
