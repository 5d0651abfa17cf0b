package statefile

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"reflect"
	"sync"
	"time"

	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/background"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/resource"
)

// rewriteRetry is the time after which a failed write is tried again.
const rewriteRetry = 5 * time.Second

// Publisher is PID 1's side: it writes the facts, and writes them again when they change.
type Publisher[F any] struct {
	Name  string // of the program
	Store *resource.Store
	Dir   string
	UID   int
	// Current returns the facts that the program is to use now. They are made from
	// resources of the types in Inputs.
	Current func() (F, error)
	Inputs  []string

	// mu guards all following fields.
	mu      sync.Mutex
	written F
}

// Written are the facts that were last written.
func (p *Publisher[F]) Written() F {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.written
}

// Prepare is for dag.Service: it writes the facts, also if they haven't changed.
func (p *Publisher[F]) Prepare(context.Context, *dag.Handle) error { return p.update(true) }

func (p *Publisher[F]) update(always bool) error {
	next, err := p.Current()
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !always && reflect.DeepEqual(next, p.written) {
		return nil
	}
	if err := Write(p.Dir, p.UID, next); err != nil {
		return fmt.Errorf("write the state of %s: %w", p.Name, err)
	}
	p.written = next
	return nil
}

// Run runs the program, and writes what changes meanwhile.
func (p *Publisher[F]) Run(ctx context.Context, h *dag.Handle, program func(context.Context, *dag.Handle) error) error {
	defer background.Start(ctx, func(ctx context.Context) { p.follow(ctx, h) })()
	return program(ctx, h)
}

func (p *Publisher[F]) follow(ctx context.Context, h *dag.Handle) {
	changes := p.Store.Watch(ctx, p.Inputs...)
	retry := time.NewTimer(0) // what happened between Prepare and here
	defer retry.Stop()
	for {
		select {
		case _, open := <-changes:
			if !open {
				return
			}
		case <-retry.C:
		}
		if err := dag.Guard(h.Log, func() error { return p.update(false) }); err != nil {
			h.Log.Warn(err.Error())
			retry.Reset(rewriteRetry)
		}
	}
}

// ServesCertificate makes a TLS handshake: it returns an error if the program doesn't
// listen, or doesn't serve this certificate. It closes the connection before it would
// have to send a client certificate.
func (p *Publisher[F]) ServesCertificate(ctx context.Context, address string, certificate []byte) error {
	cert, err := pki.ParseCert(certificate)
	if err != nil {
		return err
	}
	return pki.Probe(ctx, address, tls.VersionTLS13, func(served *x509.Certificate) error {
		if !served.Equal(cert) {
			return errors.New(p.Name + " still serves a former certificate")
		}
		return nil
	})
}
