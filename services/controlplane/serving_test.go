package controlplane

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"net"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/services/kubernetes"
)

// servingRequest is what the kubelet of worker w sends, after a change.
func servingRequest(t *testing.T, change func(csr *x509.CertificateRequest, spec map[string]any)) kubernetes.Object {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	put(t, err)
	csr := &x509.CertificateRequest{
		Subject:  pkix.Name{CommonName: "system:node:w", Organization: []string{"system:nodes"}},
		DNSNames: []string{"w"}, IPAddresses: []net.IP{net.ParseIP("10.5.0.3")},
	}
	spec := map[string]any{
		"signerName": "kubernetes.io/kubelet-serving", "username": "system:node:w",
		"groups": []any{"system:nodes", "system:authenticated"}, "usages": []any{"digital signature", "server auth"},
	}
	if change != nil {
		change(csr, spec)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, csr, key)
	put(t, err)
	if spec["request"] == nil {
		spec["request"] = base64.StdEncoding.EncodeToString(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}))
	}
	return kubernetes.Object{"metadata": map[string]any{"name": "csr-1"}, "spec": spec}
}

func TestServingRequests(t *testing.T) {
	t.Parallel()
	node := func(name string, addresses ...string) kubernetes.Object {
		list := []any{map[string]any{"type": "Hostname", "address": name}}
		for _, a := range addresses {
			list = append(list, map[string]any{"type": "InternalIP", "address": a})
		}
		return kubernetes.Object{"metadata": map[string]any{"name": name}, "status": map[string]any{"addresses": list}}
	}
	// w claims addresses of the API server and of another node as its own.
	nodes := []kubernetes.Object{
		node("w", "10.5.0.3", "fd00::3", "10.5.0.1", "10.5.0.9"), node("other", "10.5.0.9"), node("kubernetes"),
	}
	server := &x509.Certificate{DNSNames: []string{"kubernetes", "cp"}, IPAddresses: []net.IP{net.ParseIP("10.5.0.1"), net.ParseIP("10.96.0.1")}}
	type csr = x509.CertificateRequest
	ip := func(text string) func(*csr, map[string]any) {
		return func(c *csr, _ map[string]any) { c.IPAddresses = append(c.IPAddresses, net.ParseIP(text)) }
	}
	set := func(key string, value any) func(*csr, map[string]any) {
		return func(_ *csr, spec map[string]any) { spec[key] = value }
	}
	for _, tc := range []struct {
		name   string
		change func(*csr, map[string]any)
		want   string // "": approved
	}{
		{"as a kubelet asks", nil, ""},
		{"both families", ip("fd00::3"), ""},
		{"for an RSA key", set("usages", []any{"key encipherment", "digital signature", "server auth"}), ""},
		{"another's address", ip("10.5.0.7"), "address 10.5.0.7 isn't the node's"},
		{"the API server's address", ip("10.5.0.1"), "is the API server's"},
		{"an address that two claim", ip("10.5.0.9"), `also that of node "other"`},
		{"another's name", func(c *csr, _ map[string]any) { c.DNSNames = []string{"w", "cp"} }, `name "cp"`},
		{"the API server's name", func(c *csr, spec map[string]any) {
			c.Subject.CommonName, c.DNSNames, c.IPAddresses = "system:node:kubernetes", []string{"kubernetes"}, nil
			spec["username"] = "system:node:kubernetes"
		}, `name "kubernetes" isn't the node's alone`},
		{"in another's name", func(c *csr, _ map[string]any) { c.Subject.CommonName = "system:node:other" }, "not the node's"},
		{"with another group", func(c *csr, _ map[string]any) { c.Subject.Organization = []string{"system:masters"} }, "not the node's"},
		{"by no node", set("username", "eve"), `"eve" isn't a node`},
		{"by nobody of the group", set("groups", []any{"system:authenticated"}), "isn't a node"},
		{"by an unknown node", func(c *csr, spec map[string]any) {
			c.Subject.CommonName, spec["username"] = "system:node:x", "system:node:x"
		}, `there is no node "x"`},
		{"as a client too", set("usages", []any{"server auth", "client auth"}), `usage "client auth"`},
		{"for another signer", set("signerName", "kubernetes.io/kube-apiserver-client"), "for signer"},
		{"for nothing", func(c *csr, _ map[string]any) { c.DNSNames, c.IPAddresses = nil, nil }, "no name and no address"},
		{"for a mail address", func(c *csr, _ map[string]any) { c.EmailAddresses = []string{"a@b"} }, "e-mail"},
		{"not a request", set("request", "AAAA"), "isn't one PEM block"},
		{"not base64", set("request", "?"), "request: illegal base64"},
	} {
		err := checkServing(servingRequest(t, tc.change), nodes, server)
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: %v, want %q", tc.name, err, tc.want)
		}
	}
}
