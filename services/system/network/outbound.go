package network

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"time"

	"github.com/garboard-os/garboard/boot"
	"golang.org/x/net/http/httpproxy"
)

const (
	// dialTimeout and handshakeTimeout are for a server at the other end of the
	// world behind a slow proxy.
	dialTimeout      = 30 * time.Second
	handshakeTimeout = 10 * time.Second
	// headerTimeout ends the wait for a server that took the question and died.
	headerTimeout = time.Minute
)

// Outbound is how PID 1 itself asks servers outside of the cluster: by the
// proxies of machine.env, trusting the authorities in the bundle as it is now.
// Both may change while the node runs, and Go reads the environment and the
// system's authorities only once per process: so neither is left to it, and a
// transport is made anew for each piece of work. Close its idle connections
// after.
func Outbound(env map[string]string) (*http.Transport, error) {
	return outbound(env, boot.CABundle)
}

func outbound(env map[string]string, bundle string) (*http.Transport, error) {
	pool, err := Authorities(bundle, nil)
	if err != nil {
		return nil, err
	}
	return &http.Transport{
		Proxy:                 Proxy(env),
		DialContext:           (&net.Dialer{Timeout: dialTimeout}).DialContext,
		TLSClientConfig:       &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12},
		TLSHandshakeTimeout:   handshakeTimeout,
		ResponseHeaderTimeout: headerTimeout,
		ForceAttemptHTTP2:     true,
	}, nil
}

// Authorities adds those of a bundle to a pool, which stays as it is; nil is an
// empty one. It reads the file each time. Without a bundle nobody more is
// trusted: plain http goes on.
func Authorities(bundle string, to *x509.CertPool) (*x509.CertPool, error) {
	data, err := os.ReadFile(bundle)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("authorities to trust: %w", err)
	}
	pool := x509.NewCertPool()
	if to != nil {
		pool = to.Clone()
	}
	// What isn't a certificate is passed over: one bad line of a user mustn't cost
	// all the others.
	pool.AppendCertsFromPEM(data)
	return pool, nil
}

// Proxy chooses the proxy for a request by the variables http_proxy, https_proxy
// and no_proxy of an environment, in either case.
func Proxy(env map[string]string) func(*http.Request) (*url.URL, error) {
	first := func(names ...string) string {
		for _, name := range names {
			if v := env[name]; v != "" {
				return v
			}
		}
		return ""
	}
	proxies := httpproxy.Config{
		HTTPProxy:  first("http_proxy", "HTTP_PROXY"),
		HTTPSProxy: first("https_proxy", "HTTPS_PROXY"),
		NoProxy:    first("no_proxy", "NO_PROXY"),
	}
	choose := proxies.ProxyFunc()
	return func(r *http.Request) (*url.URL, error) { return choose(r.URL) }
}
