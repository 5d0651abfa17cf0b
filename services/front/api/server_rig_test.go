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
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/process"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/front/sandbox"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/disk"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// rig is a server on a socket of its own, over a real store, graph and logs.
type rig struct {
	t       testing.TB
	opts    Options
	server  *Server
	applier *applier
	socket  string
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
	graph, err := dag.New(dag.Options{Log: l.Logger, EventLog: l.Quiet}, services...)
	must(t, err)
	rt, err := resource.NewRuntime(store, l.Logger("controller-runtime"))
	must(t, err)
	dir, err := os.MkdirTemp("", "api") // t.TempDir is too long for a socket's name
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	r := &rig{t: t, applier: &applier{store: store}, socket: filepath.Join(dir, "machine.sock")}
	began, table := time.Now(), process.New()
	r.opts = Options{
		Mode: boot.Container, Store: store, Graph: graph, Runtime: rt, Logs: l, Config: r.applier,
		Containerd: containerd.New(containerd.Options{Mode: boot.Container, Store: store, Processes: table, Logs: l}),
		Etcd:       etcd.New(etcd.Options{Store: store, DataDir: filepath.Join(dir, "etcd"), Journal: filepath.Join(dir, "etcd.json")}),
		Diagnose:   func(context.Context) ([]*apiv1.Finding, []string) { return nil, []string{"nothing"} },
		Disks:      func() ([]disk.Disk, error) { return nil, nil },
		Recovery:   &sealed{},
		SetTime: func(_ context.Context, to time.Time) error {
			if to.Before(boot.Built()) {
				return errors.New("this system was built later")
			}
			return nil
		},
		Reboot: func(_ context.Context, _ string, _ bool, do func() error) (string, error) { return "", do() },
		Since:  func() time.Duration { return time.Since(began) },
		Gate:   sandbox.NewSocket(os.Getuid(), r.socket), PodLogs: filepath.Join(dir, "pods"), Kmsg: filepath.Join(dir, "kmsg"),
	}
	r.opts.Gate.PID.Store(int64(os.Getpid()))
	r.opts.Operations, err = operation.New(operation.Options{Store: store, Log: l.Quiet(operation.ID), Dir: filepath.Join(dir, "operations")})
	must(t, err)
	must(t, configuration.Stages.Put(store.As(configuration.ID), configuration.StageID, configuration.Configured))
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
		c, err := net.Dial("unix", r.socket)
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
		return new(net.Dialer).DialContext(ctx, "unix", r.socket)
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

// unknownClient are the gate's headers in maintenance mode, without a client certificate.
var unknownClient = map[string]string{contract.HeaderRemote: "10.5.0.9:41000", contract.HeaderMode: contract.ModeMaintenance}

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

// applier is a machine.Applier that notes what it is asked.
type applier struct {
	store  *resource.Store
	panics string // History does

	mu        sync.Mutex // guards all following fields
	texts     map[uint64][]byte
	first     bool // it was given
	requests  []configuration.Request
	confirmed []string
	result    configuration.Result
	err       error
	situation configuration.Situation
}

func (a *applier) Apply(ctx context.Context, r configuration.Request) (configuration.Result, error) {
	if around := r.Around; around != nil && !r.DryRun {
		r.Around = nil
		planned := r
		planned.DryRun = true
		plan, err := a.Apply(ctx, planned)
		if err != nil {
			return plan, err
		}
		return around(plan, func() (configuration.Result, error) { return a.Apply(ctx, r) })
	}
	r.Around = nil
	a.mu.Lock()
	defer a.mu.Unlock()
	if r.First && a.first {
		return configuration.Result{}, configuration.ErrConfigured
	}
	a.first = true
	a.requests = append(a.requests, r)
	if a.err == nil && a.store != nil {
		a.err = configuration.Stages.Put(a.store.As(configuration.ID), configuration.StageID, configuration.Configured)
	}
	return a.result, a.err
}

func (a *applier) Rollback(ctx context.Context, version uint64, r configuration.Request) (configuration.Result, error) {
	a.mu.Lock()
	_, known := a.texts[version]
	a.mu.Unlock()
	if version != 0 && !known {
		return configuration.Result{}, fmt.Errorf("version %d %w", version, configuration.ErrNoVersion)
	}
	result, err := a.Apply(ctx, r)
	result.Version = version
	return result, err
}

// done are the requests that weren't for looking.
func (a *applier) done() []configuration.Request {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(a.requests), func(r configuration.Request) bool { return r.DryRun })
}

func (a *applier) Confirm(_ context.Context, by string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.confirmed = append(a.confirmed, by)
	return a.err
}

func (a *applier) History() ([]configuration.Entry, error) {
	if a.panics != "" {
		panic(a.panics)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	var entries []configuration.Entry
	for version := range a.texts {
		if version != 0 {
			entries = append(entries, configuration.Entry{Version: version, By: "joe", Mode: configuration.Try, Time: time.Unix(1, 0)})
		}
	}
	slices.SortFunc(entries, func(x, y configuration.Entry) int { return int(y.Version) - int(x.Version) })
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
		return nil, configuration.ErrNoConfig
	case !ok:
		return nil, fmt.Errorf("version %d %w", version, configuration.ErrNoVersion)
	}
	return bytes.Clone(text), nil
}

func (a *applier) Situation() configuration.Situation {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.situation
}
