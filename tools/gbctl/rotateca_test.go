package main

import (
	"context"
	"encoding/base64"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
)

// rotating is a control plane whose operation asks before it ends the old authority.
type rotating struct {
	garboardv1connect.UnimplementedNodeServiceHandler
	garboardv1connect.UnimplementedOperationServiceHandler
	garboardv1connect.UnimplementedAccessServiceHandler
	path    string // of the client configuration
	fails   bool   // the operation is undone after the answer
	serving []byte // the authority of its own certificate
	next    pki.CA

	mu       sync.Mutex // guards the following
	atAnswer *client.Config
	answered chan struct{}
	ended    bool
}

func (r *rotating) Version(context.Context, *connect.Request[apiv1.VersionRequest]) (*connect.Response[apiv1.VersionResponse], error) {
	return answerWith(&apiv1.VersionResponse{})
}

func (r *rotating) RotateCA(context.Context, *connect.Request[apiv1.RotateCARequest]) (*connect.Response[apiv1.RotateCAResponse], error) {
	return answerWith(&apiv1.RotateCAResponse{Operation: &apiv1.Operation{Id: "rotate-ca-1"}})
}

func (r *rotating) ClientCertificate(_ context.Context, q *connect.Request[apiv1.ClientCertificateRequest]) (*connect.Response[apiv1.ClientCertificateResponse], error) {
	request, err := pki.ParseRequest(q.Msg.GetRequest())
	if err != nil {
		return nil, err
	}
	crt, err := r.next.Sign(request.PublicKey, pki.Leaf{CN: "admin", Client: true, Now: time.Now()})
	r.mu.Lock()
	defer r.mu.Unlock()
	authorities := slices.Concat(r.serving, r.next.Cert)
	if r.ended {
		authorities = r.serving
	}
	return connect.NewResponse(&apiv1.ClientCertificateResponse{Certificate: crt, Authorities: authorities}), err
}

func (r *rotating) Kubeconfig(context.Context, *connect.Request[apiv1.KubeconfigRequest]) (*connect.Response[apiv1.KubeconfigResponse], error) {
	text, _, err := config.AdminKubeconfig("home", "https://10.5.0.2:6443", r.next, r.next.Cert, time.Now())
	return connect.NewResponse(&apiv1.KubeconfigResponse{Kubeconfig: text}), err
}

func (r *rotating) List(context.Context, *connect.Request[apiv1.ListOperationsRequest]) (*connect.Response[apiv1.ListOperationsResponse], error) {
	return answerWith(&apiv1.ListOperationsResponse{})
}

func (r *rotating) Answer(_ context.Context, q *connect.Request[apiv1.AnswerOperationRequest]) (*connect.Response[apiv1.AnswerOperationResponse], error) {
	if q.Msg.GetAnswer() != "yes" {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("another answer"))
	}
	file, err := client.Load(r.path)
	r.mu.Lock()
	r.atAnswer, r.ended = file, true
	r.mu.Unlock()
	close(r.answered)
	return connect.NewResponse(&apiv1.AnswerOperationResponse{}), err
}

func (r *rotating) Watch(ctx context.Context, _ *connect.Request[apiv1.WatchOperationRequest], stream *connect.ServerStream[apiv1.OperationUpdate]) error {
	o := &apiv1.Operation{Id: "rotate-ca-1", Name: rotateCA, State: apiv1.Operation_STATE_RUNNING, Steps: []*apiv1.OperationStep{{Id: dropStep, State: apiv1.OperationStep_STATE_PENDING}},
		Question: &apiv1.OperationQuestion{Id: dropQuestion, Step: "confirm", Text: "old credentials end now: go on", Options: []string{"yes", "no"}}}
	if err := stream.Send(&apiv1.OperationUpdate{Operation: o}); err != nil {
		return err
	}
	select {
	case <-r.answered:
	case <-ctx.Done():
		return ctx.Err()
	}
	o.Question, o.Ended, o.State = nil, timestamppb.Now(), apiv1.Operation_STATE_DONE
	o.Steps[0].State = apiv1.OperationStep_STATE_DONE
	if r.fails {
		o.State, o.Steps[0].State = apiv1.Operation_STATE_FAILED, apiv1.OperationStep_STATE_PENDING
	}
	return stream.Send(&apiv1.OperationUpdate{Operation: o})
}

// gbctl has new credentials, which work, before it answers. The former ones stay beside them
// until the end, and come back if the rotation is undone.
func TestRotateRenewsCredentials(t *testing.T) {
	for name, fails := range map[string]bool{"done": false, "undone": true} {
		t.Run(name, func(t *testing.T) {
			next, err := pki.NewMachineCA(time.Now())
			if err != nil {
				t.Fatal(err)
			}
			r := &rotating{path: filepath.Join(t.TempDir(), "config"), fails: fails, next: next, answered: make(chan struct{})}
			mux := http.NewServeMux()
			mux.Handle(garboardv1connect.NewNodeServiceHandler(r))
			mux.Handle(garboardv1connect.NewOperationServiceHandler(r))
			mux.Handle(garboardv1connect.NewAccessServiceHandler(r))
			a := liveNodes(t, map[string]http.Handler{"10.5.0.2": mux})
			a.in, a.configPath = strings.NewReader(""), r.path
			before := *a.loaded
			if r.serving, err = base64.StdEncoding.DecodeString(before.CA); err != nil {
				t.Fatal(err)
			}
			file := &client.Config{Context: "home", Contexts: map[string]*client.Context{"home": &before}}
			if err := file.Save(r.path); err != nil {
				t.Fatal(err)
			}
			kube := filepath.Join(t.TempDir(), "kubeconfig")
			t.Setenv("KUBECONFIG", kube)
			old, err := pki.NewKubernetesCA(time.Now())
			if err != nil {
				t.Fatal(err)
			}
			text, _, err := config.AdminKubeconfig("home", "https://10.5.0.2:6443", old, old.Cert, time.Now())
			if err == nil {
				err = writeKubeconfig(kube, []byte(strings.Replace(string(text), "current-context: admin@home", "current-context: elsewhere", 1)))
			}
			if err != nil {
				t.Fatal(err)
			}
			err = a.withClient(t.Context(), "10.5.0.2", func(ctx context.Context, c *client.Client) error {
				return a.rotate(ctx, c, &apiv1.RotateCARequest{}, true)
			})
			if (err != nil) != fails {
				t.Errorf("%v\n%s", err, a.err)
			}
			at := r.atAnswer.Contexts
			if at["home"].Crt == before.Crt || at["home"+formerSuffix] == nil || at["home"+formerSuffix].Crt != before.Crt {
				t.Errorf("at the answer the contexts were %v", reflect.ValueOf(at).MapKeys())
			}
			after, err := client.Load(r.path)
			if err != nil {
				t.Fatal(err)
			}
			if now := after.Contexts["home"]; len(after.Contexts) != 1 || (now.Crt == before.Crt) != fails || !fails && now.CA != before.CA {
				t.Errorf("afterwards there are %d contexts, with the former certificate: %v", len(after.Contexts), now.Crt == before.Crt)
			}
			renewed, err := os.ReadFile(kube)
			if err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(string(renewed), base64.StdEncoding.EncodeToString(next.Cert)) || !strings.Contains(string(renewed), "current-context: elsewhere") {
				t.Errorf("the kubeconfig is\n%s", renewed)
			}
		})
	}
}
