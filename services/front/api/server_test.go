package api

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	contract "github.com/garboard-os/garboard/api"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

func TestOnlyTheGateMayCall(t *testing.T) {
	r := newRig(t).serve()
	for name, test := range map[string]struct {
		headers map[string]string
		code    connect.Code
	}{
		"nobody":           {nil, connect.CodeUnauthenticated},
		"no mode":          {map[string]string{contract.HeaderPeer: "jane", contract.HeaderRoles: "os:admin", contract.HeaderRemote: "1.1.1.1:1"}, connect.CodeUnauthenticated},
		"odd mode":         {map[string]string{contract.HeaderPeer: "jane", contract.HeaderRoles: "os:admin", contract.HeaderRemote: "1.1.1.1:1", contract.HeaderMode: "open"}, connect.CodeUnauthenticated},
		"no peer":          {map[string]string{contract.HeaderRoles: "os:admin", contract.HeaderRemote: "1.1.1.1:1", contract.HeaderMode: contract.ModeNormal}, connect.CodeUnauthenticated},
		"no remote":        {map[string]string{contract.HeaderPeer: "jane", contract.HeaderRoles: "os:admin", contract.HeaderMode: contract.ModeNormal}, connect.CodeUnauthenticated},
		"long":             {map[string]string{contract.HeaderPeer: strings.Repeat("j", maxName+1), contract.HeaderRoles: "os:admin", contract.HeaderRemote: "1.1.1.1:1", contract.HeaderMode: contract.ModeNormal}, connect.CodeUnauthenticated},
		"no role":          {identity(), connect.CodePermissionDenied},
		"not the roles":    {identity("system:masters", contract.EtcdBackup), connect.CodePermissionDenied},
		"maintenance over": {unknownClient, connect.CodeFailedPrecondition},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := ask(t, garboardv1connect.NewServiceServiceClient(r.as(test.headers), host).List, &apiv1.ListServicesRequest{})
			wantCode(t, err, test.code)
		})
	}
	_, err := ask(t, garboardv1connect.NewServiceServiceClient(r.as(reader), host).List, &apiv1.ListServicesRequest{})
	must(t, err)
}

// TestEveryMethodAsksForItsRole also finds a method without a handler.
func TestEveryMethodAsksForItsRole(t *testing.T) {
	r := newRig(t).serve()
	for _, m := range contract.Methods() {
		for _, role := range contract.Roles() {
			// What isn't the method's content type gets no further than the role.
			res := r.post(identity(role), m.Procedure, "text/plain", nil)
			denied := res.StatusCode == http.StatusForbidden
			if denied == contract.Allowed(m, []string{string(role)}) {
				t.Errorf("%s as %s: %s", m.Procedure, role, res.Status)
			}
			if !denied && res.StatusCode != http.StatusUnsupportedMediaType {
				t.Errorf("%s as %s: %s: no handler?", m.Procedure, role, res.Status)
			}
		}
	}
	if res := r.post(admin, "/garboard.v1.NodeService/Explode", "application/json", nil); res.StatusCode != http.StatusNotImplemented {
		t.Errorf("unknown method: %s", res.Status)
	}
	if res := r.post(admin, "/", "text/plain", nil); res.StatusCode != http.StatusNotImplemented {
		t.Errorf("unknown path: %s", res.Status)
	}
}

func TestEveryProtocolWorks(t *testing.T) {
	r := newRig(t).serve()
	for name, options := range map[string][]connect.ClientOption{"connect": nil, "json": {connect.WithProtoJSON()}, "grpc": {connect.WithGRPC()}, "grpc-web": {connect.WithGRPCWeb()}} {
		for _, http2 := range []bool{false, true} {
			if name == "grpc" && !http2 {
				continue // it has trailers
			}
			t.Run(fmt.Sprintf("%s http2=%t", name, http2), func(t *testing.T) {
				client := garboardv1connect.NewServiceServiceClient(r.client(reader, http2), host, options...)
				res, err := ask(t, client.List, &apiv1.ListServicesRequest{Id: "cri"})
				must(t, err)
				if len(res.GetServices()) != 1 || res.GetServices()[0].GetId() != "containerd" {
					t.Errorf("got %v", res)
				}
				_, err = ask(t, client.List, &apiv1.ListServicesRequest{Id: "vim"})
				wantCode(t, err, connect.CodeNotFound, "apid, containerd, kubelet, networkd")
			})
		}
	}
	// As curl would.
	res := r.post(reader, "/garboard.v1.ServiceService/List", "application/json", strings.NewReader(`{"id":"kubelet"}`))
	if res.StatusCode != http.StatusOK || !strings.Contains(res.body, `"dependsOn":["containerd"]`) {
		t.Errorf("%s %s", res.Status, res.body)
	}
	res = r.get(reader, "/garboard.v1.ServiceService/List?connect=v1&encoding=json&message=%7B%22id%22%3A%22kubelet%22%7D")
	if res.StatusCode != http.StatusOK || !strings.Contains(res.body, `"id":"kubelet"`) {
		t.Errorf("GET: %s %s", res.Status, res.body)
	}
	if res := r.get(admin, "/garboard.v1.ConfigService/Confirm?connect=v1&encoding=json&message=%7B%7D"); res.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("GET of what changes: %s %s", res.Status, res.body)
	}
}

func TestAPanicEndsOneCallOnly(t *testing.T) {
	r := newRig(t)
	r.applier.panics = "a text from the handler"
	r.serve()
	client := garboardv1connect.NewConfigServiceClient(r.as(admin), host)
	_, err := ask(t, client.History, &apiv1.ConfigHistoryRequest{})
	wantCode(t, err, connect.CodeInternal, `log "api"`)
	if strings.Contains(err.Error(), r.applier.panics) {
		t.Errorf("the caller learns too much: %v", err)
	}
	if log := strings.Join(r.opts.Logs.Tail(LogID, 0), "\n"); !strings.Contains(log, r.applier.panics) || !strings.Contains(log, "goroutine") {
		t.Errorf("log: %q", log)
	}
	_, err = ask(t, client.Confirm, &apiv1.ConfirmConfigRequest{})
	must(t, err)
}

func TestMoreThanThereIsRoomForIsRefused(t *testing.T) {
	r := newRig(t).serve()
	for range maxStreams {
		r.server.streams <- struct{}{}
	}
	client := garboardv1connect.NewServiceServiceClient(r.as(admin), host)
	stream, err := client.Events(t.Context(), connect.NewRequest(&apiv1.EventsRequest{Tail: 1}))
	must(t, err)
	for stream.Receive() {
		t.Error("got an event")
	}
	wantCode(t, stream.Err(), connect.CodeResourceExhausted, "256 streams")
	// Who asks only once isn't in the way of those who follow.
	_, err = ask(t, client.List, &apiv1.ListServicesRequest{})
	must(t, err)
	<-r.server.streams
	stream, err = client.Events(t.Context(), connect.NewRequest(&apiv1.EventsRequest{Tail: 1}))
	must(t, err)
	for stream.Receive() {
	}
	must(t, stream.Err())
	if n := len(r.server.streams); n != maxStreams-1 {
		t.Errorf("%d places are taken", n)
	}
	// Others leave room for administrators, whatever the gate does.
	others := garboardv1connect.NewServiceServiceClient(r.as(reader), host)
	stream, err = others.Events(t.Context(), connect.NewRequest(&apiv1.EventsRequest{Tail: 1}))
	must(t, err)
	for stream.Receive() {
		t.Error("got an event")
	}
	wantCode(t, stream.Err(), connect.CodeResourceExhausted, "192 streams", "for administrators")
	_, err = ask(t, others.List, &apiv1.ListServicesRequest{})
	must(t, err)
}

func TestRequestsAreBounded(t *testing.T) {
	r := newRig(t).serve()
	_, err := ask(t, garboardv1connect.NewConfigServiceClient(r.as(admin), host).Apply, &apiv1.ApplyConfigRequest{Document: make([]byte, maxMessage+1)})
	wantCode(t, err, connect.CodeResourceExhausted)
	_, err = ask(t, garboardv1connect.NewConfigServiceClient(r.as(admin), host).Apply, &apiv1.ApplyConfigRequest{Document: make([]byte, maxDocument+1)})
	wantCode(t, err, connect.CodeInvalidArgument, "1048576")
	headers := map[string]string{"X-Large": strings.Repeat("x", 2*maxHeader)}
	req, err := http.NewRequest(http.MethodPost, host+"/garboard.v1.ConfigService/Get", nil)
	must(t, err)
	// The server may hang up before all of it is sent.
	if res, err := r.as(headers).Do(req); err == nil {
		if res.Body.Close(); res.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
			t.Errorf("large header: %s", res.Status)
		}
	}
	// What unfolds isn't taken at all.
	req, err = http.NewRequest(http.MethodPost, host+"/garboard.v1.ConfigService/Apply", strings.NewReader("\x1f\x8b"))
	must(t, err)
	req.Header.Set("Content-Type", "application/proto")
	req.Header.Set("Content-Encoding", "gzip")
	if res := r.do(r.as(admin), req); res.StatusCode != http.StatusNotImplemented {
		t.Errorf("gzip: %s %s", res.Status, res.body)
	}
}

func TestTheNodeStopsWhateverIsOpen(t *testing.T) {
	r := newRig(t).serve()
	var streams []*connect.ServerStreamForClient[apiv1.ResourceEvent]
	for _, http2 := range []bool{false, true} {
		stream, err := garboardv1connect.NewResourceServiceClient(r.client(reader, http2), host).Watch(t.Context(), connect.NewRequest(&apiv1.ListResourcesRequest{Type: "notes"}))
		must(t, err)
		if !stream.Receive() {
			t.Fatal(stream.Err())
		}
		streams = append(streams, stream)
	}
	conn, err := net.Dial("unix", r.socket) // says nothing
	must(t, err)
	defer conn.Close()
	began := time.Now()
	must(t, r.stop())
	if err := eventually.Took(began.Add(stopBudget), time.Now(), 2*time.Second); err != nil {
		t.Errorf("stopping, after %s: %v", stopBudget, err)
	}
	for _, stream := range streams {
		if stream.Receive() {
			t.Error("got another event")
		}
		wantCode(t, stream.Err(), connect.CodeUnavailable)
	}
	if _, err := os.Stat(r.socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left: %v", err)
	}
}

func TestOptionsAreChecked(t *testing.T) {
	if _, err := New(Options{}); err == nil {
		t.Error("a server of nothing")
	}
}
