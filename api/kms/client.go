package kms

import (
	"bytes"
	"cmp"
	"context"
	"crypto/ecdh"
	"crypto/hpke"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"
)

const (
	// Patience is how long a server may be silent: a machine's network comes up meanwhile.
	Patience = 15 * time.Second
	// answerTimeout ends one request.
	answerTimeout = 10 * time.Second

	retryFirst, retryMost = 250 * time.Millisecond, 4 * time.Second
	maxAnswer             = 16 << 10
	maxSealed             = 1 << 10 // a header has room for few tokens
)

// A Client is a machine before a server.
type Client struct {
	Endpoint string          // https://HOST:PORT
	CA       []byte          // PEM: the only authority of its certificate
	Identity tls.Certificate // the machine's key; the certificate is its own work
	UUID     string
	Patience time.Duration
	Err      error // why the machine can't ask; nil: it can
}

// Seal gives a passphrase to the server.
func (c *Client) Seal(ctx context.Context, passphrase []byte) ([]byte, error) {
	var answer SealAnswer
	err := c.ask(ctx, SealPath, SealRequest{c.UUID, passphrase}, &answer)
	if size := len(answer.Sealed); err == nil && (size == 0 || size > maxSealed) {
		err = fmt.Errorf("%s has sealed it in %d bytes, and may use 1 to %d", c.Endpoint, size, maxSealed)
	}
	return answer.Sealed, err
}

// Unseal gets it back. Whoever has recorded another answer can't use it here: it isn't for the key of this request.
func (c *Client) Unseal(ctx context.Context, sealed []byte) ([]byte, error) {
	private, err := hpke.DHKEM(ecdh.X25519()).GenerateKey()
	if err != nil {
		return nil, err
	}
	nonce := make([]byte, NonceBytes)
	_, _ = rand.Read(nonce) // it never fails
	request := UnsealRequest{c.UUID, sealed, nonce, private.PublicKey().Bytes()}
	var answer UnsealAnswer
	if err := c.ask(ctx, UnsealPath, request, &answer); err != nil {
		return nil, err
	}
	passphrase, err := hpke.Open(private, hpke.HKDFSHA256(), hpke.AES256GCM(), request.Info(), answer.Passphrase)
	if err != nil {
		return nil, fmt.Errorf("the answer of %s isn't one to this request: %w", c.Endpoint, err)
	}
	return passphrase, nil
}

// Silent is the error of a server that may answer later.
type Silent struct{ error }

// ask asks until the server answers, or patience ends.
func (c *Client) ask(ctx context.Context, path string, request, answer any) error {
	body, err := json.Marshal(request)
	transport, unusable := c.transport()
	if err := cmp.Or(c.Err, err, unusable); err != nil {
		return err
	}
	defer transport.CloseIdleConnections()
	began := time.Now()
	for pause := retryFirst; ; pause = min(2*pause, retryMost) {
		err := c.once(ctx, transport, path, body, answer)
		if _, is := errors.AsType[Silent](err); !is || ctx.Err() != nil {
			return err
		}
		if time.Since(began)+pause > c.Patience {
			return fmt.Errorf("no answer of %s; it is asked again until it answers: %w", c.Endpoint, err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
	}
}

func (c *Client) once(ctx context.Context, transport *http.Transport, path string, body []byte, answer any) error {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, strings.TrimRight(c.Endpoint, "/")+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", "application/json")
	got, err := transport.RoundTrip(r)
	if err != nil {
		return Silent{err}
	}
	defer got.Body.Close()
	text, err := io.ReadAll(io.LimitReader(got.Body, maxAnswer))
	if err != nil {
		return Silent{err}
	}
	if got.StatusCode == http.StatusOK {
		return json.Unmarshal(text, answer)
	}
	var refusal Refusal
	_ = json.Unmarshal(text, &refusal) // the status says enough
	err = fmt.Errorf("%s refuses it: %s", c.Endpoint, cmp.Or(refusal.Error, got.Status))
	if got.StatusCode >= http.StatusInternalServerError {
		return Silent{err}
	}
	return err
}

// transport trusts the authority only. It verifies as usual, but for a machine whose clock is late, because its battery
// is empty: no time server is asked before its disks are open.
func (c *Client) transport() (*http.Transport, error) {
	server, err := url.Parse(c.Endpoint)
	roots := x509.NewCertPool()
	if err == nil && !roots.AppendCertsFromPEM(c.CA) {
		err = fmt.Errorf("the authority of %s has no certificate", c.Endpoint)
	}
	return &http.Transport{TLSClientConfig: &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{c.Identity},
		InsecureSkipVerify: true, // VerifyConnection does it
		VerifyConnection: func(s tls.ConnectionState) error {
			o := x509.VerifyOptions{Roots: roots, Intermediates: x509.NewCertPool(), DNSName: server.Hostname(), CurrentTime: time.Now()}
			for _, cert := range s.PeerCertificates {
				o.Intermediates.AddCert(cert)
				if o.CurrentTime.Before(cert.NotBefore) {
					o.CurrentTime = cert.NotBefore
				}
			}
			_, err := s.PeerCertificates[0].Verify(o)
			return err
		},
	}}, err
}
