package secrets

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/transport"

	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// leafFiles are the certificates that are renewed in place.
var leafFiles = []string{
	"etcd/server.crt", "etcd/peer.crt", "kubelet/serving.crt",
	"kubernetes/kube-apiserver/apiserver.crt", "kubernetes/kube-apiserver/apiserver-kubelet-client.crt", "kubernetes/kube-apiserver/etcd-client.crt",
	"kubernetes/kube-apiserver/front-proxy-client.crt", "kubernetes/kube-controller-manager/client.crt", "kubernetes/kube-scheduler/client.crt",
}

// read is the content of all files in the secrets folder, without temporary
// files of boot.WriteFile, which may disappear at any time.
func (b *bench) read() map[string][]byte {
	b.t.Helper()
	files := map[string][]byte{}
	b.put(filepath.WalkDir(b.dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || strings.HasPrefix(d.Name(), ".") {
			return err
		}
		name, err := filepath.Rel(b.dir, path)
		if err != nil {
			return err
		}
		files[name], err = os.ReadFile(path)
		return err
	}))
	return files
}

// Certificates near their end are replaced under the same name and for the same
// key, and no version tells a program to restart.
func TestRenewalInPlace(t *testing.T) {
	b := newBench(t, controlPlane(t))
	versions := map[string]string{KubernetesID: "", EtcdID: "", KubeletID: ""}
	for id := range versions {
		versions[id] = b.version(id, "")
	}
	before := b.read()

	b.setTime(start.Add(pki.LeafValidity - pki.RenewBefore + time.Hour))
	after := map[string][]byte{}
	eventually.That(t, 5*time.Second, "all certificates to be replaced", func() error {
		after = b.read()
		var errs []error
		for _, name := range leafFiles {
			if bytes.Equal(before[name], after[name]) {
				errs = append(errs, errors.New(name+" is the old one"))
			}
		}
		return errors.Join(errs...)
	})
	for name, data := range after {
		if renewed := !bytes.Equal(before[name], data); renewed != slices.Contains(leafFiles, name) {
			t.Errorf("%s: replaced %v", name, renewed)
		}
	}
	for _, name := range leafFiles {
		key := after[name[:len(name)-len(".crt")]+".key"]
		if _, err := tls.X509KeyPair(after[name], key); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for id, version := range versions {
		if o, err := Statuses.Get(b.store, id); err != nil || o.Spec.Version != version {
			t.Errorf("%s: version %s, %v, though only certificates were renewed (was %s)", id, o.Spec.Version, err, version)
		}
	}
}

// etcd's TLS server uses a renewed certificate from the next handshake on, and
// never a pair that doesn't match while the files are replaced.
func TestRenewalWhileServing(t *testing.T) {
	c := controlPlane(t)
	b := newBench(t, c)
	b.version(EtcdID, "")
	path := func(name string) string { return filepath.Join(b.dir, EtcdID, name) }
	info := transport.TLSInfo{CertFile: path("server.crt"), KeyFile: path("server.key"), TrustedCAFile: path("ca.crt"), ClientCertAuth: true}
	server, err := info.ServerConfig()
	b.put(err)
	server.Time = b.time
	l, err := tls.Listen("tcp", "127.0.0.1:0", server)
	b.put(err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_ = conn.(*tls.Conn).Handshake() // an error is visible at the client
			conn.Close()
		}
	}()
	t.Cleanup(func() { l.Close(); <-done })

	shown := func() *x509.Certificate {
		t.Helper()
		o, err := Etcd.Get(b.store, EtcdID)
		b.put(err)
		client, err := tls.X509KeyPair(o.Spec.Client.Crt, o.Spec.Client.Key)
		b.put(err)
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(c.Cluster.Etcd.CA.Crt)
		dialer := &net.Dialer{Timeout: eventually.Scale(5 * time.Second)}
		conn, err := tls.DialWithDialer(dialer, "tcp", l.Addr().String(), &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{client}, Time: b.time})
		b.put(err)
		defer conn.Close()
		return conn.ConnectionState().PeerCertificates[0]
	}
	first := shown()
	for round := range 3 {
		now := start.Add(time.Duration(round+1) * (pki.LeafValidity - pki.RenewBefore + time.Hour))
		b.setTime(now)
		eventually.That(t, 5*time.Second, "the renewed certificate to be served", func() error {
			// each of these handshakes must succeed
			if cert := shown(); !cert.NotAfter.Equal(now.Add(pki.LeafValidity)) {
				return errors.New("expires at " + cert.NotAfter.String())
			}
			return nil
		})
	}
	if last := shown(); last.SerialNumber.Cmp(first.SerialNumber) == 0 {
		t.Error("the first certificate is still served")
	}
}
