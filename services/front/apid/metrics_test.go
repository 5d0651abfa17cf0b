package apid

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/garboard-os/garboard/tools/testing/freeport"
)

// The metrics' own address lets in who may read metrics, to nothing else, and follows the
// configuration.
func TestMetricsAddress(t *testing.T) {
	t.Parallel()
	ca, other := newCA(t), newCA(t)
	prometheus, err := pki.NewMachineCA(time.Now().Add(-800 * 24 * time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	k := normal(t, ca)
	k.metrics, k.metricsCA = freeport.Find(t).String(), prometheus.Cert
	b := newBench(t, k, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s %s as %s", r.Method, r.URL.Path, r.Header.Get(api.HeaderRoles))
	}))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); b.gate.serveMetrics(ctx) }()
	t.Cleanup(func() { cancel(); <-done })

	reader := shown(t, ca, pki.Leaf{CN: "prometheus", Orgs: []string{string(api.Reader)}})
	get := func(address, method, path string, cert *tls.Certificate) (int, string) {
		client := b.client(t, cert, false)
		defer client.CloseIdleConnections()
		req, err := http.NewRequestWithContext(t.Context(), method, "https://"+address+path, http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		answer, err := client.Do(req)
		if err != nil {
			return 0, err.Error()
		}
		defer answer.Body.Close()
		text, err := io.ReadAll(answer.Body)
		if err != nil {
			t.Error(err)
		}
		return answer.StatusCode, string(text)
	}
	listens := func(address string) {
		t.Helper()
		eventually.That(t, 20*time.Second, "metrics at "+address, func() error {
			if code, text := get(address, http.MethodGet, "/metrics", reader); code != http.StatusOK {
				return fmt.Errorf("%d: %s", code, text)
			}
			return nil
		})
	}
	listens(k.metrics)
	for _, tt := range []struct {
		name, method, path string
		cert               *tls.Certificate
		code               int // 0: the handshake fails
		text               string
	}{
		{"reader", "GET", "/metrics", reader, 200, "GET /metrics as os:reader"},
		{"administrator", "GET", "/metrics", shown(t, ca, pki.Leaf{CN: "me", Orgs: []string{string(api.Admin)}}), 200, "GET /metrics as os:admin"},
		{"Prometheus' own authority", "GET", "/metrics", shown(t, prometheus, pki.Leaf{CN: "p", Orgs: []string{string(api.Admin)}}), 200, "GET /metrics as os:reader"},
		{"wrong role", "GET", "/metrics", shown(t, ca, pki.Leaf{CN: "etcd", Orgs: []string{string(api.EtcdBackup)}}), 403, "needs the role os:reader"},
		{"no role", "GET", "/metrics", shown(t, ca, pki.Leaf{CN: "nobody"}), 403, "needs the role os:reader"},
		{"expired", "GET", "/metrics", shown(t, prometheus, pki.Leaf{CN: "p", Now: time.Now().Add(-700 * 24 * time.Hour)}), 401, "expired"},
		{"other authority", "GET", "/metrics", shown(t, other, pki.Leaf{CN: "p", Orgs: []string{string(api.Admin)}}), 0, ""},
		{"no certificate", "GET", "/metrics", nil, 0, ""},
		{"other path", "GET", "/garboard.v1.NodeService/Metrics", reader, 404, "/metrics"},
		{"logs", "GET", "/v1/logs/etcd", reader, 404, "/metrics"},
		{"other method", "POST", "/metrics", reader, 405, "GET"},
	} {
		code, text := get(k.metrics, tt.method, tt.path, tt.cert)
		if code != tt.code || !strings.Contains(text, tt.text) {
			t.Errorf("%s: %d %s", tt.name, code, text)
		}
	}
	// Prometheus' authority is for this address only.
	if code, text := get(b.address, http.MethodGet, "/metrics", shown(t, prometheus, pki.Leaf{CN: "p"})); code != 0 {
		t.Errorf("at the machine API: %d %s", code, text)
	}

	k.floor = time.Now().Add(2 * time.Hour)
	b.writeAndWait(t, k)
	brief := shown(t, prometheus, pki.Leaf{CN: "p", Validity: time.Hour})
	if code, text := get(k.metrics, http.MethodGet, "/metrics", brief); code != 401 || !strings.Contains(text, "expired") {
		t.Errorf("expired at a time that is over: %d %s", code, text)
	}
	former := k.metrics
	k.metrics, k.metricsCA = freeport.Find(t).String(), nil
	b.writeAndWait(t, k)
	listens(k.metrics)
	if code, text := get(former, http.MethodGet, "/metrics", reader); code != 0 {
		t.Errorf("at the former address: %d %s", code, text)
	}
	if code, text := get(k.metrics, http.MethodGet, "/metrics", shown(t, prometheus, pki.Leaf{CN: "p"})); code != 0 {
		t.Errorf("without the authority: %d %s", code, text)
	}
	last := k.metrics
	k.metrics = ""
	b.writeAndWait(t, k)
	eventually.That(t, 20*time.Second, "no metrics", func() error {
		if code, _ := get(last, http.MethodGet, "/metrics", reader); code != 0 {
			return fmt.Errorf("HTTP %d", code)
		}
		return nil
	})
}
