package api

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	contract "github.com/garboard-os/garboard/api"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// operating is a rig whose node has two operations: one for operators that waits for
// an answer, and one for administrators that waits for ever.
func operating(t *testing.T) *rig {
	r := newRig(t)
	asks := operation.Step{ID: "ask", What: "ask whether to go on", Deadline: time.Minute, Run: func(ctx context.Context, p *operation.Progress) error {
		p.Report("it is up to you")
		answer, err := p.Ask(ctx, operation.Question{ID: "go-on", Text: "Go on?", Options: []string{"yes", "no"}, Timeout: time.Hour})
		if err == nil && answer != "yes" {
			err = errors.New("told not to go on")
		}
		return err
	}}
	waits := operation.Step{ID: "wait", What: "wait", Deadline: time.Hour, Optional: true, Run: func(ctx context.Context, _ *operation.Progress) error {
		<-ctx.Done()
		return ctx.Err()
	}}
	definition := func(name, role string, s operation.Step) operation.Definition {
		return operation.Definition{
			Name: name, Role: role,
			Plan: func(context.Context, operation.Request) (operation.Plan, error) {
				return operation.Plan{Steps: []operation.Step{s}, Warnings: []string{"mind the gap"}}, nil
			},
			Steps: func(operation.Request) ([]operation.Step, error) { return []operation.Step{s}, nil },
		}
	}
	var err error
	r.opts.Operations, err = operation.New(operation.Options{
		Store: r.opts.Store, Log: slog.New(slog.DiscardHandler), Dir: filepath.Join(t.TempDir(), "operations"), Shared: orphans{},
		Definitions: []operation.Definition{
			definition("question", string(contract.Operator), asks),
			definition("patience", "", waits),
			shared(definition("upgrade", string(contract.Operator), waits)), shared(definition("rotate", "", waits)),
		},
	})
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- r.opts.Operations.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	r.opts.Operations.Open()
	return r.serve()
}

func (r *rig) operate(name string) string {
	r.t.Helper()
	o, err := r.opts.Operations.Start(r.t.Context(), operation.Ask{Name: name, By: "joe"})
	must(r.t, err)
	return o.ID
}

// progress is streamed, questions are asked through the API, and a client that
// has gone hears the rest later.
func TestOperationIsWatchedAndAnswered(t *testing.T) {
	t.Parallel()
	r := operating(t)
	id := r.operate("question")
	c := garboardv1connect.NewOperationServiceClient(r.as(operator), host)

	// A reader hears everything up to the question, and goes.
	watcher := garboardv1connect.NewOperationServiceClient(r.as(reader), host)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream, err := watcher.Watch(ctx, connect.NewRequest(&apiv1.WatchOperationRequest{Id: id}))
	must(t, err)
	var received []string
	var cursor uint64
	var question *apiv1.OperationQuestion
	for question == nil && stream.Receive() {
		for _, e := range stream.Msg().Events {
			received, cursor = append(received, strings.TrimPrefix(e.Kind.String(), "KIND_")+" "+e.Text), e.Cursor
		}
		question = stream.Msg().Operation.Question
	}
	cancel()
	stream.Close()
	want := "CHANGED asked by joe|SAID warning: mind the gap|CHANGED ask whether to go on|SAID it is up to you|ASKS Go on? [yes/no]"
	if got := strings.Join(received, "|"); got != want {
		t.Errorf("received %s\nwant  %s", got, want)
	}
	if question.GetId() != "go-on" || question.GetStep() != "ask" || question.GetTimeout().AsDuration() != time.Hour {
		t.Errorf("asked %v", question)
	}

	_, err = ask(t, c.Answer, &apiv1.AnswerOperationRequest{Id: id, Question: "go-on", Answer: "perhaps"})
	wantCode(t, err, connect.CodeFailedPrecondition, "yes, no")
	_, err = ask(t, c.Answer, &apiv1.AnswerOperationRequest{Id: id, Question: "other", Answer: "yes"})
	wantCode(t, err, connect.CodeFailedPrecondition, "other")
	_, err = ask(t, watcher.Answer, &apiv1.AnswerOperationRequest{Id: id, Question: "go-on", Answer: "yes"})
	wantCode(t, err, connect.CodePermissionDenied)
	_, err = ask(t, c.Answer, &apiv1.AnswerOperationRequest{Id: id, Question: "go-on", Answer: "yes"})
	must(t, err)
	wantParts(t, r.audited(), "OperationService/Answer peer=jane", "go-on")

	stream, err = watcher.Watch(t.Context(), connect.NewRequest(&apiv1.WatchOperationRequest{Id: id, After: cursor}))
	must(t, err)
	received = nil
	var last *apiv1.Operation
	for stream.Receive() {
		last = stream.Msg().Operation
		for _, e := range stream.Msg().Events {
			received = append(received, e.Text)
		}
	}
	must(t, stream.Err())
	if len(received) != 3 || !strings.HasPrefix(received[0], "yes, by jane over the machine API") || last.State != apiv1.Operation_STATE_DONE || last.Steps[0].State != apiv1.OperationStep_STATE_DONE {
		t.Errorf("received %q, and it is %v", received, last)
	}
	all, err := ask(t, watcher.List, &apiv1.ListOperationsRequest{})
	must(t, err)
	if len(all.Operations) != 3 || all.Operations[0].Id != id || all.Operations[0].Role != "os:operator" || all.Operations[0].Ended == nil {
		t.Errorf("%v", all)
	}
}

// A node that has just started is asked again by those who follow an operation.
func TestOperationsThatArentReadYet(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	var err error
	r.opts.Operations, err = operation.New(operation.Options{Store: r.opts.Store, Log: slog.New(slog.DiscardHandler), Dir: t.TempDir()})
	must(t, err)
	r.serve()
	stream, err := garboardv1connect.NewOperationServiceClient(r.as(reader), host).Watch(t.Context(), connect.NewRequest(&apiv1.WatchOperationRequest{Id: "reboot-x"}))
	must(t, err)
	if stream.Receive() {
		t.Error("what isn't known is watched")
	}
	wantCode(t, stream.Err(), connect.CodeUnavailable, "STATE isn't mounted")
}

// Who may not begin an operation may not abort it.
func TestAbortTakesTheRoleOfTheOperation(t *testing.T) {
	t.Parallel()
	r := operating(t)
	id := r.operate("patience")
	asOperator := garboardv1connect.NewOperationServiceClient(r.as(operator), host)
	asAdmin := garboardv1connect.NewOperationServiceClient(r.as(admin), host)
	_, err := ask(t, asOperator.Abort, &apiv1.AbortOperationRequest{Id: id})
	wantCode(t, err, connect.CodePermissionDenied, id, "os:admin")
	_, err = ask(t, asOperator.Abort, &apiv1.AbortOperationRequest{Id: "patience-x"})
	wantCode(t, err, connect.CodeNotFound, "patience-x")
	done, err := ask(t, asAdmin.Abort, &apiv1.AbortOperationRequest{Id: id})
	must(t, err)
	if !strings.Contains(done.Message, id) {
		t.Errorf("%q", done.Message)
	}
	_, err = ask(t, asAdmin.Abort, &apiv1.AbortOperationRequest{Id: id})
	wantCode(t, err, connect.CodeFailedPrecondition, "ended already: aborted")
	stream, err := asAdmin.Watch(t.Context(), connect.NewRequest(&apiv1.WatchOperationRequest{Id: "patience-x"}))
	must(t, err)
	if stream.Receive() {
		t.Error("what isn't there is watched")
	}
	wantCode(t, stream.Err(), connect.CodeNotFound, "patience-x")
}

func shared(d operation.Definition) operation.Definition {
	d.Shared = true
	return d
}

// orphans are two operations of a node that is gone, in place of etcd.
type orphans struct{}

func (orphans) List(context.Context) (all []operation.SharedRecord, _ error) {
	for _, name := range []string{"upgrade", "rotate"} {
		all = append(all, operation.SharedRecord{ID: name + "-a", Record: fmt.Appendf(nil,
			`{"format": 2, "id": "%s-a", "name": %q, "by": "joe", "began": "2026-05-01T12:00:00Z", "state": "running", "boots": 1, "coordinator": "n9",
			"steps": [{"id": "wait", "what": "wait", "state": "running", "deadline": 3600000000000, "optional": true, "parts": [{"id": "n8", "what": "wait for n8", "state": "done"}]}]}`, name, name)})
	}
	return all, nil
}

func (o orphans) Claim(ctx context.Context, h operation.Holder) (operation.Claim, error) {
	all, err := o.List(ctx)
	at := slices.IndexFunc(all, func(r operation.SharedRecord) bool { return r.ID == h.ID })
	return &orphan{all[at].Record}, err
}

func (orphans) Delete(context.Context, string) error { return nil }

type orphan struct{ record []byte }

func (*orphan) Node() string                                   { return "n1" }
func (o *orphan) Read(context.Context) ([]byte, error)         { return o.record, nil }
func (o *orphan) Write(_ context.Context, record []byte) error { o.record = record; return nil }
func (*orphan) Lost() <-chan struct{}                          { return nil }
func (*orphan) Release(context.Context) error                  { return nil }

// An operation of a node that is gone is listed on the others, and taken over by a caller who
// may start it.
func TestTakeOverTakesTheRoleOfTheOperation(t *testing.T) {
	t.Parallel()
	r := operating(t)
	c := garboardv1connect.NewOperationServiceClient(r.as(operator), host)
	var all *apiv1.ListOperationsResponse
	eventually.That(t, 10*time.Second, "the journals are read", func() (err error) {
		all, err = ask(t, c.List, &apiv1.ListOperationsRequest{})
		return err
	})
	if len(all.Operations) != 2 || all.Warning != "" {
		t.Fatalf("listed %v", all)
	}
	o := all.Operations[0]
	if o.Id != "upgrade-a" || !o.Orphaned || !o.Elsewhere || o.Coordinator != "n9" || o.Role != "os:operator" ||
		len(o.Steps[0].Parts) != 1 || o.Steps[0].Parts[0].Id != "n8" || o.Steps[0].Parts[0].State != apiv1.OperationStep_STATE_DONE {
		t.Errorf("listed %v", o)
	}
	_, err := ask(t, c.TakeOver, &apiv1.TakeOverOperationRequest{Id: "rotate-a"})
	wantCode(t, err, connect.CodePermissionDenied, "os:admin")
	_, err = ask(t, c.TakeOver, &apiv1.TakeOverOperationRequest{Id: "none"})
	wantCode(t, err, connect.CodeNotFound, "no such operation")
	_, err = ask(t, garboardv1connect.NewOperationServiceClient(r.as(reader), host).TakeOver, &apiv1.TakeOverOperationRequest{Id: "upgrade-a"})
	wantCode(t, err, connect.CodePermissionDenied)
	taken, err := ask(t, c.TakeOver, &apiv1.TakeOverOperationRequest{Id: "upgrade-a"})
	must(t, err)
	if taken.Operation.Coordinator != "n1" || taken.Operation.State != apiv1.Operation_STATE_RUNNING {
		t.Errorf("took over %v", taken)
	}
	_, err = ask(t, c.TakeOver, &apiv1.TakeOverOperationRequest{Id: "upgrade-a"})
	wantCode(t, err, connect.CodeFailedPrecondition, "it runs on this node")
	all, err = ask(t, c.List, &apiv1.ListOperationsRequest{})
	must(t, err)
	if len(all.Operations) != 2 || all.Operations[0].Elsewhere {
		t.Errorf("listed %v", all)
	}
}
