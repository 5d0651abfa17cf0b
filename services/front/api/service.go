package api

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// aliases are other names of services.
var aliases = map[string]string{"cri": "containerd"}

// lifelines are the services by which a node is reached. Who stops one can't
// start it again.
var lifelines = []string{"apid", "machined", "networkd"}

// lastTime is for a healthy member of etcd to say whether it is the last one. One that isn't healthy may be stopped.
const lastTime = 3 * time.Second

// mounts is the service that mounts the file systems of pods.
const mounts = "disks"

// serviceID is the ID of a service by ID or alias.
func serviceID(name string) string {
	if id, ok := aliases[name]; ok {
		return id
	}
	return name
}

// serviceService is the services of the graph.
type serviceService struct {
	opts     Options
	stopping context.Context
	// background are restarts that continue after their call has ended.
	background sync.WaitGroup
}

// services are the IDs of the services of the graph.
func (o Options) services() []string {
	return lists.Of(o.Graph.Statuses(), func(s dag.Status) string { return s.ID })
}

// noService is the error for a name that no service has.
func (s *serviceService) noService(name string) error {
	return failed(connect.CodeNotFound, "there is no service %q; there are %s", shortened(readable(name)), strings.Join(s.opts.services(), ", "))
}

func (s *serviceService) List(_ context.Context, req *connect.Request[apiv1.ListServicesRequest]) (*connect.Response[apiv1.ListServicesResponse], error) {
	statuses := s.opts.Graph.Statuses()
	if name := req.Msg.GetId(); name != "" {
		status, ok := s.opts.Graph.Status(serviceID(name))
		if !ok {
			return nil, s.noService(name)
		}
		statuses = []dag.Status{status}
	}
	res := &apiv1.ListServicesResponse{SinceBoot: durationpb.New(s.opts.Since())}
	var story map[string][]*apiv1.ServiceEvent
	if most := req.Msg.GetEvents(); most > 0 {
		story = s.story(most)
	}
	for _, st := range statuses {
		res.Services = append(res.Services, &apiv1.Service{
			Id: st.ID, State: string(st.State), Health: string(st.Health), Message: readable(st.Message), WaitingFor: readable(st.Waiting),
			Since: durationpb.New(st.Since), Restarts: uint32(st.Restarts), Up: st.Up, Kind: string(st.Kind), DependsOn: st.DependsOn,
			Events: story[st.ID],
		})
	}
	return connect.NewResponse(res), nil
}

// story is the last events of each service, newest first. Of a calm one
// among sick ones, the graph may only have the first.
func (s *serviceService) story(most uint32) map[string][]*apiv1.ServiceEvent {
	events := append(s.opts.Graph.BootEvents(), s.opts.Graph.Events()...)
	slices.SortFunc(events, func(a, b dag.Event) int { return int(int64(b.Seq) - int64(a.Seq)) })
	events = slices.CompactFunc(events, func(a, b dag.Event) bool { return a.Seq == b.Seq })
	story := make(map[string][]*apiv1.ServiceEvent)
	for _, e := range events {
		if uint32(len(story[e.Service])) < most {
			story[e.Service] = append(story[e.Service], serviceEvent(e))
		}
	}
	return story
}

func serviceEvent(e dag.Event) *apiv1.ServiceEvent {
	return &apiv1.ServiceEvent{
		Seq: e.Seq, Service: e.Service, State: string(e.State), Health: string(e.Health), Message: readable(e.Message),
		Time: timestamppb.New(e.Time), SinceBoot: durationpb.New(e.SinceBoot),
	}
}

func actionName(a apiv1.ControlServiceRequest_Action) string {
	return strings.ToLower(strings.TrimPrefix(a.String(), "ACTION_"))
}

func (s *serviceService) Control(ctx context.Context, req *connect.Request[apiv1.ControlServiceRequest]) (*connect.Response[apiv1.ControlServiceResponse], error) {
	id := serviceID(req.Msg.GetId())
	before, ok := s.opts.Graph.Status(id)
	if !ok {
		return nil, s.noService(req.Msg.GetId())
	}
	action := req.Msg.GetAction()
	if id == mounts && action != apiv1.ControlServiceRequest_ACTION_START {
		return nil, failed(connect.CodeFailedPrecondition, "service %q stays: pods have files on what it mounts; reboot the node instead", id)
	}
	var did string
	var err error
	switch action {
	case apiv1.ControlServiceRequest_ACTION_START:
		did = "service " + id + " is started"
		if before.State == dag.Running || before.State == dag.Starting {
			did = "service " + id + " runs already"
		}
		err = s.opts.Graph.Start(ctx, id)
	case apiv1.ControlServiceRequest_ACTION_STOP:
		if slices.Contains(lifelines, id) {
			return nil, failed(connect.CodeFailedPrecondition, "service %q stays: without it the node can't be reached to start it again; restart it instead", id)
		}
		did = "service " + id + " is stopped"
		if before.State == dag.Finished || before.State == dag.Skipped {
			did = "service " + id + " wasn't running, and nothing was stopped: " + readable(before.Message)
			break
		}
		if id == etcd.ID && !req.Msg.GetForce() {
			bounded, cancel := context.WithTimeout(ctx, lastTime)
			defer cancel()
			if errors.Is(s.opts.Etcd.MayLeave(bounded, 0), etcd.ErrLast) {
				return nil, failed(connect.CodeFailedPrecondition, "service etcd stays: this is the only voting member, and without it Kubernetes ends on all nodes; --force stops it all the same")
			}
		}
		err = s.interrupt(ctx, req.Msg, &did, func() error { return s.opts.Graph.Stop(ctx, id) })
	case apiv1.ControlServiceRequest_ACTION_RESTART:
		if slices.Contains(lifelines, id) {
			s.restartLater(ctx, id)
			did = "service " + id + " is restarted now: the connection may break"
			break
		}
		did = "service " + id + " is restarted"
		err = s.interrupt(ctx, req.Msg, &did, func() error { return s.opts.Graph.Restart(ctx, id) })
	default:
		return nil, failed(connect.CodeInvalidArgument, "action %s isn't one; there are start, stop and restart", action)
	}
	if err != nil {
		if errors.Is(err, dag.ErrNotRunning) {
			return nil, failed(connect.CodeUnavailable, "%w: the node is starting or stopping", err)
		}
		if errors.Is(err, etcd.ErrQuorum) || errors.As(err, new(*operation.HeldError)) {
			return nil, connect.NewError(connect.CodeFailedPrecondition, err)
		}
		return nil, err
	}
	return connect.NewResponse(&apiv1.ControlServiceResponse{Message: did}), nil
}

// interrupt calls do, which stops or restarts a service. etcd may only go where the cluster
// can do without this node's member.
func (s *serviceService) interrupt(ctx context.Context, m *apiv1.ControlServiceRequest, did *string, do func() error) error {
	if serviceID(m.GetId()) != etcd.ID {
		return do()
	}
	warning, err := s.opts.Interrupt(ctx, "service etcd "+actionName(m.GetAction()), m.GetForce(), do)
	if err == nil && warning != "" {
		*did += "; " + warning
	}
	return err
}

// restartLater restarts a service once the call is answered: the answer goes the
// way that is about to be cut.
func (s *serviceService) restartLater(answered context.Context, id string) {
	s.background.Go(func() {
		<-answered.Done()
		if err := dag.Guard(s.opts.Logs.Logger(LogID), func() error { return s.opts.Graph.Restart(s.stopping, id) }); err != nil && s.stopping.Err() == nil {
			s.opts.Logs.Logger(LogID).Error("restart of a service", "service", id, "err", err)
		}
	})
}

// Events subscribes before it reads the former events, so that none is lost
// in between, and sends each event once.
func (s *serviceService) Events(ctx context.Context, req *connect.Request[apiv1.EventsRequest], stream *connect.ServerStream[apiv1.ServiceEvent]) error {
	only := serviceID(req.Msg.GetService())
	if _, ok := s.opts.Graph.Status(only); only != "" && !ok {
		return s.noService(req.Msg.GetService())
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var following <-chan dag.Event
	if req.Msg.GetFollow() {
		following = s.opts.Graph.Subscribe(ctx)
	}
	events := s.opts.Graph.Events()
	var last uint64
	if len(events) > 0 {
		last = events[len(events)-1].Seq
	}
	if only != "" {
		events = slices.DeleteFunc(events, func(e dag.Event) bool { return e.Service != only })
	}
	if most := uint64(req.Msg.GetTail()); most < uint64(len(events)) {
		events = events[uint64(len(events))-most:]
	}
	for _, e := range events {
		if err := stream.Send(serviceEvent(e)); err != nil {
			return err
		}
	}
	if following == nil {
		return nil
	}
	if err := stream.Send(nil); err != nil { // the caller learns that it is followed
		return err
	}
	for e := range following {
		if e.Seq <= last || only != "" && e.Service != only {
			continue
		}
		if err := stream.Send(serviceEvent(e)); err != nil {
			return err
		}
	}
	return context.Cause(ctx)
}
