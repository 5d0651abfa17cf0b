package etcd

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"

	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/system/configuration"
)

// A node with the secrets of another cluster than the one at its endpoint would
// search without an end, and users would only see failed requests. So a foreign
// cluster is detected and reported, and the node doesn't join it.

// remedy is the end of messages about wrong secrets.
const remedy = "this node has the secrets of another cluster; configure it with those of this one (gbctl gen config --with-secrets)"

// foreign is the wait of a node whose Kubernetes authority isn't the cluster's;
// nil if the cause is another one.
func (e *Etcd) foreign(seen error) error {
	cfg, err := configuration.Config(e.o.Store)
	if err != nil {
		return err
	}
	endpoint := cfg.Cluster.ControlPlane.Endpoint
	switch status, ok := errors.AsType[*kubeclient.StatusError](seen); {
	case unknownAuthority(seen):
		return &wait{code: OtherSecrets, what: fmt.Sprintf("the right cluster.ca: the API server at %s has a certificate of another authority: %s", endpoint, remedy), seen: seen}
	case ok && status.Code == http.StatusUnauthorized:
		return &wait{code: OtherSecrets, what: fmt.Sprintf("the right cluster.ca: the API server at %s doesn't know this node's authority: %s", endpoint, remedy), seen: seen}
	}
	return nil
}

func unknownAuthority(err error) bool {
	return errors.As(err, new(x509.UnknownAuthorityError))
}

// foreignEtcd finds the reason why members don't answer: etcd's client only
// reports a timeout.
func (e *Etcd) foreignEtcd(ctx context.Context, urls []string) error {
	trust, err := trust(e.o.Store)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	for _, text := range urls {
		u, err := url.Parse(text)
		if err != nil {
			return err
		}
		conn, err := (&tls.Dialer{Config: trust}).DialContext(ctx, "tcp", u.Host)
		if err == nil {
			conn.Close()
		}
		if unknownAuthority(err) {
			return &wait{code: OtherSecrets, what: fmt.Sprintf("the right cluster.etcd.ca: etcd at %s has a certificate of another authority: %s", text, remedy), seen: err}
		}
	}
	return nil
}

// jwks is the path at which an API server publishes the keys for tokens.
const jwks = "/openid/v1/jwks"

// sameTokens returns a wait if the cluster's API servers don't know the key
// with which this node's API server would sign the tokens of pods. If it can't
// ask them, the node still joins.
func (e *Etcd) sameTokens(ctx context.Context) error {
	cfg, err := configuration.Config(e.o.Store)
	if err != nil || len(cfg.Cluster.ServiceAccount.Key) == 0 {
		return err
	}
	public, err := pki.EncodePublicKey(cfg.Cluster.ServiceAccount.Key)
	if err != nil {
		return fmt.Errorf("cluster.serviceAccount.key: %w", err)
	}
	block, _ := pem.Decode(public)
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	c, err := e.api()
	if err != nil {
		return err
	}
	defer c.Close()
	found, err := c.Raw(ctx, jwks)
	if err != nil {
		return nil
	}
	// Kubernetes' name of a key.
	sum := sha256.Sum256(block.Bytes)
	name := base64.RawURLEncoding.EncodeToString(sum[:])
	known := found.List("keys")
	if len(known) == 0 || slices.ContainsFunc(known, func(k kubeclient.Object) bool { return k.At("kid") == name }) {
		return nil
	}
	return &wait{code: OtherSecrets, what: fmt.Sprintf("the right cluster.serviceAccount.key: the API servers at %s sign the tokens of pods with another: %s", cfg.Cluster.ControlPlane.Endpoint, remedy)}
}
