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
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/front/tlsserver"
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
