package apid

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/garboard-os/garboard/api"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/resource"
	server "github.com/garboard-os/garboard/services/front/api"
	"github.com/garboard-os/garboard/services/front/sandbox"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// noConfig is a node that has nothing to apply configurations with.
type noConfig struct{}

func (noConfig) Apply(context.Context, configuration.Request) (configuration.Result, error) {
	return configuration.Result{}, configuration.ErrBusy
}
func (noConfig) Confirm(context.Context, string) error { return configuration.ErrNothingToConfirm }
func (noConfig) Rollback(context.Context, uint64, configuration.Request) (configuration.Result, error) {
	return configuration.Result{}, configuration.ErrBusy
}
func (noConfig) History() ([]configuration.Entry, error) { return nil, nil }
func (noConfig) Text(uint64) ([]byte, error)             { return nil, configuration.ErrNoConfig }
func (noConfig) Situation() (s configuration.Situation)  { return s }

// realNode is PID 1's side of the API on socket, for the gate with that PID, with fifty
// resources of a type and a log.
func realNode(t testing.TB, socket string, gate int) (*resource.Store, *logs.Logs) {
	t.Helper()
	store, l := resource.NewStore(), logs.New(nil)
	graph, err := dag.New(dag.Options{Log: l.Logger})
	if err != nil {
		t.Fatal(err)
	}
	runtime, err := resource.NewRuntime(store, l.Logger("controller-runtime"))
	if err != nil {
		t.Fatal(err)
	}
	for i := range 50 {
		addr := network.NodeAddress{Primary: netip.AddrFrom4([4]byte{192, 0, 2, byte(i)})}
		if err := network.Addresses.Put(store.As("test"), fmt.Sprintf("a%d", i), addr); err != nil {
			t.Fatal(err)
		}
	}
	serveNode(t, socket, gate, server.Options{Store: store, Graph: graph, Runtime: runtime, Logs: l, Config: noConfig{}, Since: dag.SinceBoot})
	return store, l
}

// serveNode runs PID 1's side of the API on socket, for the gate with that PID.
func serveNode(t testing.TB, socket string, gate int, o server.Options) {
	t.Helper()
	o.Gate = sandbox.NewSocket(os.Getuid(), socket)
	o.Gate.PID.Store(int64(gate))
	s, err := server.New(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	eventually.That(t, 10*time.Second, "PID 1's side to listen", func() error {
		conn, err := net.Dial("unix", socket)
		if err != nil {
			return err
		}
		return conn.Close()
	})
}

// The gate and what is behind it, over each protocol: both decide alike, and what
// one says arrives through the other.
func TestWithTheRealServer(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	b := newBench(t, normal(t, ca), nil)
	b.backend.close()
	store, l := realNode(t, b.socket, os.Getpid())
	l.Logger("kubelet").Info("hello")
	cert := shown(t, ca, pki.Leaf{CN: "bob", Orgs: []string{string(api.Reader)}})
	for _, p := range protocols {
		c := b.client(t, cert, p.http2)
		resources := garboardv1connect.NewResourceServiceClient(c, b.url(""), p.options...)
		list, err := resources.List(t.Context(), connect.NewRequest(&apiv1.ListResourcesRequest{Type: network.Addresses.Type()}))
		if err != nil || len(list.Msg.GetItems()) != 50 {
			t.Errorf("%s: %v", p.name, err)
		}
		_, err = resources.List(t.Context(), connect.NewRequest(&apiv1.ListResourcesRequest{Type: "things"}))
		if connect.CodeOf(err) != connect.CodeNotFound {
			t.Errorf("%s: %v", p.name, err)
		}
		read, err := garboardv1connect.NewLogServiceClient(c, b.url(""), p.options...).Read(t.Context(), connect.NewRequest(&apiv1.ReadLogRequest{Id: "kubelet"}))
		if err != nil {
			t.Fatal(err)
		}
		if !read.Receive() || !strings.Contains(read.Msg().GetLines()[0], "hello") || read.Receive() || read.Err() != nil {
			t.Errorf("%s: %v", p.name, read.Err())
		}
		read.Close()
	}
	out, err := newCurl(t, ca, cert).run(b.url("/v1/logs/kubelet?tail=1"))
	if err != nil || !strings.HasPrefix(out, `{"line":"`) || !strings.Contains(out, "hello") {
		t.Errorf("%v: %s", err, out)
	}

	// A stranger in maintenance mode may ask for the version while the node has no
	// configuration, and not a moment longer.
	b.writeAndWait(t, maintenance(t, ""))
	version := func() error {
		_, err := garboardv1connect.NewNodeServiceClient(b.client(t, nil, true), b.url("")).Version(t.Context(), connect.NewRequest(&apiv1.VersionRequest{}))
		return err
	}
	for _, tc := range []struct {
		stage configuration.Stage
		code  connect.Code
	}{{configuration.Maintenance, 0}, {configuration.Configured, connect.CodeFailedPrecondition}} {
		if err := configuration.Stages.Put(store.As("test"), configuration.StageID, tc.stage); err != nil {
			t.Fatal(err)
		}
		if err := version(); tc.code == 0 && err != nil || tc.code != 0 && connect.CodeOf(err) != tc.code {
			t.Errorf("%s: %v", tc.stage, err)
		}
	}
}

// BenchmarkNode200 is 200 clients, each with its own connection, who list resources
// of a node at once, while one follows a log and doesn't read it.
func BenchmarkNode200(b *testing.B) {
	p := startProgram(b)
	p.b.backend.close()
	_, l := realNode(b, p.b.socket, p.pid)
	stuck, err := tls.Dial("tcp", p.b.address, clientTLS(admin(b, p.ca)))
	if err != nil {
		b.Fatal(err)
	}
	defer stuck.Close()
	fmt.Fprint(stuck, "GET /v1/logs/kubelet?follow=true HTTP/1.1\r\nHost: n1\r\n\r\n")
	log := l.Logger("kubelet")
	cert := shown(b, p.ca, pki.Leaf{CN: "bob", Orgs: []string{string(api.Reader)}})
	clients := make([]garboardv1connect.ResourceServiceClient, loadClients)
	for i := range clients {
		clients[i] = garboardv1connect.NewResourceServiceClient(p.b.client(b, cert, true), p.b.url(""))
	}
	round := func() (took []time.Duration) {
		var mu sync.Mutex // guards took
		var group sync.WaitGroup
		for _, c := range clients {
			group.Go(func() {
				began := time.Now()
				if _, err := c.List(b.Context(), connect.NewRequest(&apiv1.ListResourcesRequest{Type: network.Addresses.Type()})); err != nil {
					b.Error(err)
				}
				mu.Lock()
				defer mu.Unlock()
				took = append(took, time.Since(began))
			})
		}
		group.Wait()
		return took
	}
	round() // with the handshakes
	before := p.cpu(b)
	b.ResetTimer()
	var took []time.Duration
	for b.Loop() {
		log.Info(strings.Repeat("x", 1000))
		took = append(took, round()...)
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2])/1e6, "p50-ms")
	b.ReportMetric(float64(took[len(took)*99/100])/1e6, "p99-ms")
	b.ReportMetric(float64((p.cpu(b)-before).Microseconds())/float64(len(took)), "gate-µs/call")
	b.ReportMetric(mb(p.pss(b)), "pss-MB")
}
