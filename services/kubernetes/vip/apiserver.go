package vip

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
)

const (
	// checkEvery is how often this node's API server is checked, and checkTimeout how long
	// one check may take.
	checkEvery   = time.Second
	checkTimeout = 2 * time.Second

	ready = "/readyz"
	// readyAlone leaves out the checks that need etcd's quorum. A holder keeps the address
	// without a quorum: no other node would be better.
	readyAlone = ready + "?exclude=etcd&exclude=etcd-readiness"

	maxAnswer = 4 << 10 // bytes; so that the connection can be used again
)

// checker checks this node's API server over one connection.
type checker struct {
	store  *resource.Store
	client *http.Client
	made   uint64 // version of the secrets that client was made of
}

// check requests one of the paths above.
func (c *checker) check(ctx context.Context, path string) error {
	keys, err := secrets.Kubernetes.Get(c.store, secrets.KubernetesID)
	if err != nil {
		return err
	}
	if c.client == nil || c.made != keys.Version {
		c.close()
		pair, err := tls.X509KeyPair(keys.Spec.Admin.Crt, keys.Spec.Admin.Key)
		if err != nil {
			return fmt.Errorf("certificate for the API server: %w", err)
		}
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(keys.Spec.Trusted)
		c.client = &http.Client{Timeout: checkTimeout, Transport: &http.Transport{
			TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots, Certificates: []tls.Certificate{pair}},
		}}
		c.made = keys.Version
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, keys.Spec.LocalEndpoint+path, nil)
	if err != nil {
		return err
	}
	resp, err := c.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, maxAnswer)) // for the next request
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("get %s: %s", path, resp.Status)
	}
	return nil
}

func (c *checker) close() {
	if c.client != nil {
		c.client.CloseIdleConnections()
	}
}
