//go:build e2e && long

package registries

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"math/big"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

const tokenIssuer, tokenService = "tokens of the site", "registry of the site"

// tokens is a server that gives tokens for a registry (https://distribution.github.io/distribution/spec/auth/token/),
// to whoever has the password (GET) or the identity token (POST, OAuth 2).
type tokens struct {
	key         *ecdsa.PrivateKey
	certificate []byte // DER

	mu    sync.Mutex
	given map[string]int // by method
}

func newTokens(t *testing.T) *tokens {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	of := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: tokenIssuer}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, of, of, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return &tokens{key: key, certificate: der, given: map[string]int{}}
}

func (s *tokens) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	field, allowed := "token", false
	if r.Method == http.MethodPost {
		field, allowed = "access_token", r.FormValue("grant_type") == "refresh_token" && r.FormValue("refresh_token") == "identity"
	} else {
		user, password, _ := r.BasicAuth()
		allowed = user == "node" && password == "correct horse"
	}
	if !allowed || r.FormValue("service") != tokenService {
		http.Error(w, `{"details":"incorrect username or password"}`, http.StatusUnauthorized)
		return
	}
	repository, _, _ := strings.Cut(strings.TrimPrefix(r.FormValue("scope"), "repository:"), ":")
	token, err := s.sign(repository)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	s.mu.Lock()
	s.given[r.Method]++
	s.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{field: token, "expires_in": 300}) // the node has gone away otherwise
}

// sign makes a token (RFC 7519, ES256) that allows pulls from a repository.
func (s *tokens) sign(repository string) (string, error) {
	now := time.Now()
	var parts []string
	for _, part := range []any{
		map[string]any{"typ": "JWT", "alg": "ES256", "x5c": []string{base64.StdEncoding.EncodeToString(s.certificate)}},
		map[string]any{
			"iss": tokenIssuer, "sub": "node", "aud": tokenService, "jti": rand.Text(),
			"nbf": now.Add(-time.Minute).Unix(), "iat": now.Unix(), "exp": now.Add(5 * time.Minute).Unix(),
			"access": []any{map[string]any{"type": "repository", "name": repository, "actions": []string{"pull"}}},
		},
	} {
		text, err := json.Marshal(part)
		if err != nil {
			return "", err
		}
		parts = append(parts, base64.RawURLEncoding.EncodeToString(text))
	}
	signed := strings.Join(parts, ".")
	sum := sha256.Sum256([]byte(signed))
	a, b, err := ecdsa.Sign(rand.Reader, s.key, sum[:])
	if err != nil {
		return "", err
	}
	signature := make([]byte, 64)
	a.FillBytes(signature[:32])
	b.FillBytes(signature[32:])
	return signed + "." + base64.RawURLEncoding.EncodeToString(signature), nil
}

func (s *tokens) count(method string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.given[method]
}

// A real registry demands tokens of another server. A node gets them with a password and with an identity token, for
// Kubernetes' pulls and for its own; a wrong password is named. (S-136)
func TestTokens(t *testing.T) {
	const kubelet, pause = "site/kubelet:1", "site/pause:1"
	storage := t.TempDir()
	store(t, storage, e2etest.Built(t, qemu.Container).Layout, map[string]string{config.DefaultKubeletImage: kubelet, config.DefaultPauseImage: pause}, ownLayerOf(t))
	c, m := e2etest.Ready(t, "tokens", qemu.Container)
	inside, host := c.Network(), gateway+":5084"
	issuer := newTokens(t)
	l, err := inside.Listen(gateway + ":5083")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: issuer}
	var served sync.WaitGroup
	served.Go(func() { _ = server.Serve(l) }) // until it is closed
	t.Cleanup(func() {
		server.Close()
		served.Wait()
	})
	bundle := filepath.Join(t.TempDir(), "bundle.pem")
	if err := os.WriteFile(bundle, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: issuer.certificate}), 0o600); err != nil {
		t.Fatal(err)
	}
	serve(t, inside, storage, host, map[string]any{"auth": map[string]any{"token": map[string]any{
		"realm": "http://" + gateway + ":5083/token", "service": tokenService, "issuer": tokenIssuer, "rootcertbundle": bundle,
	}}})

	patch := func(text string) {
		t.Helper()
		c.Gbctl("-n", c.Node(), "patch", "mc", "-p", text)
	}
	login := func(auth string) {
		t.Helper()
		patch(`machine: {registries: {mirrors: {tokens.test: {endpoints: ["http://` + host + `"]}}, config: {"` + host + `": {auth: ` + auth + `}}}}`)
	}
	says := func(what string, wants ...string) {
		t.Helper()
		c.Eventually(pullBudget, what, func() error {
			out, err := c.TryGbctl("-n", c.Node(), "service", "kubelet")
			for _, want := range wants {
				if err == nil && !strings.Contains(out, want) {
					err = errors.New(out)
				}
			}
			return err
		})
		m.Reached(what)
	}
	login(`{username: node, password: wrong}`)
	patch("machine: {kubelet: {image: tokens.test/" + kubelet + "}}")
	says("the wrong password is named", "tokens.test/"+kubelet, "401 Unauthorized")
	login(`{username: node, password: "correct horse"}`)
	c.Eventually(pullBudget, "the kubelet runs from the registry", func() error {
		out, err := c.TryGbctl("-n", c.Node(), "containers")
		if err == nil && !strings.Contains(out, "tokens.test/"+kubelet) {
			err = errors.New(out)
		}
		return err
	})
	c.Eventually(pullBudget, "the node is Ready", func() error { return c.NodesReady(c.Nodes[0]) })
	m.Reached("the kubelet comes with the password")
	if issuer.count(http.MethodGet) == 0 {
		t.Error("no token was given for the password")
	}

	login(`{username: null, password: null, identityToken: identity}`)
	c.Kubectl("run", "pause", "--image=tokens.test/"+pause, "--restart=Never")
	c.Eventually(pullBudget, "a pod runs from the registry", func() error {
		out, err := c.Try("get", "pod", "pause", "-o", "jsonpath={.status.phase} {.status.containerStatuses[*].state.waiting.message}")
		if err == nil && !strings.HasPrefix(out, "Running") {
			err = errors.New(out)
		}
		return err
	})
	m.Reached("a pod comes with the identity token")
	if issuer.count(http.MethodPost) == 0 {
		t.Error("no token was given for the identity token")
	}
}
