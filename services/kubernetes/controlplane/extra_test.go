package controlplane

import (
	"crypto/sha256"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/config"
)

// A manifest has the sum that its URL demands, also after a redirect.
func TestManifestIsWhatWasMeant(t *testing.T) {
	t.Parallel()
	const manifest = "{apiVersion: v1, kind: ConfigMap, metadata: {name: a, namespace: b}}\n"
	sum := fmt.Sprintf("%x", sha256.Sum256([]byte(manifest)))
	serve := http.NewServeMux()
	serve.HandleFunc("/a.yaml", func(w http.ResponseWriter, _ *http.Request) { w.Write([]byte(manifest)) })
	serve.HandleFunc("/moved", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/a.yaml", http.StatusFound) })
	server := httptest.NewServer(serve)
	defer server.Close()
	for path, want := range map[string]string{
		"/a.yaml":               "",
		"/a.yaml#sha256=" + sum: "",
		"/moved#sha256=" + sum:  "",
		"/a.yaml#sha256=" + strings.Repeat("0", 64): "the document has #sha256=" + sum + ", and its URL demands #sha256=000",
		"/moved#sha256=" + strings.Repeat("0", 64):  "its URL demands #sha256=000",
		"/missing.yaml#sha256=" + sum:               "the server answered 404",
	} {
		u, err := config.ParseURL(server.URL + path)
		put(t, err)
		objects, err := fetchManifest(t.Context(), nil, u)
		if want == "" && (err != nil || len(objects) != 1) || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, %v, want %q", path, objects, err, want)
		}
	}
}
