package main

import (
	"context"
	"sync"

	"connectrpc.com/connect"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
)

// node answers for one machine, with facts that never change.
type node struct {
	name, kind string
	config     *configService
	operations *operationService
	gone       chan struct{} // closed when the script has ended
	reading    chan struct{} // hears of each reader of the log that never ends

	mu   sync.Mutex
	mood string // what a script has told it to be like
}

func newNode(name, kind string) *node {
	n := &node{name: name, kind: kind, gone: make(chan struct{}), reading: make(chan struct{}, 1)}
	n.config = &configService{node: n, text: firstConfig(kind), versions: 1}
	n.operations = &operationService{node: n, answered: make(chan struct{})}
	return n
}

func (n *node) is(mood string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.mood == mood
}

func answerWith[T any](m *T) (*connect.Response[T], error) { return connect.NewResponse(m), nil }

type resourceService struct {
	garboardv1connect.UnimplementedResourceServiceHandler
	node *node
}

// List has no static pods on nodes that are no control planes.
func (s resourceService) List(_ context.Context, r *connect.Request[apiv1.ListResourcesRequest]) (*connect.Response[apiv1.ListResourcesResponse], error) {
	if r.Msg.Type == "volumes" {
		m := &apiv1.ListResourcesResponse{}
		for label, mood := range map[string]string{"EPHEMERAL": "plain", "STATE": "plain-state"} {
			spec := "layers: LUKS2 (0 nodeID), xfs\n"
			if s.node.is(mood) {
				spec = "layers: xfs\nunlike: true\n"
			}
			m.Items = append(m.Items, &apiv1.Resource{Id: label, Spec: spec})
		}
		return answerWith(m)
	}
	m, err := replay[apiv1.ListResourcesResponse]("ResourceService/List", r.Msg)
	if err == nil && s.node.kind != "controlplane" && m.Msg.Definition.DefaultNamespace == "controlplane" {
		m.Msg.Items = nil
	}
	return m, err
}

func (s resourceService) Definitions(_ context.Context, r *connect.Request[apiv1.ListDefinitionsRequest]) (*connect.Response[apiv1.ListDefinitionsResponse], error) {
	return replay[apiv1.ListDefinitionsResponse]("ResourceService/Definitions", r.Msg)
}

func (s resourceService) Graph(_ context.Context, r *connect.Request[apiv1.GraphRequest]) (*connect.Response[apiv1.GraphResponse], error) {
	return replay[apiv1.GraphResponse]("ResourceService/Graph", r.Msg)
}

// Watch sends what there is, one update, and ends, as a node that goes down.
func (s resourceService) Watch(ctx context.Context, r *connect.Request[apiv1.ListResourcesRequest], stream *connect.ServerStream[apiv1.ResourceEvent]) error {
	list, err := s.List(ctx, r)
	if err != nil {
		return err
	}
	d := list.Msg.Definition
	for _, item := range list.Msg.Items {
		if err := stream.Send(&apiv1.ResourceEvent{Kind: apiv1.ResourceEvent_KIND_PRESENT, Resource: item, Definition: d}); err != nil {
			return err
		}
		d = nil
	}
	if err := stream.Send(&apiv1.ResourceEvent{Kind: apiv1.ResourceEvent_KIND_SYNCED, Definition: d}); err != nil {
		return err
	}
	last := list.Msg.Items[len(list.Msg.Items)-1]
	last.Version++
	last.Columns = []string{"True"}
	return stream.Send(&apiv1.ResourceEvent{Kind: apiv1.ResourceEvent_KIND_UPDATED, Resource: last})
}
