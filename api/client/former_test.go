package client

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/garboard-os/garboard/api"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
)

// formerNode is a node of the former release: it knows the names of that release only, and its gate refuses others in
// the words of that release. It answers with what it was asked.
type formerNode struct {
	garboardv1connect.UnimplementedAccessServiceHandler
	garboardv1connect.UnimplementedOperationServiceHandler

	mu    sync.Mutex // guards asked
	asked []string
}

func (n *formerNode) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	n.mu.Lock()
	n.asked = append(n.asked, r.URL.Path)
	n.mu.Unlock()
	if m, _ := api.Lookup(r.URL.Path); m.Former != "" {
		_ = connect.NewErrorWriter().Write(w, r, connect.NewError(connect.CodePermissionDenied, fmt.Errorf("no role may call %s %s", r.Method, r.URL.Path)))
		return
	}
	r.URL.Path = api.Current(r.URL.Path)
	mux := http.NewServeMux()
	mux.Handle(garboardv1connect.NewAccessServiceHandler(n))
	mux.Handle(garboardv1connect.NewImageServiceHandler(formerImages{}))
	mux.Handle(garboardv1connect.NewOperationServiceHandler(n))
	mux.ServeHTTP(w, r)
}

func (n *formerNode) Kubeconfig(_ context.Context, r *connect.Request[apiv1.KubeconfigRequest]) (*connect.Response[apiv1.KubeconfigResponse], error) {
	return connect.NewResponse(&apiv1.KubeconfigResponse{Kubeconfig: []byte(r.Msg.User)}), nil
}

func (n *formerNode) Reset(context.Context, *connect.Request[apiv1.ResetRequest]) (*connect.Response[apiv1.ResetResponse], error) {
	return nil, connect.NewError(connect.CodePermissionDenied, errors.New("/garboard.v1.NodeService/Reset needs the role os:admin"))
}

type formerImages struct {
	garboardv1connect.UnimplementedImageServiceHandler
}

func (formerImages) List(context.Context, *connect.Request[apiv1.ImagesRequest]) (*connect.Response[apiv1.ImagesResponse], error) {
	return connect.NewResponse(&apiv1.ImagesResponse{}), nil
}

func (formerImages) Pull(_ context.Context, r *connect.Request[apiv1.PullImageRequest], s *connect.ServerStream[apiv1.PullImageProgress]) error {
	return errors.Join(s.Send(&apiv1.PullImageProgress{Done: 1}), s.Send(&apiv1.PullImageProgress{Digest: "of " + r.Msg.Image}))
}

// took are the requests since the last time.
func (n *formerNode) took() (asked []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	asked, n.asked = n.asked, nil
	return asked
}

// A client asks a node of the former release by its names, with the same request, and each request is observed.
func TestNodeOfTheFormerRelease(t *testing.T) {
	n := &formerNode{}
	client, err := Dial(listenWith(t, nil, n), "10.5.0.2")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	var observed []string
	client.Observe = func(method, _ string, _ time.Duration, _ error) { observed = append(observed, method) }
	wantAsked := func(want ...string) {
		t.Helper()
		if asked := n.took(); !slices.Equal(asked, want) || !slices.Equal(observed, want) {
			t.Errorf("it asked %q, and observed %q, want %q", asked, observed, want)
		}
		observed = nil
	}
	user := strings.Repeat("jo", 50<<10) // more than is sent before an answer may come
	m, err := Unary(t.Context(), client.Access.Kubeconfig, &apiv1.KubeconfigRequest{User: user})
	if err != nil || string(m.Kubeconfig) != user {
		t.Errorf("%v, %v", m, err)
	}
	wantAsked("/garboard.v1.AccessService/Kubeconfig", "/garboard.v1.NodeService/Kubeconfig")
	var got []string
	err = Receive(t.Context(), client.Image.Pull, &apiv1.PullImageRequest{Image: "registry.example/x:1"}, func(p *apiv1.PullImageProgress) error {
		got = append(got, fmt.Sprint(p.Done, p.Digest))
		return nil
	})
	if want := []string{"1", "0of registry.example/x:1"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%q, %v, want %q", got, err, want)
	}
	wantAsked("/garboard.v1.ImageService/Pull", "/garboard.v1.NodeService/PullImage")
	// An empty request has no body, and this one an empty answer.
	if m, err := Unary(t.Context(), client.Image.List, &apiv1.ImagesRequest{}); err != nil || len(m.Images) > 0 {
		t.Errorf("%v, %v", m, err)
	}
	wantAsked("/garboard.v1.ImageService/List", "/garboard.v1.NodeService/Images")
	// The node's own no is the answer, and what was never renamed is asked for once.
	if _, err := Unary(t.Context(), client.Operation.Reset, &apiv1.ResetRequest{DryRun: true}); connect.CodeOf(err) != connect.CodePermissionDenied || !strings.Contains(err.Error(), "needs the role") {
		t.Error(err)
	}
	wantAsked("/garboard.v1.OperationService/Reset", "/garboard.v1.NodeService/Reset")
	if _, err := Unary(t.Context(), client.Node.Version, &apiv1.VersionRequest{}); err == nil {
		t.Error("it knows Version")
	}
	wantAsked("/garboard.v1.NodeService/Version")
}
