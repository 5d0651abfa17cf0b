package balance

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"time"
)

const (
	defaultPeriod = time.Second
	// checkBudget bounds one question, and checksBad is how many in a row must fail:
	// one may, on a busy machine. After the first, the next ones follow at once, so
	// that a server that is off, frozen or cut off gets no more connections after nine
	// seconds at most, one that refuses them after two; both well within the ten in
	// which a leader must renew its lease, and the forty of a node.
	checkBudget = 2 * time.Second
	checksBad   = 3
	checkAgain  = 500 * time.Millisecond

	readyPath = "/readyz"
	// answerLimit: the answer itself is of no interest, but must be read for the
	// connection to be used again.
	answerLimit = 64 << 10
)

// check asks a backend until the balancer ends, or the backend is retired and has no
// connection any more.
func (b *Balancer) check(n *backend, name string) {
	client := b.client(n, name)
	defer client.CloseIdleConnections()
	for {
		err := ready(b.ctx, client)
		if b.ctx.Err() != nil {
			return
		}
		again, over := b.judge(n, err)
		if over || !b.rest(again, n.now) {
			return
		}
	}
}

// client speaks to one server. It keeps its connection, as a handshake for each
// check would be most of the work.
func (b *Balancer) client(n *backend, name string) *http.Client {
	return &http.Client{
		Timeout:       checkBudget,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport: &http.Transport{
			MaxResponseHeaderBytes: answerLimit,
			DialTLSContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				// The transport would go on with it after the request has ended.
				ctx, cancel := context.WithTimeout(ctx, checkBudget)
				defer cancel()
				conn, err := b.o.Dial(ctx, name)
				if err != nil {
					b.reached(n, false)
					return nil, err
				}
				secure := tls.Client(conn, b.o.TLS())
				err = secure.HandshakeContext(ctx)
				if err == nil || ctx.Err() == nil { // a busy server takes its time
					b.reached(n, !ended(err))
				}
				if err != nil {
					conn.Close()
					return nil, err
				}
				return secure, nil
			},
		},
	}
}

// ended: nothing was said, as by a load balancer that has nobody behind it. Whether a
// certificate is the right one is for clients to judge.
func ended(err error) bool {
	return err != nil && !errors.As(err, new(*tls.CertificateVerificationError))
}

func ready(ctx context.Context, client *http.Client) error {
	// The name is nobody's: the connection is made by the client above.
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://upstream"+readyPath, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if outer, ok := errors.AsType[*url.Error](err); ok {
		return outer.Err
	}
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, answerLimit)) // for the next request
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("it answers %s", resp.Status)
	}
	return nil
}

// judge takes the outcome of a check, and says when to make the next. A server that
// isn't ready any more loses its connections: clients would wait on them, and come
// back to another one at once. So does one that never was, once there is another.
func (b *Balancer) judge(n *backend, err error) (again time.Duration, over bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	again = b.o.Period
	was, known := n.Ready, !n.Since.IsZero()
	if err == nil {
		n.bad, n.Ready, n.Err = 0, true, nil
	} else if n.bad++; n.bad >= checksBad {
		n.Ready = false
	} else {
		again = min(checkAgain, again)
	}
	changed := n.Ready != was || !known && n.bad >= checksBad
	if changed {
		n.Since, n.Err = time.Now(), err
		switch {
		case n.Ready:
			b.o.Log.Info("API server is ready", "upstream", n.Name)
		case was:
			b.o.Log.Warn("API server isn't ready any more", "upstream", n.Name, "error", err)
		default:
			b.o.Log.Info("API server isn't ready yet", "upstream", n.Name, "error", err)
		}
		defer b.changed()
	}
	b.signal()
	if !b.anyReady() {
		again = min(checkAgain, again) // clients may be held
	}
	if !n.Ready && n.bad >= checksBad && (changed || n.retired || b.anyReady()) {
		for conn := range n.open {
			conn.Close()
		}
	}
	if n.retired && len(n.open) == 0 {
		delete(b.backends, n.Name)
		return 0, true
	}
	return again, false
}

// reached notes whether a server took a connection, and spoke on it.
func (b *Balancer) reached(n *backend, yes bool) {
	b.mu.Lock()
	changed := n.Reachable != yes
	n.Reachable = yes
	b.mu.Unlock()
	if changed {
		b.changed()
	}
}

// anyReady is for who holds mu.
func (b *Balancer) anyReady() bool {
	for _, n := range b.backends {
		if n.Ready && !n.retired {
			return true
		}
	}
	return false
}

// askNow asks for a check without a wait: a client couldn't connect.
func (n *backend) askNow() {
	select {
	case n.now <- struct{}{}:
	default:
	}
}
