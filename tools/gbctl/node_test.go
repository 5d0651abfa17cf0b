package main

import (
	"context"
	"errors"
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

var definitions = []*apiv1.ResourceDefinition{
	{Type: "BootstrapStatuses.runtime.garboard.dev", Kind: "BootstrapStatus", Aliases: []string{"bs"}, DefaultNamespace: "runtime", Columns: []string{"SELF HOSTED"}},
	{Type: "StaticPods.kubernetes.garboard.dev", Kind: "StaticPod", DefaultNamespace: "controlplane"},
	{Type: "StaticPodStatuses.kubernetes.garboard.dev", Kind: "StaticPodStatus", DefaultNamespace: "controlplane", Columns: []string{"READY"}},
}

func (s resourceService) items() []*apiv1.Resource {
	if s.node.kind != "controlplane" {
		return []*apiv1.Resource{
			{Namespace: "runtime", Type: definitions[0].Type, Kind: "BootstrapStatus", Id: "control-plane", Version: 1, Phase: "running", Columns: []string{"true"}, Spec: "selfHosted: true\n"},
		}
	}
	return []*apiv1.Resource{
		{Namespace: "runtime", Type: definitions[0].Type, Kind: "BootstrapStatus", Id: "control-plane", Version: 2, Phase: "running", Columns: []string{"false"}, Spec: "selfHosted: false\n"},
		{
			Namespace: "controlplane", Type: definitions[1].Type, Kind: "StaticPod", Id: "kube-apiserver", Version: 2, Phase: "running",
			Finalizers: []string{`k8s.StaticPodStatus("kube-apiserver")`},
			Spec:       "apiVersion: v1\nkind: Pod\nmetadata:\n    annotations:\n        garboard.dev/config-version: \"1\"\n    creationTimestamp: null\n    name: kube-apiserver\nspec:\n    priority: 2000000000\n",
		},
		{Namespace: "controlplane", Type: definitions[2].Type, Kind: "StaticPodStatus", Id: "kube-system/kube-apiserver-cp-1", Version: 1, Phase: "running", Columns: []string{"True"}},
		{Namespace: "controlplane", Type: definitions[2].Type, Kind: "StaticPodStatus", Id: "kube-system/kube-scheduler-cp-1", Version: 3, Phase: "running", Columns: []string{"False"}},
	}
}

func (s resourceService) List(_ context.Context, r *connect.Request[apiv1.ListResourcesRequest]) (*connect.Response[apiv1.ListResourcesResponse], error) {
	for _, d := range definitions {
		if !called(d, r.Msg.Type) {
			continue
		}
		m := &apiv1.ListResourcesResponse{Definition: d}
		for _, item := range s.items() {
			if item.Type == d.Type && (r.Msg.Namespace == "" || r.Msg.Namespace == item.Namespace) && (r.Msg.Id == "" || r.Msg.Id == item.Id) {
				m.Items = append(m.Items, item)
			}
		}
		return answerWith(m)
	}
	return nil, connect.NewError(connect.CodeNotFound, errors.New(`no resource type "`+r.Msg.Type+`"; did you mean "staticpods"?`))
}

func (s resourceService) Definitions(context.Context, *connect.Request[apiv1.ListDefinitionsRequest]) (*connect.Response[apiv1.ListDefinitionsResponse], error) {
	return answerWith(&apiv1.ListDefinitionsResponse{Definitions: definitions})
}

func (s resourceService) Graph(_ context.Context, r *connect.Request[apiv1.GraphRequest]) (*connect.Response[apiv1.GraphResponse], error) {
	name := "controllers"
	if r.Msg.Services {
		name = "services"
	}
	return answerWith(&apiv1.GraphResponse{Dot: "digraph " + name + " {\n}\n"})
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
