package main

import (
	"context"
	"net/http"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
)

// listing has operations and starts another one.
type listing struct {
	garboardv1connect.UnimplementedOperationServiceHandler
	all []*apiv1.Operation
}

func (l *listing) List(context.Context, *connect.Request[apiv1.ListOperationsRequest]) (*connect.Response[apiv1.ListOperationsResponse], error) {
	return answerWith(&apiv1.ListOperationsResponse{Operations: l.all})
}

func (l *listing) ConvertKubernetes(context.Context, *connect.Request[apiv1.ConvertKubernetesRequest]) (*connect.Response[apiv1.ConvertKubernetesResponse], error) {
	return answerWith(&apiv1.ConvertKubernetesResponse{Operation: &apiv1.Operation{Id: "convert-k8s-new"}})
}

// S-303: the same command follows the operation that it has started before.
func TestS303TheSameCommandFollows(t *testing.T) {
	t.Parallel()
	running := func(id, name string, change func(*apiv1.Operation)) *apiv1.Operation {
		o := &apiv1.Operation{Id: id, Name: name, By: "jo", State: apiv1.Operation_STATE_RUNNING}
		change(o)
		return o
	}
	here := func(*apiv1.Operation) {}
	for _, c := range []struct {
		what string
		all  []*apiv1.Operation
		want string
	}{
		{"none", nil, "convert-k8s-new"},
		{"another one", []*apiv1.Operation{running("upgrade-k8s-1", "upgrade-k8s", here)}, "convert-k8s-new"},
		{"on another node", []*apiv1.Operation{running("convert-k8s-1", "convert-k8s", func(o *apiv1.Operation) { o.Elsewhere = true })}, "convert-k8s-new"},
		{"ended", []*apiv1.Operation{running("convert-k8s-1", "convert-k8s", func(o *apiv1.Operation) { o.Ended = timestamppb.Now() })}, "convert-k8s-new"},
		{"running", []*apiv1.Operation{running("convert-k8s-1", "convert-k8s", here)}, "convert-k8s-1"},
	} {
		t.Run(c.what, func(t *testing.T) {
			t.Parallel()
			l := &listing{all: c.all}
			mux := http.NewServeMux()
			mux.Handle(garboardv1connect.NewOperationServiceHandler(l))
			a := liveNodes(t, map[string]http.Handler{"10.5.0.2": mux})
			start := a.unlessRunning("convert-k8s", false, starting(operationAPI.ConvertKubernetes, &apiv1.ConvertKubernetesRequest{}))
			err := a.withClient(t.Context(), "10.5.0.2", func(ctx context.Context, n *client.Client) error {
				o, err := start(ctx, n)
				if o.GetId() != c.want {
					t.Errorf("it follows %q, want %q", o.GetId(), c.want)
				}
				return err
			})
			if err != nil {
				t.Error(err)
			}
			if said := "10.5.0.2: convert-k8s-1 already runs, as jo started it"; strings.Contains(a.err.(interface{ String() string }).String(), said) != (c.want == "convert-k8s-1") {
				t.Errorf("it says\n%s", a.err)
			}
		})
	}
}
