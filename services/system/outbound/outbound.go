// Package outbound is how PID 1 itself asks servers outside of the cluster: by which proxy, and whom it believes.
package outbound

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
	"golang.org/x/net/http/httpproxy"
)

const (
	// headerTimeout ends the wait for a server that has accepted the request and doesn't answer.
	headerTimeout = time.Minute
	// maxBundle is twenty times the size of Mozilla's.
	maxBundle = 4 << 20
)

// Transport is for requests of PID 1 itself to servers outside of the cluster.
// It uses the proxies of machine.env, and trusts the authorities in the current
// bundle. Both may change while the node runs, and Go reads the environment and
// the system's authorities only once per process. So neither is left to Go, and
// each piece of work gets a new transport. Close its idle connections
// afterwards.
func Transport(env map[string]string) (*http.Transport, error) {
	return transport(env, boot.CABundle)
}

func transport(env map[string]string, bundle string) (*http.Transport, error) {
	pool, err := Authorities(bundle, nil)
	if err != nil {
		return nil, err
	}
	// its times are enough for a distant server behind a slow proxy
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.Proxy, t.TLSClientConfig, t.ResponseHeaderTimeout = Proxy(env), &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}, headerTimeout
	return t, nil
}

// Authorities adds those of a bundle to a copy of a pool; nil is an empty one.
// It reads the file each time. Without a bundle nothing is added: plain http
// still works.
func Authorities(bundle string, to *x509.CertPool) (*x509.CertPool, error) {
	data, err := untrusted.ReadFile(bundle, maxBundle)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("authorities to trust: %w", err)
	}
	pool := x509.NewCertPool()
	if to != nil {
		pool = to.Clone()
	}
	// Invalid certificates are skipped: one bad line of a user must not disable
	// all others.
	pool.AppendCertsFromPEM(data)
	return pool, nil
}

// Proxy chooses the proxy for a request by the variables http_proxy, https_proxy
// and no_proxy of an environment, in either case.
func Proxy(env map[string]string) func(*http.Request) (*url.URL, error) {
	proxies := httpproxy.Config{
		HTTPProxy:  cmp.Or(env["http_proxy"], env["HTTP_PROXY"]),
		HTTPSProxy: cmp.Or(env["https_proxy"], env["HTTPS_PROXY"]),
		NoProxy:    cmp.Or(env["no_proxy"], env["NO_PROXY"]),
	}
	choose := proxies.ProxyFunc()
	return func(r *http.Request) (*url.URL, error) { return choose(r.URL) }
}
