package main

import (
	"archive/zip"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/garboard-os/garboard/tools/testing/freeport"
)

// liveNodes serves handlers as nodes over TLS, and makes the app that can ask
// them. A node without a handler is off.
func liveNodes(t *testing.T, nodes map[string]http.Handler) *app {
	t.Helper()
	now := time.Now()
	ca, err := pki.NewMachineCA(now)
	if err != nil {
		t.Fatal(err)
	}
	crt, key, err := ca.Issue(pki.Leaf{CN: "admin", Orgs: []string{string(api.Admin)}, Client: true, Now: now})
	if err != nil {
		t.Fatal(err)
	}
	encode := base64.StdEncoding.EncodeToString
	c := &client.Context{CA: encode(ca.Cert), Crt: encode(crt), Key: encode(key), Via: map[string]string{}}
	for name, handler := range nodes {
		if handler == nil { // it is off
			c.Via[name] = freeport.Find(t).String()
			continue
		}
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		c.Via[name] = l.Addr().String()
		leaf := pki.Leaf{CN: name, IPs: []netip.Addr{netip.MustParseAddr(name)}, Server: true, Now: now}
		if _, worker := handler.(*takenOver); worker {
			leaf.Units = []string{pki.WorkerUnit}
		}
		crt, key, err := ca.Issue(leaf)
		if err != nil {
			t.Fatal(err)
		}
		pair, err := tls.X509KeyPair(crt, key)
		if err != nil {
			t.Fatal(err)
		}
		server := &http.Server{Handler: handler, ErrorLog: log.New(io.Discard, "", 0),
			TLSConfig: &tls.Config{MinVersion: tls.VersionTLS13, NextProtos: []string{"h2"}, Certificates: []tls.Certificate{pair}}}
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = server.ServeTLS(l, "", "")
		}()
		t.Cleanup(func() {
			_ = server.Close()
			<-done
		})
	}
	a := &app{loaded: c, timeout: 20 * time.Second, out: &shared{}, err: &shared{}}
	for name := range nodes {
		a.nodes = append(a.nodes, name)
	}
	slices.Sort(a.nodes)
	return a
}

// shared is an output that several goroutines write to.
type shared struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (s *shared) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(p)
}

func (s *shared) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

// leaky is a node that puts secrets wherever it can.
type leaky struct {
	garboardv1connect.UnimplementedNodeServiceHandler
	garboardv1connect.UnimplementedConfigServiceHandler
	text string // full of secrets
	hang chan struct{}
	asks func() // when a log is asked for; nil: nothing
}

type leakyLog struct {
	garboardv1connect.UnimplementedLogServiceHandler
	*leaky
}

type leakyResource struct {
	garboardv1connect.UnimplementedResourceServiceHandler
	*leaky
}

func (l *leaky) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle(garboardv1connect.NewNodeServiceHandler(l))
	mux.Handle(garboardv1connect.NewConfigServiceHandler(l))
	mux.Handle(garboardv1connect.NewLogServiceHandler(leakyLog{leaky: l}))
	mux.Handle(garboardv1connect.NewResourceServiceHandler(leakyResource{leaky: l}))
	return mux
}

func (l *leaky) Version(context.Context, *connect.Request[apiv1.VersionRequest]) (*connect.Response[apiv1.VersionResponse], error) {
	return answerWith(&apiv1.VersionResponse{Version: "v0.1.0", Hostname: "leaky"})
}

func (l *leaky) Memory(ctx context.Context, _ *connect.Request[apiv1.MemoryRequest]) (*connect.Response[apiv1.MemoryResponse], error) {
	select {
	case <-l.hang: // nil: for ever
	case <-ctx.Done():
	}
	return nil, ctx.Err()
}

func (l *leaky) Processes(context.Context, *connect.Request[apiv1.ProcessesRequest]) (*connect.Response[apiv1.ProcessesResponse], error) {
	return answerWith(&apiv1.ProcessesResponse{Processes: []*apiv1.Process{{Pid: 1, Args: "init"}, {Pid: 2, Args: l.text}}})
}

func (l *leaky) Disks(context.Context, *connect.Request[apiv1.DisksRequest]) (*connect.Response[apiv1.DisksResponse], error) {
	return nil, connect.NewError(connect.CodeInternal, errors.New(l.text))
}

// Get must be asked for the redacted form, also by an administrator.
func (l *leaky) Get(_ context.Context, r *connect.Request[apiv1.GetConfigRequest]) (*connect.Response[apiv1.GetConfigResponse], error) {
	if !r.Msg.Redact {
		return nil, connect.NewError(connect.CodeInternal, errors.New("with secrets"))
	}
	return answerWith(&apiv1.GetConfigResponse{Document: []byte("version: v1alpha1\n# " + strings.ReplaceAll(l.text, "\n", "\n# ") + "\n")})
}

func (l leakyLog) List(_ context.Context, r *connect.Request[apiv1.ListLogsRequest]) (*connect.Response[apiv1.ListLogsResponse], error) {
	if r.Msg.Kubernetes {
		return answerWith(&apiv1.ListLogsResponse{Ids: []string{"kube-system/dns-1:dns", "kube-system/dns-1_dns", "../../etc/x:y"}})
	}
	return answerWith(&apiv1.ListLogsResponse{Ids: []string{"etcd", "clean"}})
}

const cleanLog = "12:00 all is well: https://10.5.0.2:6443/healthz sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"

func (l leakyLog) Read(ctx context.Context, r *connect.Request[apiv1.ReadLogRequest], stream *connect.ServerStream[apiv1.LogChunk]) error {
	if l.asks != nil {
		l.asks()
		<-ctx.Done()
		return ctx.Err()
	}
	text := l.text
	if r.Msg.Id == "clean" {
		text = cleanLog
	}
	return stream.Send(&apiv1.LogChunk{Lines: strings.Split(text, "\n")})
}

func (l leakyResource) Definitions(context.Context, *connect.Request[apiv1.ListDefinitionsRequest]) (*connect.Response[apiv1.ListDefinitionsResponse], error) {
	m, err := replay[apiv1.ListResourcesResponse]("ResourceService/List", bootstrapStatuses)
	if err != nil {
		return nil, err
	}
	return answerWith(&apiv1.ListDefinitionsResponse{Definitions: []*apiv1.ResourceDefinition{m.Msg.Definition}})
}

var bootstrapStatuses = &apiv1.ListResourcesRequest{Type: "bs"}

func (l leakyResource) List(context.Context, *connect.Request[apiv1.ListResourcesRequest]) (*connect.Response[apiv1.ListResourcesResponse], error) {
	m, err := replay[apiv1.ListResourcesResponse]("ResourceService/List", bootstrapStatuses)
	if err == nil {
		m.Msg.Items[0].Spec = "data: " + quoted(l.text)
	}
	return m, err
}

func unzip(t *testing.T, path string) map[string]string {
	t.Helper()
	z, err := zip.OpenReader(path)
	if err != nil {
		t.Fatal(err)
	}
	defer z.Close()
	files := map[string]string{}
	for _, f := range z.File {
		if !fs.ValidPath(f.Name) || files[f.Name] != "" {
			t.Errorf("the archive has %q", f.Name)
		}
		r, err := f.Open()
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		files[f.Name] = string(text)
	}
	return files
}

// A bundle of nodes that are full of secrets has none, wherever they were; what
// isn't secret is there to the byte; a node that is off, methods that fail and
// one that hangs cost only what they would have said.
func TestSupport(t *testing.T) {
	s := newSecrets(t)
	text := strings.Join([]string{"before", s.rsa + "between", b64(s.curve), "join " + s.token, "Authorization: Bearer " + s.bearer,
		s.jwt, "http://bob:hunter2@proxy:3128", "client-key-data: " + b64(s.rsa), "after"}, "\n")
	leak := &leaky{text: text}
	a := liveNodes(t, map[string]http.Handler{"10.5.0.2": leak.handler(), "10.5.0.3": leak.handler(), "10.5.0.9": nil})
	a.timeout = eventually.Scale(5 * time.Second)
	path := filepath.Join(t.TempDir(), "b.zip")
	err := (&bundle{app: a, path: path, lines: 10}).make(t.Context())
	if exitCode(err) != codeSome || !strings.Contains(err.Error(), "10.5.0.9: ") {
		t.Errorf("exit code %d: %v", exitCode(err), err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	files := unzip(t, path)
	tells := []string{s.token, s.bearer, s.jwt[:60], "hunter2", strings.Fields(s.rsa)[9], strings.Fields(s.curve)[3], b64(s.rsa)[60:120], b64(s.curve)[60:120]}
	for name, text := range files {
		for _, tell := range tells {
			if strings.Contains(text, tell) {
				t.Errorf("%s has %q", name, tell)
			}
		}
	}
	for _, name := range []string{"logs/etcd.log", "logs/kubernetes/kube-system/dns-1_dns.log", "logs/kubernetes/kube-system/dns-1_dns-2.log", "logs/kubernetes/_/_etc_x_y.log",
		"resources/BootstrapStatuses.v1alpha1.garboard.dev.yaml", "processes.yaml", "config/config.yaml"} {
		for _, node := range []string{"10.5.0.2", "10.5.0.3"} {
			if text := files[node+"/"+name]; !strings.Contains(text, hidden) || !strings.Contains(text, "before") || !strings.Contains(text, "after") {
				t.Errorf("%s/%s:\n%s", node, name, text)
			}
		}
	}
	if got := files["10.5.0.2/logs/clean.log"]; got != cleanLog+"\n" {
		t.Errorf("clean.log:\n%s", got)
	}
	missing := files["10.5.0.2/errors.txt"]
	for _, want := range []string{"memory.yaml: ", "disks.yaml: before (secret)", "boot-chart.svg: doesn't support this request"} {
		if !strings.Contains(missing, want) {
			t.Errorf("no %q in errors.txt:\n%s", want, missing)
		}
	}
	for _, want := range []string{"10.5.0.9\n  nothing could be collected: ", "  logs/etcd.log: private key: 1\n", "  logs/etcd.log: encoded secret: 2\n"} {
		if !strings.Contains(files["summary.txt"], want) {
			t.Errorf("no %q in summary.txt:\n%s", want, files["summary.txt"])
		}
	}
	if err := (&bundle{app: a, path: path, lines: 10}).make(t.Context()); exitCode(err) != codeUsage {
		t.Errorf("replaced a file: %v", err)
	}
}

// Ctrl-C in the middle, and nodes that are all off, leave no file behind.
func TestSupportLeavesNothing(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	leak := &leaky{text: "x", asks: cancel}
	for name, c := range map[string]struct {
		handler http.Handler
		code    int
	}{"interrupted": {leak.handler(), codeFailed}, "off": {nil, codeUnreachable}} {
		dir := t.TempDir()
		a := liveNodes(t, map[string]http.Handler{"10.5.0.2": c.handler})
		on := t.Context()
		if c.handler != nil {
			on = ctx
		}
		err := (&bundle{app: a, path: filepath.Join(dir, "b.zip"), lines: 10}).make(on)
		if exitCode(err) != c.code || c.handler != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", name, err)
		}
		if left, _ := os.ReadDir(dir); len(left) > 0 {
			t.Errorf("%s: %v is left", name, left)
		}
	}
}

// A node that stops answering isn't waited for fifty times.
func TestSupportGivesUp(t *testing.T) {
	silent := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/Version") {
			(&leaky{}).handler().ServeHTTP(w, r)
			return
		}
		<-r.Context().Done()
	})
	a := liveNodes(t, map[string]http.Handler{"10.5.0.2": silent})
	a.timeout = eventually.Scale(2 * time.Second) // enough for the first answer on a busy machine
	path := filepath.Join(t.TempDir(), "b.zip")
	start := time.Now()
	if err := (&bundle{app: a, path: path, lines: 10}).make(t.Context()); err != nil {
		t.Fatal(err)
	}
	// One round of perNode, not all of them.
	if took, all := time.Since(start), a.timeout*time.Duration(len(supportItems)); took > all {
		t.Errorf("took %s, as if all were waited for", took)
	}
	if missing := unzip(t, path)["10.5.0.2/errors.txt"]; strings.Count(missing, errSkipped.Error()) < len(supportItems)-2*perNode {
		t.Errorf("errors.txt:\n%s", missing)
	}
}

// What takes connections and never says anything is off, too.
func TestSupportMute(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	dir := t.TempDir()
	a := liveNodes(t, map[string]http.Handler{"10.5.0.2": nil})
	a.loaded.Via["10.5.0.2"] = l.Addr().String()
	a.timeout = 100 * time.Millisecond
	err = (&bundle{app: a, path: filepath.Join(dir, "b.zip"), lines: 10}).make(t.Context())
	var nodes *nodeErrors
	if left, _ := os.ReadDir(dir); !errors.As(err, &nodes) || len(left) > 0 {
		t.Errorf("%v, %v is left", err, left)
	}
}

// Of what is too long the end is kept, from the beginning of a line on.
func TestEnding(t *testing.T) {
	e := &tailBuffer{}
	line := strings.Repeat("x", 1022) + "\n"
	total := 0
	for i := 0; total < 5*supportItem; i++ {
		n, err := fmt.Fprintf(e, "%d%s", i%10, line)
		if err != nil {
			t.Fatal(err)
		}
		total += n
	}
	kept := e.kept.Bytes()
	if e.lost+len(kept) != total || len(kept) < supportItem/2 || len(kept) > 2*supportItem+2048 || len(kept)%1024 != 0 || kept[len(kept)-1] != '\n' {
		t.Errorf("%d of %d bytes are kept, %d lost", len(kept), total, e.lost)
	}
}
