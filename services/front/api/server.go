// Package api serves the machine API inside PID 1, on a socket for
// the gate (apid) only.
//
// The gate terminates TLS, checks the role, and passes the caller in headers. This side
// checks again, audits changes, and bounds the size of a message,
// the number of calls, and their time. The gate bounds how long a caller may take to
// send or to read: when it ends a call, the call ends here too.
//
//	gate ──▶ guard (caller, role, limits, deadline, panics)
//	           ├─▶ Connect ─▶ audit ─▶ configService, resourceService, …
//	           └─▶ GET /v1/logs/…     (NDJSON)
package api

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"time"

	"connectrpc.com/connect"
	contract "github.com/garboard-os/garboard/api"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/front/sandbox"
	"github.com/garboard-os/garboard/services/front/tlsserver"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/roster"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/disk"
	"github.com/garboard-os/garboard/services/system/luks"
	"github.com/garboard-os/garboard/services/system/tpm"
	"golang.org/x/net/netutil"
)

const (
	// LogID is the server's own log.
	LogID = "api"

	// maxMessage bounds a request: four times the largest configuration.
	maxMessage = 4 << 20
	// maxHeader bounds the headers of a request, which have the caller only.
	maxHeader = 32 << 10

	// maxCalls and maxStreams bound the calls at one time, so that the memory of
	// PID 1 stays bounded: there is room for 200 clients that read at once, and streams
	// can't use the room of other calls.
	maxCalls   = 256
	maxStreams = 256
	// maxConnections is for a gate that opens one for each call.
	maxConnections = maxCalls + maxStreams + 64

	// headerTimeout is for the header of a request from the gate.
	headerTimeout = 10 * time.Second
	// writeTimeout ends a connection from which the gate takes nothing.
	writeTimeout = 5 * time.Minute
	// callTimeout ends a call that isn't a stream. The longest one stops a service
	// within its budget.
	callTimeout = 5 * time.Minute
	// idleTimeout closes unused connections. The gate closes its own earlier,
	// so that none is closed just when it is used again.
	idleTimeout = 2 * time.Minute
	// stopBudget is what calls under way get when the node stops. Streams end at
	// once.
	stopBudget = 3 * time.Second

	// listenRetry is the pause before the socket is made anew.
	listenRetry = time.Second
)

// Server is the machine API's server. Make one with New.
type Server struct {
	opts    Options
	log     *slog.Logger
	audit   *audit
	handler http.Handler
	errors  *connect.ErrorWriter
	calls   chan struct{} // one element per call under way
	streams chan struct{} // one per stream

	services *serviceService

	stopping context.Context // ends streams
	stop     context.CancelFunc
}

// New makes the server; nothing listens yet.
func New(o Options) (*Server, error) {
	if o.Store == nil || o.Graph == nil || o.Runtime == nil || o.Logs == nil || o.Config == nil || o.Since == nil || o.Gate == nil {
		return nil, errors.New("machine API: options are missing")
	}
	o.PodLogs = cmp.Or(o.PodLogs, defaultPodLogs)
	o.Kmsg = cmp.Or(o.Kmsg, defaultKmsg)
	s := &Server{
		opts:    o,
		log:     o.Logs.Logger(LogID),
		audit:   &audit{log: o.Logs.Quiet(AuditID)},
		calls:   make(chan struct{}, maxCalls),
		streams: make(chan struct{}, maxStreams),
	}
	s.stopping, s.stop = context.WithCancel(context.Background())
	s.handler = s.guard(s.routes())
	return s, nil
}

// routes are the services of the contract.
func (s *Server) routes() http.Handler {
	options := []connect.HandlerOption{
		connect.WithReadMaxBytes(maxMessage),
		// No compression: a small message may unfold to gigabytes, and PID 1 has
		// better things to do.
		connect.WithCompression("gzip", nil, nil),
		connect.WithRecover(func(_ context.Context, spec connect.Spec, _ http.Header, p any) error {
			return s.panicked(spec.Procedure, p)
		}),
	}
	with := func(code func(error) error) []connect.HandlerOption {
		return append([]connect.HandlerOption{connect.WithInterceptors(calls{Server: s, code: code})}, options...)
	}
	s.errors = connect.NewErrorWriter(options...)
	mux := http.NewServeMux()
	logs := &logService{opts: s.opts}
	s.services = &serviceService{opts: s.opts, stopping: s.stopping}
	mux.Handle(garboardv1connect.NewConfigServiceHandler(&configService{opts: s.opts}, with(applyError)...))
	mux.Handle(garboardv1connect.NewResourceServiceHandler(&resourceService{opts: s.opts}, with(internal)...))
	mux.Handle(garboardv1connect.NewServiceServiceHandler(s.services, with(internal)...))
	mux.Handle(garboardv1connect.NewLogServiceHandler(logs, with(internal)...))
	node := newNodeService(s.opts)
	mux.Handle(garboardv1connect.NewNodeServiceHandler(node, with(internal)...))
	mux.Handle(garboardv1connect.NewImageServiceHandler(&imageService{opts: s.opts}, with(internal)...))
	mux.Handle(garboardv1connect.NewAccessServiceHandler(&accessService{opts: s.opts}, with(internal)...))
	mux.HandleFunc("GET "+contract.MetricsPath, node.serveMetrics)
	mux.Handle(garboardv1connect.NewFileServiceHandler(&fileService{root: "/"}, with(internal)...))
	mux.Handle(garboardv1connect.NewEtcdServiceHandler(&etcdService{s.opts.Etcd, s.opts.Operations}, with(etcdError)...))
	mux.Handle(garboardv1connect.NewOperationServiceHandler(&operationService{opts: s.opts}, with(operationError)...))
	mux.HandleFunc("GET "+contract.LogsPath+"{id...}", s.ndjson(logs))
	return mux
}

// ServeHTTP answers one request of the gate.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.handler.ServeHTTP(w, r) }

// Run listens and serves until ctx ends.
func (s *Server) Run(ctx context.Context) error {
	defer s.services.background.Wait()
	defer s.stop()
	listener, err := s.opts.Gate.Listen()
	for ; err != nil; listener, err = s.opts.Gate.Listen() { // a node without it can't be operated
		s.log.Error("the machine API can't listen, and tries again", "err", err)
		if !sleep.For(ctx, listenRetry) {
			return nil
		}
	}
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	server := &http.Server{
		Handler:           s,
		Protocols:         protocols,
		HTTP2:             &http.HTTP2Config{MaxConcurrentStreams: maxCalls + maxStreams, WriteByteTimeout: writeTimeout},
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader,
		ErrorLog:          slog.NewLogLogger(s.opts.Logs.Quiet(LogID).Handler(), slog.LevelInfo),
	}
	defer context.AfterFunc(ctx, s.stop)()
	return tlsserver.Until(ctx, server, stopBudget, func() error { return server.Serve(netutil.LimitListener(listener, maxConnections)) })
}

// Options are what the API stands on: all that it can read or change.
type Options struct {
	Mode       boot.Mode
	Store      *resource.Store
	Graph      *dag.Graph
	Runtime    *resource.Runtime
	Logs       *logs.Logs
	Config     Applier
	Containerd *containerd.Containerd
	Etcd       *etcd.Etcd
	Operations *operation.Runner
	// Roster is what is known of the cluster's nodes, Enlist records one, and EnlistToken a token with which they join.
	Roster      func(ctx context.Context) (roster.Facts, error)
	EnlistToken func(ctx context.Context, id string, t roster.Token, forget bool) error
	Enlist      func(ctx context.Context, name string, r roster.Record) error
	// Interrupt calls do, which stops or restarts this node's etcd, if the cluster can do
	// without its member. force: also if not; the warning is why not.
	Interrupt func(ctx context.Context, what string, force bool, do func() error) (warning string, err error)
	// Reboot is Interrupt for what has the node reboot.
	Reboot func(ctx context.Context, what string, force bool, do func() error) (warning string, err error)
	// InterruptLocked is Interrupt for another node: its operation has the lock of the cluster.
	InterruptLocked func(ctx context.Context, what string, force bool, do func() error) (warning string, err error)
	// KubernetesVersion is the version of the cluster's components that don't have version
	// to.
	KubernetesVersion func(ctx context.Context, to string) (string, error)
	// Diagnose returns the problems of the node, and the checks that were made.
	Diagnose func(ctx context.Context) (findings []*apiv1.Finding, checked []string)
	// Since is the time since boot.
	Since func() time.Duration
	Disks func() ([]disk.Disk, error)
	// Recovery has the recovery keys of the system's disk.
	Recovery Recovery
	// SetTime sets the clock.
	SetTime func(context.Context, time.Time) error

	// Gate is where to listen.
	Gate *sandbox.Socket
	// PodLogs is where the kubelet keeps the logs of containers; "" is
	// defaultPodLogs.
	PodLogs string
	// Kmsg is the kernel's log; "" is defaultKmsg.
	Kmsg string
}

// Applier is the part of machine.Applier that the API needs.
type Applier interface {
	Apply(ctx context.Context, r configuration.Request) (configuration.Result, error)
	Confirm(ctx context.Context, by string) error
	Rollback(ctx context.Context, version uint64, r configuration.Request) (configuration.Result, error)
	History() ([]configuration.Entry, error)
	Text(version uint64) ([]byte, error)
	Situation() configuration.Situation
}

// Recovery is the part of disks.Disks that the API needs.
type Recovery interface {
	AddRecoveryKey(ctx context.Context, key string) error
	RecoveryKeys(ctx context.Context) ([]luks.RecoveryKey, error)
	RemoveRecoveryKey(ctx context.Context) error
	Unlock(ctx context.Context, key string) error
	Quote(nonce []byte) (q tpm.Quote, system []byte, err error)
}
