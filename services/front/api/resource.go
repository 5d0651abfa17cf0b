package api

import (
	"context"
	"slices"
	"strings"

	"connectrpc.com/connect"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/resource"
)

// resourceService is the store, to look at.
type resourceService struct {
	opts  Options
	shown shown
}

// find resolves the name of a type, and checks the request for it.
func find(req *apiv1.ListResourcesRequest) (resource.Definition, error) {
	if req.GetType() == "" {
		return resource.Definition{}, failed(connect.CodeInvalidArgument, "which type of resource? gbctl get rd lists them")
	}
	d, err := resource.Resolve(req.GetType())
	if err != nil {
		return d, connect.NewError(connect.CodeNotFound, err)
	}
	return d, nil
}

func (s *resourceService) List(_ context.Context, req *connect.Request[apiv1.ListResourcesRequest]) (*connect.Response[apiv1.ListResourcesResponse], error) {
	d, err := find(req.Msg)
	if err != nil {
		return nil, err
	}
	res := &apiv1.ListResourcesResponse{Definition: definition(d)}
	var others []string
	for _, o := range s.opts.Store.Objects(d.Type, req.Msg.GetNamespace()) {
		if id := req.Msg.GetId(); id != "" && id != o.ID {
			others = append(others, o.ID)
			continue
		}
		item, err := s.object(d, o)
		if err != nil {
			return nil, err
		}
		res.Items = append(res.Items, item)
	}
	if id := req.Msg.GetId(); id != "" && len(res.Items) == 0 {
		return nil, failed(connect.CodeNotFound, "%s %q isn't there%s; %s", d.Kind, shortened(readable(id)), in(req.Msg.GetNamespace()), there(others))
	}
	return connect.NewResponse(res), nil
}

func in(namespace string) string {
	if namespace == "" {
		return ""
	}
	return " in namespace " + shortened(readable(namespace))
}

// there lists the existing IDs, for a request with an unknown one.
func there(ids []string) string {
	const most = 20 // more than that isn't read
	switch n := len(ids); {
	case n == 0:
		return "there is none of that type"
	case n > most:
		return "there are " + strings.Join(ids[:most], ", ") + " and more"
	}
	return "there are " + strings.Join(ids, ", ")
}

// Watch sends as fast as the caller reads; meanwhile the store merges what comes.
func (s *resourceService) Watch(ctx context.Context, req *connect.Request[apiv1.ListResourcesRequest], stream *connect.ServerStream[apiv1.ResourceEvent]) error {
	d, err := find(req.Msg)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // the store's side ends with it
	first := definition(d)
	for e := range s.opts.Store.Events(ctx, d.Type, req.Msg.GetNamespace(), req.Msg.GetId()) {
		event := &apiv1.ResourceEvent{Kind: enum[apiv1.ResourceEvent_Kind](apiv1.ResourceEvent_Kind_value, "KIND_", e.Kind.String()), Definition: first}
		first = nil
		if e.Kind != resource.Synced {
			if event.Resource, err = s.object(d, e.Object); err != nil {
				return err
			}
		}
		if err := stream.Send(event); err != nil {
			return err
		}
	}
	return context.Cause(ctx)
}

func (s *resourceService) Definitions(context.Context, *connect.Request[apiv1.ListDefinitionsRequest]) (*connect.Response[apiv1.ListDefinitionsResponse], error) {
	return connect.NewResponse(&apiv1.ListDefinitionsResponse{Definitions: lists.Of(resource.Definitions(), definition)}), nil
}

func (s *resourceService) Graph(_ context.Context, req *connect.Request[apiv1.GraphRequest]) (*connect.Response[apiv1.GraphResponse], error) {
	var dot strings.Builder
	draw := s.opts.Runtime.Graph
	if req.Msg.GetServices() {
		draw = s.opts.Graph.DOT
	}
	err := draw(&dot)
	return connect.NewResponse(&apiv1.GraphResponse{Dot: dot.String()}), err
}

func definition(d resource.Definition) *apiv1.ResourceDefinition {
	columns := lists.Of(d.Columns, func(c resource.Column) string { return c.Name })
	return &apiv1.ResourceDefinition{Type: d.Type, Kind: d.Kind, Aliases: d.Aliases, DefaultNamespace: d.Namespace, Columns: columns}
}

// object is an object as a caller may see it.
func (s *resourceService) object(d resource.Definition, o resource.Object[any]) (*apiv1.Resource, error) {
	spec, columns, err := s.shown.of(d, o)
	if err != nil {
		return nil, err
	}
	for i, c := range d.Columns {
		if c.From == "" {
			continue
		}
		if other, err := s.opts.Store.Object(c.From, o.Namespace, o.ID); err == nil {
			columns = slices.Clone(columns) // the kept ones are everybody's
			columns[i] = cell(c, other.Spec)
		}
	}
	return &apiv1.Resource{
		Namespace: readable(o.Namespace), Type: o.Type, Kind: d.Kind, Id: readable(o.ID), Version: o.Version, Phase: resource.Phase,
		Finalizers: o.Finalizers, Owner: o.Owner, Spec: spec, Columns: columns, Created: timestamp(o.Created), ProblemsSince: timestamp(o.Troubled),
	}, nil
}
