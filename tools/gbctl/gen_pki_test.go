package main

import (
	"crypto/x509"
	"crypto/x509/pkix"
	"net"
	"testing"
)

// A request with organisations is a client's, and one with names only a server's.
func TestRequestedLeaf(t *testing.T) {
	t.Parallel()
	client := requestedLeaf(&x509.CertificateRequest{Subject: pkix.Name{CommonName: "admin", Organization: []string{"os:admin"}}, DNSNames: []string{"a"}})
	if client.Server || !client.Client || client.CN != "admin" || len(client.Orgs) != 1 || len(client.DNS) != 1 {
		t.Errorf("%+v", client)
	}
	server := requestedLeaf(&x509.CertificateRequest{IPAddresses: []net.IP{net.ParseIP("10.5.0.2")}})
	if !server.Server || !server.Client || len(server.IPs) != 1 {
		t.Errorf("%+v", server)
	}
}
