package network

import (
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"testing"

	"github.com/garboard-os/garboard/tools/testing/freeport"
)

// S-129, S-134: a registry of this machine is used by the gateway's address, with a path and
// a slash at its end, and its redirects are followed.
func TestMirrorProxy(t *testing.T) {
	t.Parallel()
	elsewhere := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "blob %s %q", r.Header.Get("Range"), r.Header.Get("Cookie"))
	}))
	defer elsewhere.Close()
	at := freeport.Find(t)
	l, err := net.Listen("tcp4", at.String())
	if err != nil {
		t.Fatal(err)
	}
	cache := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/cache/v2/a/blobs/b" && r.URL.RawQuery == "ns=docker.io" {
			http.Redirect(w, r, elsewhere.URL, http.StatusTemporaryRedirect)
			return
		}
		w.Header().Set("Docker-Content-Digest", "sha256:1")
		w.Header().Set("Set-Cookie", "a=b")
		http.NotFound(w, r)
	}))
	cache.Listener.Close()
	cache.Listener = l
	cache.Start()
	defer cache.Close()
	to, err := Mirror{URL: fmt.Sprintf("http://10.5.0.1:%d/cache/", at.Port())}.target(netip.MustParsePrefix("10.5.0.0/24"), "")
	if err != nil {
		t.Fatal(err)
	}
	handler := proxy(to, slog.New(slog.DiscardHandler))
	ask := func(method, path string) *httptest.ResponseRecorder {
		r := httptest.NewRequest(method, path, nil)
		r.Header.Set("Range", "bytes=0-1")
		r.Header.Set("Cookie", "a=b")
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		return w
	}
	if w := ask("GET", "/v2/a/blobs/b?ns=docker.io"); w.Code != http.StatusOK || w.Body.String() != `blob bytes=0-1 ""` {
		t.Errorf("a blob: %d %s", w.Code, w.Body)
	}
	if w := ask("HEAD", "/v2/a/manifests/b"); w.Code != http.StatusNotFound || w.Header().Get("Docker-Content-Digest") != "sha256:1" || w.Header().Get("Set-Cookie") != "" {
		t.Errorf("a manifest that isn't there: %d %v", w.Code, w.Header())
	}
	if w := ask("POST", "/v2/a/blobs/uploads/"); w.Code != http.StatusMethodNotAllowed {
		t.Errorf("an upload: %d", w.Code)
	}
	cache.Close()
	if w := ask("GET", "/v2/"); w.Code != http.StatusBadGateway {
		t.Errorf("a registry that is off: %d", w.Code)
	}
}

// A registry on the user's machine is where the host process is, or where its container has a way to it. (S-134)
func TestS134MirrorOnThisMachine(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ url, host, want string }{
		{"http://10.5.0.1:5000", "", "127.0.0.1:5000"},
		{"http://10.5.0.1", "", "127.0.0.1"},
		{"http://[::1]:5000", "", "[::1]:5000"},
		{"http://10.5.0.9:5000", "10.5.0.253", "10.5.0.9:5000"},
		{"http://10.5.0.1:5000", "10.5.0.253", "10.5.0.253:5000"},
		{"http://127.0.0.1:5000", "10.5.0.253", "10.5.0.253:5000"},
		{"https://localhost", "10.5.0.253", "10.5.0.253"},
	} {
		got, err := Mirror{URL: tt.url}.target(netip.MustParsePrefix("10.5.0.0/24"), tt.host)
		if err != nil {
			t.Fatal(err)
		}
		if got.Host != tt.want {
			t.Errorf("%s with this machine at %q: %s, want %s", tt.url, tt.host, got.Host, tt.want)
		}
	}
}
