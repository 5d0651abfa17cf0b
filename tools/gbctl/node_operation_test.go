package main

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// operationService has an operation of each kind:
//
//	reboot-done     is done, and the connection drops in the middle of telling so
//	reboot-cut      the same, with the node's power
//	reset-failed    has failed
//	upgrade-asks    waits for an answer
//	drain-patient   goes on for ever
//	…-now           has ended its node
//	upgrade-staged  is done, and its node runs
//	upgrade-orphan  runs on another node, which is gone
type operationService struct {
	garboardv1connect.UnimplementedOperationServiceHandler
	node     *node
	once     sync.Once
	answered chan struct{}          // closed with the answer
	reverted atomic.Pointer[string] // why upgrade-now has failed, after the restart of its node
}

var operationBegan = time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)

func operationMessage(id string, state apiv1.Operation_State) *apiv1.Operation {
	o := &apiv1.Operation{
		Id: id, Name: "reset", State: state, By: "admin", Began: timestamppb.New(operationBegan), Role: "os:admin",
		Steps: []*apiv1.OperationStep{{Id: "drain", What: "evict the pods", State: apiv1.OperationStep_STATE_DONE}, {Id: "last", What: "end it", State: apiv1.OperationStep_STATE_RUNNING}},
	}
	switch state {
	case apiv1.Operation_STATE_RUNNING:
		return o
	case apiv1.Operation_STATE_FAILED:
		o.Error = "last: the disk is gone"
		o.Steps[1].State = apiv1.OperationStep_STATE_FAILED
	default:
		o.Steps[1].State = apiv1.OperationStep_STATE_DONE
	}
	o.Ended = timestamppb.New(operationBegan.Add(90 * time.Second))
	return o
}

func (s *operationService) asks() *apiv1.Operation {
	o := operationMessage("upgrade-asks", apiv1.Operation_STATE_RUNNING)
	select {
	case <-s.answered:
		return operationMessage("upgrade-asks", apiv1.Operation_STATE_DONE)
	default:
		o.Question = &apiv1.OperationQuestion{Id: "go-on", Step: "last", Text: "Go on?", Options: []string{"yes", "no"}}
		return o
	}
}

// listTime is what a list takes where etcd doesn't run.
const listTime = 5 * time.Second

func (s *operationService) List(ctx context.Context, _ *connect.Request[apiv1.ListOperationsRequest]) (*connect.Response[apiv1.ListOperationsResponse], error) {
	if end, ok := ctx.Deadline(); ok && time.Until(end) < listTime {
		return nil, connect.NewError(connect.CodeDeadlineExceeded, errors.New("the list takes longer"))
	}
	orphan := operationMessage("upgrade-orphan", apiv1.Operation_STATE_RUNNING)
	orphan.Coordinator, orphan.Elsewhere, orphan.Orphaned = "cp3", true, true
	all := []*apiv1.Operation{
		operationMessage("reboot-done", apiv1.Operation_STATE_DONE), operationMessage("reset-failed", apiv1.Operation_STATE_FAILED), s.asks(), orphan,
	}
	if why := s.reverted.Load(); why != nil {
		o := operationMessage("upgrade-now", apiv1.Operation_STATE_FAILED)
		o.Error = "prove: slot B is bad: " + *why + ". The machine runs the system in slot A"
		all = append(all, o)
	}
	return answerWith(&apiv1.ListOperationsResponse{Operations: all})
}

func (s *operationService) TakeOver(_ context.Context, r *connect.Request[apiv1.TakeOverOperationRequest]) (*connect.Response[apiv1.TakeOverOperationResponse], error) {
	if r.Msg.Id != "upgrade-orphan" {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("take over "+r.Msg.Id+": it runs on this node"))
	}
	return answerWith(&apiv1.TakeOverOperationResponse{Operation: operationMessage(r.Msg.Id, apiv1.Operation_STATE_RUNNING)})
}

func (s *operationService) Watch(ctx context.Context, r *connect.Request[apiv1.WatchOperationRequest], stream *connect.ServerStream[apiv1.OperationUpdate]) error {
	const said, changed = apiv1.OperationEvent_KIND_SAID, apiv1.OperationEvent_KIND_CHANGED
	first := []*apiv1.OperationEvent{
		{Cursor: 1, Kind: changed, State: "running", Text: "asked by admin"}, {Cursor: 2, Kind: changed, Step: "drain", State: "running", Text: "evict the pods"},
		{Cursor: 3, Kind: said, Step: "drain", Text: "2 pods are left"},
	}
	rest := []*apiv1.OperationEvent{
		{Cursor: 4, Kind: changed, Step: "drain", State: "done"}, {Cursor: 5, Kind: changed, Step: "last", State: "running", Text: "end it"},
	}
	if r.Msg.After < 3 {
		if err := stream.Send(&apiv1.OperationUpdate{Operation: operationMessage(r.Msg.Id, apiv1.Operation_STATE_RUNNING), Events: first}); err != nil {
			return err
		}
	}
	switch r.Msg.Id {
	case "reboot-now", "shutdown-now", "reset-now", "upgrade-now", "rollback-now", "install-now":
		o := operationMessage(r.Msg.Id, apiv1.Operation_STATE_RUNNING)
		o.Steps[1].Id, o.Steps[1].State = "end", apiv1.OperationStep_STATE_DONE
		return stream.Send(&apiv1.OperationUpdate{Operation: o, Events: rest[:1]})
	case "upgrade-staged":
		rest = append(rest, &apiv1.OperationEvent{Cursor: 6, Kind: changed, Step: "last", State: "done"}, &apiv1.OperationEvent{Cursor: 7, Kind: changed, State: "done"})
		return stream.Send(&apiv1.OperationUpdate{Operation: operationMessage(r.Msg.Id, apiv1.Operation_STATE_DONE), Events: rest})
	case "reboot-done", "reboot-cut":
		if r.Msg.After < 3 && r.Msg.Id == "reboot-cut" {
			panic(http.ErrAbortHandler)
		}
		if r.Msg.After < 3 {
			return connect.NewError(connect.CodeUnavailable, errors.New("the node's API stops"))
		}
		rest = append(rest, &apiv1.OperationEvent{Cursor: 6, Kind: changed, Step: "last", State: "done"}, &apiv1.OperationEvent{Cursor: 7, Kind: changed, State: "done"})
		return stream.Send(&apiv1.OperationUpdate{Operation: operationMessage(r.Msg.Id, apiv1.Operation_STATE_DONE), Events: rest})
	case "upgrade-orphan":
		rest = append(rest, &apiv1.OperationEvent{Cursor: 6, Kind: said, Step: "last", Part: "cp2", Text: "2 of 3 pods"},
			&apiv1.OperationEvent{Cursor: 7, Kind: changed, Step: "last", Part: "cp2", State: "done"}, &apiv1.OperationEvent{Cursor: 8, Kind: changed, State: "done"})
		return stream.Send(&apiv1.OperationUpdate{Operation: operationMessage(r.Msg.Id, apiv1.Operation_STATE_DONE), Events: rest})
	case "reset-failed":
		rest = append(rest, &apiv1.OperationEvent{Cursor: 6, Kind: changed, Step: "last", State: "failed", Text: "the disk is gone"}, &apiv1.OperationEvent{Cursor: 7, Kind: changed, State: "failed", Text: "last: the disk is gone"})
		return stream.Send(&apiv1.OperationUpdate{Operation: operationMessage(r.Msg.Id, apiv1.Operation_STATE_FAILED), Events: rest, Lost: true})
	case "upgrade-asks":
		rest = append(rest, &apiv1.OperationEvent{Cursor: 6, Kind: apiv1.OperationEvent_KIND_ASKS, Step: "last", Text: "Go on? [yes/no]"})
		if err := stream.Send(&apiv1.OperationUpdate{Operation: s.asks(), Events: rest}); err != nil {
			return err
		}
		select {
		case <-s.answered:
		case <-s.node.gone:
		}
		return stream.Send(&apiv1.OperationUpdate{Operation: s.asks(), Events: []*apiv1.OperationEvent{{Cursor: 7, Kind: apiv1.OperationEvent_KIND_ANSWERED, Step: "last", Text: "yes, by admin"}}})
	case "drain-patient":
		s.node.reading <- struct{}{}
		select {
		case <-ctx.Done():
		case <-s.node.gone:
		}
		return nil
	}
	return connect.NewError(connect.CodeNotFound, errors.New(`operation "`+r.Msg.Id+`": no such operation on this node (any more)`))
}

func (s *operationService) Answer(_ context.Context, r *connect.Request[apiv1.AnswerOperationRequest]) (*connect.Response[apiv1.AnswerOperationResponse], error) {
	if r.Msg.Answer != "yes" || r.Msg.Question != "go-on" {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New(r.Msg.Answer+" isn't an answer: it must be one of yes, no"))
	}
	s.once.Do(func() { close(s.answered) })
	return answerWith(&apiv1.AnswerOperationResponse{})
}

func (s *operationService) Abort(_ context.Context, r *connect.Request[apiv1.AbortOperationRequest]) (*connect.Response[apiv1.AbortOperationResponse], error) {
	if r.Msg.Id == "reboot-done" {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("abort reboot-done: it has ended already: done"))
	}
	return answerWith(&apiv1.AbortOperationResponse{Message: r.Msg.Id + " is aborted, and what it did is undone"})
}
