package api

import (
	"context"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/operations/lifecycle"
	"google.golang.org/protobuf/types/known/durationpb"
)

// A record has what was asked for, as the message has it.
func TestOperationsAreAskedForWithTheMessage(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	steps := []operation.Step{{ID: "wipe", What: "wipe", Deadline: 1, Run: func(context.Context, *operation.Progress) error { return nil }}}
	var err error
	r.opts.Operations, err = operation.New(operation.Options{
		Store: r.opts.Store, Log: slog.New(slog.DiscardHandler), Dir: filepath.Join(t.TempDir(), "operations"),
		Definitions: []operation.Definition{{
			Name: lifecycle.Reset,
			Plan: func(_ context.Context, q operation.Request) (operation.Plan, error) {
				return operation.Plan{Steps: steps, Warnings: []string{string(q.Arguments)}}, nil
			},
			Steps: func(operation.Request) ([]operation.Step, error) { return steps, nil },
		}},
	})
	must(t, err)
	c := garboardv1connect.NewOperationServiceClient(r.serve().as(admin), host)
	m, err := ask(t, c.Reset, &apiv1.ResetRequest{DryRun: true, UserDisksToWipe: []string{"/dev/sdb"}, DrainTimeout: durationpb.New(time.Minute)})
	must(t, err)
	if got, want := m.Operation.Warnings, `{"drainTimeout":60000000000,"dryRun":true,"userDisksToWipe":["/dev/sdb"]}`; len(got) != 1 || got[0] != want {
		t.Errorf("arguments %q, want %s", got, want)
	}
}
