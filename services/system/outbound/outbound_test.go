package outbound

import (
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// S-145: requests use the proxies of the machine configuration, not those of
// our own environment.
func TestS145Proxy(t *testing.T) {
	t.Setenv("https_proxy", "http://wrong.example.org:1")
	choose := Proxy(map[string]string{"https_proxy": "http://proxy.example.org:3128", "NO_PROXY": "inside.example.org,10.0.0.0/8"})
	for target, want := range map[string]string{
		"https://github.com/x.yaml":       "http://proxy.example.org:3128",
		"https://inside.example.org/x":    "<nil>",
		"https://10.5.0.2:5000/v2":        "<nil>",
		"https://127.0.0.1/v2":            "<nil>",
		"http://plain.example.org/x.yaml": "<nil>",
	} {
		req, err := http.NewRequest(http.MethodGet, target, nil)
		if err != nil {
			t.Fatal(err)
		}
		proxy, err := choose(req)
		if got := fmt.Sprint(proxy); got != want || err != nil {
			t.Errorf("%s goes by %v (%v), want %s", target, got, err, want)
		}
	}
}

// S-146: an authority appended to the bundle is trusted from the next request on.
func TestS146Outbound(t *testing.T) {
	s := httptest.NewTLSServer(http.NotFoundHandler())
	defer s.Close()
	bundle := filepath.Join(t.TempDir(), "bundle")
	authority := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw}))
	for _, step := range []struct {
		bundle  string
		trusted bool
	}{{"", false}, {"not a certificate\n" + authority, true}, {"", false}} {
		if err := os.WriteFile(bundle, []byte(step.bundle), 0o644); err != nil {
			t.Fatal(err)
		}
		transport, err := transport(nil, bundle)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := (&http.Client{Transport: transport}).Get(s.URL)
		if err == nil {
			resp.Body.Close()
		}
		transport.CloseIdleConnections()
		if step.trusted && err != nil || !step.trusted && (err == nil || !strings.Contains(err.Error(), "unknown authority")) {
			t.Errorf("trusted %v: %v", step.trusted, err)
		}
	}
}

// What a pod has put in the place of the bundle is neither followed nor waited for.
func TestBundleOfAPod(t *testing.T) {
	bundle := filepath.Join(t.TempDir(), "bundle")
	for path, err := range map[string]error{bundle: os.Symlink("/dev/zero", bundle), bundle + ".pipe": unix.Mkfifo(bundle+".pipe", 0o600)} {
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Authorities(path, nil); err == nil {
			t.Errorf("%s was read", path)
		}
	}
}
