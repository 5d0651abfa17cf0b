package api

import (
	"context"
	"log/slog"
	"path/filepath"
	"testing"

	"connectrpc.com/connect"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/operations/lifecycle"
)

// what the disks are is settled when somebody asks, and one that can't be wiped
// is a reason to do nothing.
func TestResetWithUserDisks(t *testing.T) {
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
	c := garboardv1connect.NewNodeServiceClient(r.serve().as(admin), host)
	_, err = ask(t, c.Reset, &apiv1.ResetRequest{DryRun: true, UserDisksToWipe: []string{"/dev/sdb", "/dev/sdz"}})
	wantCode(t, err, connect.CodeFailedPrecondition, "reset: --user-disks-to-wipe: there is no disk /dev/sdz")
	m, err := ask(t, c.Reset, &apiv1.ResetRequest{DryRun: true, UserDisksToWipe: []string{"/dev/sdb"}})
	must(t, err)
	if got, want := m.Operation.Warnings, `{"disks":[{"path":"/dev/sdb","size":2199023255552,"serial":"s1"}]}`; len(got) != 1 || got[0] != want {
		t.Errorf("arguments %q, want %s", got, want)
	}
}
