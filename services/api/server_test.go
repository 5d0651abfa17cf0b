package api

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	contract "github.com/garboard-os/garboard/api"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/eventually"
	"github.com/garboard-os/garboard/services/containerd"
	"github.com/garboard-os/garboard/services/dag"
	"github.com/garboard-os/garboard/services/logs"
	"github.com/garboard-os/garboard/services/machine"
	"github.com/garboard-os/garboard/services/process"
	"github.com/garboard-os/garboard/services/resource"
)

// rig is a server on a socket of its own, over a real store, graph and logs.
type rig struct {
	t       testing.TB
	opts    Options
	server  *Server
	applier *applier
	stop    func() error // ends the server, and returns what Run did
}

// note is a fact of tests.
type note struct {
	Text string `yaml:"text"`
	Deep struct {
		List []string `yaml:"list"`
	} `yaml:"deep"`
}

var notes = resource.Define[note](resource.Definition{
	Type: "Notes.test.garboard.dev", Kind: "Note", Aliases: []string{"nt"}, Namespace: "paper",
	Columns: []resource.Column{{Name: "TEXT", Value: func(s any) string { return s.(note).Text }}},
})

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// daemon runs until it is stopped.
func daemon(id string, needs ...string) dag.Service {
	return dag.Service{ID: id, DependsOn: needs, Run: func(ctx context.Context, h *dag.Handle) error {
		h.Started("Started task " + id + " (PID 2334) for container " + id)
		<-ctx.Done()
		return ctx.Err()
	}}
}

// newRig prepares everything but the server, so that tests can change options.
func newRig(t testing.TB, services ...dag.Service) *rig {
	t.Helper()
	store, l := resource.NewStore(), logs.New(nil)
	if services == nil {
		ctrd := daemon("containerd")
		ctrd.Kind = dag.Process
		services = []dag.Service{ctrd, daemon("kubelet", "containerd"), daemon("apid"), daemon("networkd")}
	}
	graph, err := dag.New(dag.Options{Log: l.Logger, Story: l.Quiet}, services...)
	must(t, err)
	rt, err := resource.NewRuntime(store, l.Logger("controller-runtime"))
	must(t, err)
	dir, err := os.MkdirTemp("", "api") // t.TempDir is too long for a socket's name
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	r := &rig{t: t, applier: &applier{store: store}}
	began, table := time.Now(), process.New()
	r.opts = Options{
		Mode: boot.Container, Store: store, Graph: graph, Runtime: rt, Logs: l, Config: r.applier,
		Containerd: containerd.New(containerd.Options{Mode: boot.Container, Store: store, Processes: table, Logs: l}), Processes: table,
		Power:    func(boot.Power, string) {},
		Diagnose: func(context.Context) ([]*apiv1.Finding, []string) { return nil, []string{"nothing"} },
		Disks:    func(context.Context) ([]*apiv1.Disk, error) { return nil, nil },
		Since:    func() time.Duration { return time.Since(began) },
		Socket:   filepath.Join(dir, "run", "machine.sock"), PodLogs: filepath.Join(dir, "pods"), Kmsg: filepath.Join(dir, "kmsg"),
	}
	must(t, machine.Stages.Put(store.As(machine.ID), machine.StageID, machine.Configured))
	return r
}

// serve makes and runs the server, and the graph.
func (r *rig) serve() *rig {
	r.t.Helper()
	server, err := New(r.opts)
	must(r.t, err)
	r.server = server
	ctx, cancel := context.WithCancel(context.Background())
	var graph sync.WaitGroup
	gctx, stopGraph := context.WithCancel(context.Background())
	graph.Go(func() { _ = r.opts.Graph.Run(gctx) })
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx) }()
	r.stop = sync.OnceValue(func() error {
		cancel()
		err := <-done
		stopGraph()
		graph.Wait()
		return err
	})
	r.t.Cleanup(func() { _ = r.stop() })
	eventually.That(r.t, 10*time.Second, "the socket is there", func() error {
		c, err := net.Dial("unix", r.opts.Socket)
		if err == nil {
			c.Close()
		}
		return err
	})
	return r
}

// as is a client whose calls the gate sends on with these headers.
func (r *rig) as(headers map[string]string) *http.Client { return r.client(headers, false) }

func (r *rig) client(headers map[string]string, http2 bool) *http.Client {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(!http2)
	protocols.SetUnencryptedHTTP2(http2)
	// A small window, so that a test of a reader that doesn't read needn't fill 4 MiB.
	window := &http.HTTP2Config{MaxReceiveBufferPerStream: 64 << 10, MaxReceiveBufferPerConnection: 64 << 10}
	transport := &http.Transport{Protocols: protocols, HTTP2: window, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", r.opts.Socket)
	}}
	r.t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: roundTripper(func(req *http.Request) (*http.Response, error) {
		req = req.Clone(req.Context())
		for name, value := range headers {
			req.Header.Set(name, value)
		}
		return transport.RoundTrip(req)
	})}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

const host = "http://machine"

// identity is what the gate says of a caller with a certificate.
func identity(roles ...contract.Role) map[string]string {
	var names []string
	for _, role := range roles {
		names = append(names, string(role))
	}
	return map[string]string{
		contract.HeaderPeer: "jane", contract.HeaderRoles: strings.Join(names, ","),
		contract.HeaderRemote: "10.5.0.1:40000", contract.HeaderMode: contract.ModeNormal,
	}
}

// stranger is what it says while nobody can be known.
var stranger = map[string]string{contract.HeaderRemote: "10.5.0.9:41000", contract.HeaderMode: contract.ModeMaintenance}

var (
	admin    = identity(contract.Admin)
	operator = identity(contract.Operator)
	reader   = identity(contract.Reader)
)

// call calls a unary method.
func ask[Req, Res any](t testing.TB, method func(context.Context, *connect.Request[Req]) (*connect.Response[Res], error), msg *Req) (*Res, error) {
	ctx, cancel := context.WithTimeout(t.Context(), eventually.Scale(20*time.Second))
	defer cancel()
	res, err := method(ctx, connect.NewRequest(msg))
	if err != nil {
		return nil, err
	}
	return res.Msg, nil
}

// wantCode checks an error's code, and what it tells.
func wantCode(t testing.TB, err error, code connect.Code, parts ...string) {
	t.Helper()
	if connect.CodeOf(err) != code || err == nil {
		t.Errorf("got %v, want %s", err, code)
		return
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("error %q doesn't say %q", err, part)
		}
	}
}

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
		"not the roles":    {identity("system:masters", contract.Peer, contract.EtcdBackup), connect.CodePermissionDenied},
		"maintenance over": {stranger, connect.CodeFailedPrecondition},
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

// answer is a response whose body was read.
type answer struct {
	*http.Response
	body string
}

func (r *rig) post(headers map[string]string, path, contentType string, body io.Reader) answer {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), http.MethodPost, host+path, body)
	must(r.t, err)
	req.Header.Set("Content-Type", contentType)
	return r.do(r.as(headers), req)
}

func (r *rig) get(headers map[string]string, path string) answer {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), http.MethodGet, host+path, nil)
	must(r.t, err)
	return r.do(r.as(headers), req)
}

func (r *rig) do(client *http.Client, req *http.Request) answer {
	r.t.Helper()
	res, err := client.Do(req)
	must(r.t, err)
	defer res.Body.Close()
	data, err := io.ReadAll(res.Body)
	must(r.t, err)
	return answer{res, string(data)}
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
	client := garboardv1connect.NewServiceServiceClient(r.as(reader), host)
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

func TestAnIdleSenderAndAnIdleReaderAreEnded(t *testing.T) {
	r := newRig(t)
	r.serve()
	r.server.patience = patience{body: 50 * time.Millisecond, write: 200 * time.Millisecond}
	for _, http2 := range []bool{false, true} {
		t.Run(fmt.Sprintf("http2=%t", http2), func(t *testing.T) {
			// A body that never comes.
			body, hold := io.Pipe()
			defer hold.Close()
			req, err := http.NewRequest(http.MethodPost, host+"/garboard.v1.ConfigService/Apply", body)
			must(t, err)
			req.Header.Set("Content-Type", "application/proto")
			if res, err := r.client(admin, http2).Do(req); err == nil {
				if res.StatusCode == http.StatusOK {
					t.Errorf("got %s", res.Status)
				}
				res.Body.Close()
			}
			// A reader that doesn't read: a log that grows all the time.
			w := r.opts.Logs.Writer("chatty")
			fmt.Fprintln(w, "begin")
			req, err = http.NewRequest(http.MethodGet, host+"/v1/logs/chatty?follow", nil)
			must(t, err)
			res, err := r.client(reader, http2).Do(req)
			must(t, err)
			defer res.Body.Close()
			eventually.That(t, 20*time.Second, "the reader that doesn't read is ended", func() error {
				for range 100 {
					fmt.Fprintln(w, strings.Repeat("x", 1000))
				}
				if n := len(r.server.streams); n > 0 {
					return fmt.Errorf("%d streams", n)
				}
				return nil
			})
			// What was read is whole, and its end is no end.
			if _, err := io.Copy(io.Discard, res.Body); err == nil {
				t.Error("the end looks like the log's")
			}
		})
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
	conn, err := net.Dial("unix", r.opts.Socket) // says nothing
	must(t, err)
	defer conn.Close()
	began := time.Now()
	must(t, r.stop())
	if took := time.Since(began); took > stopBudget+eventually.Scale(2*time.Second) {
		t.Errorf("stopping took %s", took)
	}
	for _, stream := range streams {
		if stream.Receive() {
			t.Error("got another event")
		}
		wantCode(t, stream.Err(), connect.CodeUnavailable)
	}
	if _, err := os.Stat(r.opts.Socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left: %v", err)
	}
}

func TestTheSocketIsForRootAndTheGate(t *testing.T) {
	r := newRig(t)
	must(t, os.MkdirAll(filepath.Dir(r.opts.Socket), 0o755))
	must(t, os.WriteFile(r.opts.Socket, []byte("left by an earlier run"), 0o600))
	r.serve()
	info, err := os.Stat(r.opts.Socket)
	must(t, err)
	if info.Mode().Perm() != socketMode || info.Mode().Type() != os.ModeSocket {
		t.Errorf("mode %s", info.Mode())
	}
}

func TestOptionsAreChecked(t *testing.T) {
	if _, err := New(Options{}); err == nil {
		t.Error("a server of nothing")
	}
}

// applier is a machine.Applier that notes what it is asked.
type applier struct {
	store  *resource.Store
	panics string // History does

	mu        sync.Mutex // guards all following fields
	texts     map[uint64][]byte
	requests  []machine.Request
	confirmed []string
	result    machine.Result
	err       error
	situation machine.Situation
}

func (a *applier) Apply(_ context.Context, r machine.Request) (machine.Result, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.requests = append(a.requests, r)
	if a.err == nil && a.store != nil {
		a.err = machine.Stages.Put(a.store.As(machine.ID), machine.StageID, machine.Configured)
	}
	return a.result, a.err
}

func (a *applier) Rollback(_ context.Context, version uint64, r machine.Request) (machine.Result, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.requests = append(a.requests, r)
	return machine.Result{Version: version}, a.err
}

func (a *applier) Confirm(_ context.Context, by string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.confirmed = append(a.confirmed, by)
	return a.err
}

func (a *applier) History() ([]machine.Entry, error) {
	if a.panics != "" {
		panic(a.panics)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	var entries []machine.Entry
	for version := range a.texts {
		if version != 0 {
			entries = append(entries, machine.Entry{Version: version, By: "joe", Mode: machine.Try, Time: time.Unix(1, 0)})
		}
	}
	slices.SortFunc(entries, func(x, y machine.Entry) int { return int(y.Version) - int(x.Version) })
	return entries, a.err
}

func (a *applier) Text(version uint64) ([]byte, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	text, ok := a.texts[version]
	switch {
	case a.err != nil:
		return nil, a.err
	case !ok && version == 0:
		return nil, machine.ErrNoConfig
	case !ok:
		return nil, fmt.Errorf("version %d isn't in the history", version)
	}
	return bytes.Clone(text), nil
}

func (a *applier) Situation() machine.Situation {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.situation
}
