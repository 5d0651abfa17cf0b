package server

import (
	"context"
	"crypto/tls"
	"crypto/x509/pkix"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/api/kms"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/tools/testing/freeport"
)

const (
	uuid       = "9c3a7e21-5d48-4b0f-8f62-17e4d9c05ab3"
	passphrase = "a passphrase of random bits"
)

// A site is a server with its directory.
type site struct {
	*Server
	t        *testing.T
	dir      string
	cert     tls.Certificate
	endpoint string
	stop     func()
}

func newSite(t *testing.T) *site {
	t.Helper()
	s := &site{t: t, dir: t.TempDir(), endpoint: "https://" + freeport.Find(t).String()}
	key, err := Key(s.dir)
	if err != nil {
		t.Fatal(err)
	}
	s.Server = &Server{Key: key, List: filepath.Join(s.dir, "machines"), Log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	s.lists("# ours", strings.ToUpper(uuid)+" # the first one")
	if s.cert, err = Certificate(s.dir, "127.0.0.1", time.Now()); err != nil {
		t.Fatal(err)
	}
	s.starts(s.HTTP(s.cert).Handler)
	return s
}

// starts serves at the address that it has had before.
func (s *site) starts(h http.Handler) {
	s.t.Helper()
	l, err := net.Listen("tcp", strings.TrimPrefix(s.endpoint, "https://"))
	if err != nil {
		s.t.Fatal(err)
	}
	server := s.HTTP(s.cert)
	server.Handler = h
	go server.ServeTLS(l, "", "")
	s.stop = func() { server.Close(); l.Close() } // it may not serve yet
	s.t.Cleanup(s.stop)
}

func (s *site) lists(lines ...string) {
	s.t.Helper()
	if err := writeList(s.List, lines); err != nil {
		s.t.Fatal(err)
	}
}

// machine is one with a key of its own.
func (s *site) machine() *kms.Client {
	s.t.Helper()
	ca, err := os.ReadFile(filepath.Join(s.dir, "ca.crt"))
	own, unmade := pki.NewCA(pki.Ed25519, pkix.Name{}, time.Now(), time.Hour)
	identity, unread := tls.X509KeyPair(own.Cert, own.Key)
	if err != nil || unmade != nil || unread != nil {
		s.t.Fatal(err, unmade, unread)
	}
	return &kms.Client{Endpoint: s.endpoint, CA: ca, Identity: identity, UUID: uuid, Patience: 20 * time.Second}
}

func (s *site) sealed(c *kms.Client) []byte {
	s.t.Helper()
	sealed, err := c.Seal(s.t.Context(), []byte(passphrase))
	if err != nil || strings.Contains(string(sealed), passphrase) {
		s.t.Fatalf("%q, %v", sealed, err)
	}
	return sealed
}

func (s *site) opens(c *kms.Client, sealed []byte) {
	s.t.Helper()
	if got, err := c.Unseal(s.t.Context(), sealed); string(got) != passphrase || err != nil {
		s.t.Errorf("%q, %v", got, err)
	}
}

func (s *site) refuses(c *kms.Client, sealed []byte, why string) {
	s.t.Helper()
	if got, err := c.Unseal(s.t.Context(), sealed); err == nil || !strings.Contains(err.Error(), why) {
		s.t.Errorf("%q, %v; want an error with %q", got, err, why)
	}
}

// A machine of the list gets back what it has sealed, also of a server that has started anew; no other one does.
func TestSealAndUnseal(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	c := s.machine()
	s.refuses(c, nil, "isn't in its list") // before it has sealed anything
	sealed := s.sealed(c)
	s.opens(c, sealed)
	list, err := os.ReadFile(s.List)
	if err != nil || !strings.Contains(string(list), strings.ToUpper(uuid)+" ") || !strings.Contains(string(list), "# the first one") {
		t.Errorf("%s, %v", list, err)
	}
	s.stop()
	again, err := Key(s.dir)
	if err != nil {
		t.Fatal(err)
	}
	s.Server = &Server{Key: again, List: s.List, Log: s.Log}
	if s.cert, err = Certificate(s.dir, "127.0.0.1", time.Now()); err != nil {
		t.Fatal(err)
	}
	s.starts(s.HTTP(s.cert).Handler)
	s.opens(c, sealed)

	thief := s.machine()
	if _, err := thief.Seal(t.Context(), []byte(passphrase)); err == nil || !strings.Contains(err.Error(), "isn't in its list") {
		t.Errorf("another key has the place of a machine: %v", err)
	}
	s.refuses(thief, sealed, "isn't in its list")
	s.lists(strings.TrimSpace(string(list)), uuid)
	s.sealed(thief) // a second machine with that UUID
	s.refuses(thief, sealed, "hasn't sealed that for this machine")
	s.refuses(c, append(sealed[:len(sealed)-1:len(sealed)-1], 0, 1), "hasn't sealed that for this machine")
	s.refuses(c, nil, "hasn't sealed that for this machine")
	s.lists("# revoked: " + uuid)
	s.refuses(c, sealed, "isn't in its list")
}

// While the server is down, slow or broken, it is asked again; with another authority it never answers.
func TestServerIsDown(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	c := s.machine()
	sealed := s.sealed(c)
	s.stop()
	c.Patience = time.Second
	s.refuses(c, sealed, "no answer of "+s.endpoint+"; it is asked again until it answers")
	c.Patience = 20 * time.Second
	time.AfterFunc(time.Second, func() {
		s.starts(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "starting", http.StatusServiceUnavailable) }))
		time.AfterFunc(time.Second, func() { s.stop(); s.starts(s.HTTP(s.cert).Handler) })
	})
	s.opens(c, sealed)

	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	s.stop()
	s.starts(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // so that its end is noticed
		<-r.Context().Done()
	}))
	began := time.Now()
	if _, err := c.Unseal(ctx, sealed); err == nil || time.Since(began) > 5*time.Second {
		t.Errorf("a server that is silent: %v after %s", err, time.Since(began))
	}
	s.stop()
	s.starts(s.HTTP(s.cert).Handler)
	c.CA, c.Patience = newSite(t).machine().CA, 0
	s.refuses(c, sealed, "certificate signed by unknown authority")
}

// A recorded answer opens nothing, even from a server with the right certificate.
func TestReplayedAnswer(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	c := s.machine()
	sealed := s.sealed(c)
	var recorded []byte
	real := s.HTTP(s.cert).Handler
	s.stop()
	s.starts(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if recorded != nil {
			_, _ = w.Write(recorded)
			return
		}
		record := &recorder{ResponseWriter: w}
		real.ServeHTTP(record, r)
		recorded = record.body
	}))
	s.opens(c, sealed)
	if len(recorded) == 0 || strings.Contains(string(recorded), passphrase) {
		t.Fatalf("recorded %s", recorded)
	}
	s.refuses(c, sealed, "isn't one to this request")
}

type recorder struct {
	http.ResponseWriter
	body []byte
}

func (r *recorder) Write(p []byte) (int, error) {
	r.body = append(r.body, p...)
	return r.ResponseWriter.Write(p)
}

// The clock of a machine may be late, but the name and the authority of the server are its own.
func TestCertificateOfTheServer(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	c := s.machine()
	for i, name := range []string{"127.0.0.1", "127.0.0.2", "kms.example.org"} {
		s.stop()
		cert, err := Certificate(s.dir, name, time.Now().Add(100*24*time.Hour))
		if err != nil {
			t.Fatal(err)
		}
		s.cert = cert
		s.starts(s.HTTP(cert).Handler)
		c.Patience = 0
		_, err = c.Seal(t.Context(), []byte(passphrase))
		if (err == nil) != (i == 0) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// What isn't a request is refused with the reason, and without a machine's key nobody is heard.
func TestBadRequests(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	c := s.machine()
	s.sealed(c)
	unverified := func(certs ...tls.Certificate) *http.Client {
		return &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true, Certificates: certs}}}
	}
	if _, err := unverified().Post(s.endpoint+kms.SealPath, "application/json", strings.NewReader("{}")); err == nil {
		t.Error("answers without a certificate")
	}
	for body, want := range map[string]string{
		"":                         "the request: EOF",
		"[]":                       "the request: json",
		`{"uuid": "` + uuid + `"}`: "a nonce has 32 bytes",
		fmt.Sprintf(`{"sealed": %q}`, strings.Repeat("A", 1<<20)): "too large",
	} {
		got, err := unverified(c.Identity).Post(s.endpoint+kms.UnsealPath, "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		var no kms.Refusal
		if err := json.NewDecoder(got.Body).Decode(&no); err != nil || got.StatusCode != http.StatusBadRequest || !strings.Contains(no.Error, want) {
			t.Errorf("%d %q, %v; want %q", got.StatusCode, no.Error, err, want)
		}
		got.Body.Close()
	}
	if _, err := c.Seal(t.Context(), make([]byte, maxPassphrase+1)); err == nil {
		t.Error("seals what is no passphrase")
	}
	if err := os.WriteFile(filepath.Join(s.dir, "key"), []byte("short"), secret); err != nil {
		t.Fatal(err)
	}
	if _, err := Key(s.dir); err == nil {
		t.Error("takes a damaged key")
	}
	if _, err := Certificate(s.dir, "", time.Now()); err == nil {
		t.Error("a certificate without a name")
	}
}
