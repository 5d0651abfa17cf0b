package statefile

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/resource"
)

// rewriteRetry is when writing a briefing is tried again.
const rewriteRetry = 5 * time.Second

// Publisher is PID 1's side: it keeps what is written in step with what is known.
type Publisher[F any] struct {
	Name  string // of the program
	Store *resource.Store
	Dir   string
	UID   int
	// Know puts together what the program is to go by now, from the types in Inputs.
	Know   func() (State[F], error)
	Inputs []string

	// mu guards all following fields.
	mu      sync.Mutex
	written State[F]
}

// Written is what the program was last told.
func (p *Publisher[F]) Written() State[F] {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.written
}

// Prepare is for dag.Service: it writes whatever there was before.
func (p *Publisher[F]) Prepare(context.Context, *dag.Handle) error { return p.update(true) }

func (p *Publisher[F]) update(always bool) error {
	next, err := p.Know()
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !always && next.Equal(p.written) {
		return nil
	}
	if err := next.Write(p.Dir, p.UID); err != nil {
		return fmt.Errorf("tell %s what it goes by: %w", p.Name, err)
	}
	p.written = next
	return nil
}

// Run runs the program, and tells it what changes meanwhile.
func (p *Publisher[F]) Run(ctx context.Context, h *dag.Handle, program func(context.Context, *dag.Handle) error) error {
	wctx, stop := context.WithCancel(ctx)
	var followers sync.WaitGroup
	changes := make(chan struct{}, 1)
	for _, typ := range p.Inputs {
		events := p.Store.Watch(wctx, typ)
		followers.Go(func() {
			for range events {
				select {
				case changes <- struct{}{}:
				default:
				}
			}
		})
	}
	followers.Go(func() { p.follow(wctx, h, changes) })
	err := program(ctx, h)
	stop()
	followers.Wait()
	return err
}

func (p *Publisher[F]) follow(ctx context.Context, h *dag.Handle, changes <-chan struct{}) {
	retry := time.NewTimer(0) // what happened between Prepare and here
	defer retry.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-changes:
		case <-retry.C:
		}
		if err := dag.Guard(h.Log, func() error { return p.update(false) }); err != nil {
			h.Log.Warn(err.Error())
			retry.Reset(rewriteRetry)
		}
	}
}

// Shown is a TLS handshake: the program is there, and has taken in the certificate
// that it was last given. It goes before it would have to say who it is.
func (p *Publisher[F]) Shown(ctx context.Context, address string, certificate []byte) error {
	cert, err := pki.ParseCert(certificate)
	if err != nil {
		return err
	}
	dialer := tls.Dialer{Config: &tls.Config{
		MinVersion:         tls.VersionTLS13,
		InsecureSkipVerify: true, // it is known to the byte
		VerifyConnection: func(c tls.ConnectionState) error {
			if !bytes.Equal(c.PeerCertificates[0].Raw, cert.Raw) {
				return errors.New(p.Name + " still shows a former certificate")
			}
			return nil
		},
	}}
	conn, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return err
	}
	_ = conn.Close() // there is nothing to lose
	return nil
}
