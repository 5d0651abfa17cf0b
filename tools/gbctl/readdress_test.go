package main

import (
	"context"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
)

// moved is a node that gets another address.
type moved struct {
	garboardv1connect.UnimplementedNodeServiceHandler
	garboardv1connect.UnimplementedOperationServiceHandler

	mu       sync.Mutex // guards the following
	at       string
	answered chan struct{}
}

// movedAt is the node at an address.
type movedAt struct {
	*moved
	address string
}

func (m *moved) Readdress(_ context.Context, q *connect.Request[apiv1.ReaddressRequest]) (*connect.Response[apiv1.ReaddressResponse], error) {
	return answerWith(&apiv1.ReaddressResponse{Operation: &apiv1.Operation{Id: "readdress-1"}})
}

func (m *moved) List(context.Context, *connect.Request[apiv1.ListOperationsRequest]) (*connect.Response[apiv1.ListOperationsResponse], error) {
	return answerWith(&apiv1.ListOperationsResponse{})
}

func (m *moved) Answer(_ context.Context, q *connect.Request[apiv1.AnswerOperationRequest]) (*connect.Response[apiv1.AnswerOperationResponse], error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.at != "10.5.0.20" || q.Msg.GetAnswer() != "yes" || q.Msg.GetQuestion() != reachQuestion {
		return nil, connect.NewError(connect.CodeFailedPrecondition, context.Canceled)
	}
	close(m.answered)
	return answerWith(&apiv1.AnswerOperationResponse{})
}

func (p movedAt) Watch(ctx context.Context, _ *connect.Request[apiv1.WatchOperationRequest], stream *connect.ServerStream[apiv1.OperationUpdate]) error {
	o := &apiv1.Operation{Id: "readdress-1", Name: readdress, State: apiv1.Operation_STATE_RUNNING, Steps: []*apiv1.OperationStep{{Id: moveStep, State: apiv1.OperationStep_STATE_RUNNING}}}
	p.mu.Lock()
	at := p.at
	p.mu.Unlock()
	switch {
	case p.address != at:
		return connect.NewError(connect.CodeUnavailable, context.Canceled)
	case at == "10.5.0.2": // the node goes there, or has come back
		if err := stream.Send(&apiv1.OperationUpdate{Operation: o}); err != nil {
			return err
		}
		p.mu.Lock()
		p.at = "10.5.0.20"
		p.mu.Unlock()
		<-ctx.Done()
		return ctx.Err()
	}
	o.Question = &apiv1.OperationQuestion{Id: reachQuestion, Step: moveStep, Text: "answer yes", Options: []string{"yes"}}
	if err := stream.Send(&apiv1.OperationUpdate{Operation: o}); err != nil {
		return err
	}
	select {
	case <-p.answered:
	case <-ctx.Done():
		return ctx.Err()
	}
	o.Question, o.Ended, o.State = nil, timestamppb.Now(), apiv1.Operation_STATE_DONE
	return stream.Send(&apiv1.OperationUpdate{Operation: o})
}

// gbctl goes to the new address, answers there, and has it in its context then.
func TestReaddressAnswersAtTheNewAddress(t *testing.T) {
	m := &moved{at: "10.5.0.2", answered: make(chan struct{})}
	nodes := map[string]http.Handler{}
	for _, address := range []string{"10.5.0.2", "10.5.0.20"} {
		mux := http.NewServeMux()
		mux.Handle(garboardv1connect.NewNodeServiceHandler(m))
		mux.Handle(garboardv1connect.NewOperationServiceHandler(movedAt{m, address}))
		nodes[address] = mux
	}
	a := liveNodes(t, nodes)
	a.in, a.configPath = strings.NewReader(""), filepath.Join(t.TempDir(), "config")
	context := *a.loaded
	context.Nodes, context.Endpoints = []string{"10.5.0.2", "10.5.0.3"}, []string{"10.5.0.2"}
	file := &client.Config{Context: "home", Contexts: map[string]*client.Context{"home": &context}}
	if err := file.Save(a.configPath); err != nil {
		t.Fatal(err)
	}
	if err := a.readdress(t.Context(), "10.5.0.2", &apiv1.ReaddressRequest{Address: "10.5.0.20"}); err != nil {
		t.Fatalf("%v\n%s", err, a.err)
	}
	after, err := client.Load(a.configPath)
	if err != nil {
		t.Fatal(err)
	}
	if c := after.Contexts["home"]; !slices.Equal(c.Nodes, []string{"10.5.0.20", "10.5.0.3"}) || !slices.Equal(c.Endpoints, []string{"10.5.0.20"}) {
		t.Errorf("the context has %q and %q", c.Nodes, c.Endpoints)
	}
}
