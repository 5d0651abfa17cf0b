package imagebundle

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"
)

// silenceWait is for the next bytes of a registry, also for the first ones of an answer: a cache may fetch the content
// first.
const silenceWait = time.Minute

// patient is how images are pulled and pushed: a registry that hangs is given up.
var patient = patientTransport(silenceWait)

func patientTransport(silence time.Duration) http.RoundTripper {
	const dial, handshake = 30 * time.Second, 10 * time.Second
	dialer := net.Dialer{Timeout: dial}
	return &http.Transport{
		Proxy: http.ProxyFromEnvironment, ForceAttemptHTTP2: true, TLSHandshakeTimeout: handshake,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			c, err := dialer.DialContext(ctx, network, address)
			if err != nil {
				return nil, err
			}
			return patientConn{c, address, silence}, nil
		},
	}
}

// patientConn ends when nothing comes, and nothing goes, for some time.
type patientConn struct {
	net.Conn
	address string
	silence time.Duration
}

func (c patientConn) Read(p []byte) (n int, err error) {
	if err = c.SetReadDeadline(time.Now().Add(c.silence)); err == nil {
		n, err = c.Conn.Read(p)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = fmt.Errorf("%s has sent nothing for %s", c.address, c.silence)
	}
	return n, err
}

func (c patientConn) Write(p []byte) (n int, err error) {
	// In an upload, nothing comes while much goes: a Read that waits gets more time, too.
	if err = c.SetDeadline(time.Now().Add(c.silence)); err == nil {
		n, err = c.Conn.Write(p)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = fmt.Errorf("%s has taken nothing for %s", c.address, c.silence)
	}
	return n, err
}
