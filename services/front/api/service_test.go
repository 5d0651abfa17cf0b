package api

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/google/go-cmp/cmp"
)

// up waits until a service is.
func (r *rig) up(id string) {
	r.t.Helper()
	eventually.That(r.t, 10*time.Second, id+" is up", func() error {
		if s, _ := r.opts.Graph.Status(id); !s.Up {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
}

func (r *rig) service(t *testing.T, id string, events uint32) *apiv1.Service {
	t.Helper()
	res, err := ask(t, garboardv1connect.NewServiceServiceClient(r.as(reader), host).List, &apiv1.ListServicesRequest{Id: id, Events: events})
	must(t, err)
	if len(res.GetServices()) != 1 {
		t.Fatalf("%s: %v", id, res)
	}
	return res.GetServices()[0]
}

func TestS231ServicesWithTheirStory(t *testing.T) {
	release, sick := make(chan struct{}), errors.New(`Get "http://127.0.0.1:10248/healthz": dial tcp 127.0.0.1:10248: connect: connection refused`)
	slow := daemon("timed")
	start := slow.Run
	slow.Run = func(ctx context.Context, h *dag.Handle) error {
		select {
		case <-release:
			return start(ctx, h)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	kubelet := daemon("kubelet", "timed", "containerd")
	kubelet.Kind = dag.Container
	kubelet.Health = &dag.Health{Check: func(context.Context) error { return sick }, Period: 10 * time.Millisecond}
	r := newRig(t, daemon("containerd"), slow, kubelet).serve()
	r.up("containerd")
	eventually.That(t, 10*time.Second, "the kubelet waits for timed only", func() error { // S-235
		if s := r.service(t, "kubelet", 0); s.GetWaitingFor() != `service "timed" to be "up"` || s.GetState() != "Waiting" || s.GetUp() {
			return fmt.Errorf("%v", s)
		}
		return nil
	})
	close(release)
	eventually.That(t, 10*time.Second, "its health is known", func() error { // S-234
		if s := r.service(t, "kubelet", 0); s.GetHealth() != "Fail" {
			return fmt.Errorf("%v", s)
		}
		return nil
	})
	s := r.service(t, "kubelet", 100)
	if s.GetKind() != "container" || len(s.GetDependsOn()) != 2 || s.GetSince().AsDuration() <= 0 || r.service(t, "timed", 0).GetKind() != "goroutine of PID 1" {
		t.Errorf("got %v", s)
	}
	var story []string
	for _, e := range s.GetEvents() {
		story = append(story, e.GetState()+": "+e.GetMessage())
	}
	want := []string{ // newest first: S-232, S-235 to S-238
		"Running: Health check failed: " + sick.Error(),
		"Running: Started task kubelet (PID 2334) for container kubelet",
		"Starting: Creating service runner",
		"Preparing: Running pre state",
		`Waiting: Waiting for service "timed" to be "up"`,
	}
	story = slices.Compact(story)
	if diff := cmp.Diff(want, story[:min(len(want), len(story))]); diff != "" {
		t.Error(diff)
	}
	if few := r.service(t, "kubelet", 2).GetEvents(); len(few) != 2 || few[0].GetSeq() != s.GetEvents()[0].GetSeq() {
		t.Errorf("the last two: %v", few)
	}
	res, err := ask(t, garboardv1connect.NewServiceServiceClient(r.as(reader), host).List, &apiv1.ListServicesRequest{})
	must(t, err)
	if len(res.GetServices()) != 3 || res.GetServices()[2].GetEvents() != nil || res.GetSinceBoot().AsDuration() <= 0 {
		t.Errorf("all: %v", res)
	}
}

func TestServicesAreStartedAndStopped(t *testing.T) {
	r := newRig(t).serve()
	client := garboardv1connect.NewServiceServiceClient(r.as(operator), host)
	control := func(id string, action apiv1.ControlServiceRequest_Action) (string, error) {
		res, err := ask(t, client.Control, &apiv1.ControlServiceRequest{Id: id, Action: action})
		return res.GetMessage(), err
	}
	r.up("kubelet")
	for _, step := range []struct {
		action  apiv1.ControlServiceRequest_Action
		state   string
		message string
	}{
		{apiv1.ControlServiceRequest_ACTION_START, "Running", "runs already"},
		{apiv1.ControlServiceRequest_ACTION_STOP, "Finished", "containerd is stopped"},
		{apiv1.ControlServiceRequest_ACTION_STOP, "Finished", "nothing was stopped: Stopped"},
		{apiv1.ControlServiceRequest_ACTION_START, "Running", "is started"},
		{apiv1.ControlServiceRequest_ACTION_RESTART, "Running", "is restarted"},
	} {
		message, err := control("cri", step.action)
		must(t, err)
		if !strings.Contains(message, step.message) {
			t.Errorf("%s: %q", step.action, message)
		}
		eventually.That(t, 10*time.Second, "containerd is "+step.state, func() error {
			if s := r.service(t, "containerd", 0); s.GetState() != step.state {
				return fmt.Errorf("%v", s)
			}
			return nil
		})
	}
	_, err := control("sshd", apiv1.ControlServiceRequest_ACTION_STOP)
	wantCode(t, err, connect.CodeNotFound, `"sshd"`, "apid, containerd, kubelet, networkd")
	_, err = control("kubelet", 0)
	wantCode(t, err, connect.CodeInvalidArgument)
	_, err = control("apid", apiv1.ControlServiceRequest_ACTION_STOP)
	wantCode(t, err, connect.CodeFailedPrecondition, "restart it instead")

	r.up("apid")
	before := len(r.service(t, "apid", 100).GetEvents())
	message, err := control("apid", apiv1.ControlServiceRequest_ACTION_RESTART)
	must(t, err)
	if !strings.Contains(message, "the connection may break") {
		t.Errorf("says %q", message)
	}
	eventually.That(t, 10*time.Second, "apid was restarted", func() error {
		if s := r.service(t, "apid", 100); len(s.GetEvents()) <= before || !s.GetUp() {
			return fmt.Errorf("%v", s)
		}
		return nil
	})
}

func TestEventsAreToldOnce(t *testing.T) {
	r := newRig(t).serve()
	for _, id := range []string{"kubelet", "networkd", "apid"} { // all, and those that they need
		r.up(id)
	}
	client := garboardv1connect.NewServiceServiceClient(r.as(operator), host)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream, err := client.Events(ctx, connect.NewRequest(&apiv1.EventsRequest{Tail: 2, Follow: true, Service: "cri"}))
	must(t, err)
	receive := func() *apiv1.ServiceEvent {
		t.Helper()
		if !stream.Receive() {
			t.Fatal(stream.Err())
		}
		return stream.Msg()
	}
	first, second := receive(), receive()
	if first.GetState() != "Starting" || second.GetState() != "Running" || first.GetSeq() >= second.GetSeq() {
		t.Errorf("the last two: %v, %v", first, second)
	}
	_, err = ask(t, client.Control, &apiv1.ControlServiceRequest{Id: "cri", Action: apiv1.ControlServiceRequest_ACTION_STOP})
	must(t, err)
	for _, state := range []string{"Stopping", "Finished"} {
		if e := receive(); e.GetState() != state || e.GetService() != "containerd" || e.GetTime() == nil {
			t.Errorf("got %v, want %s", e, state)
		}
	}
	cancel()
	if stream.Receive() {
		t.Errorf("got %v after the end", stream.Msg())
	}
	all, err := client.Events(t.Context(), connect.NewRequest(&apiv1.EventsRequest{Tail: 1 << 30}))
	must(t, err)
	last := uint64(0)
	for all.Receive() {
		if all.Msg().GetSeq() != last+1 {
			t.Errorf("event %d after %d", all.Msg().GetSeq(), last)
		}
		last = all.Msg().GetSeq()
	}
	must(t, all.Err())
	if n := len(r.opts.Graph.Events()); last != uint64(n) {
		t.Errorf("%d of %d events", last, n)
	}
	none, err := client.Events(t.Context(), connect.NewRequest(&apiv1.EventsRequest{Service: "vim", Follow: true}))
	must(t, err)
	if none.Receive() {
		t.Error("an event of nothing")
	}
	wantCode(t, none.Err(), connect.CodeNotFound)
}

// etcd stops and restarts only where the cluster can do without it, unless it is forced.
func TestStopOfEtcd(t *testing.T) {
	r := newRig(t, daemon("etcd"))
	r.opts.Interrupt = func(_ context.Context, what string, force bool, do func() error) (string, error) {
		if !force {
			return "", fmt.Errorf("%s: %w", what, etcd.ErrQuorum)
		}
		return "etcd has no quorum now", do()
	}
	r.serve()
	r.up("etcd")
	client := garboardv1connect.NewServiceServiceClient(r.as(operator), host)
	for _, action := range []apiv1.ControlServiceRequest_Action{apiv1.ControlServiceRequest_ACTION_STOP, apiv1.ControlServiceRequest_ACTION_RESTART} {
		_, err := ask(t, client.Control, &apiv1.ControlServiceRequest{Id: "etcd", Action: action})
		wantCode(t, err, connect.CodeFailedPrecondition, "would lose its quorum")
	}
	if s := r.service(t, "etcd", 0); s.GetState() != "Running" {
		t.Errorf("etcd: %v", s)
	}
	res, err := ask(t, client.Control, &apiv1.ControlServiceRequest{Id: "etcd", Action: apiv1.ControlServiceRequest_ACTION_STOP, Force: true})
	must(t, err)
	if !strings.Contains(res.GetMessage(), "etcd has no quorum now") {
		t.Errorf("says %q", res.GetMessage())
	}
	eventually.That(t, 10*time.Second, "etcd is stopped", func() error {
		if s := r.service(t, "etcd", 0); s.GetState() != "Finished" {
			return fmt.Errorf("%v", s)
		}
		return nil
	})
}
