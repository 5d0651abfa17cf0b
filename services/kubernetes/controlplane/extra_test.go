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
	silent, err := config.ParseURL("http://127.0.0.1:1/a.yaml?token=hush")
	put(t, err)
	if _, err := fetchManifest(t.Context(), nil, silent); err == nil || strings.Contains(err.Error(), "hush") {
		t.Errorf("the error tells a secret of the URL: %v", err)
	}
	serve := http.NewServeMux()
	serve.HandleFunc("/a.yaml", func(w http.ResponseWriter, _ *http.Request) { w.Write([]byte(manifest)) })
	const tooLarge = maxManifest + 1
	for path, text := range map[string]string{"/empty": "", "/comments": "# nothing\n---\n", "/page": "<html></html>\n", "/large": strings.Repeat("#", tooLarge), "/half": manifest + "---\n: [\n"} {
		serve.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, text) })
	}
	serve.HandleFunc("/cut", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "1000")
		fmt.Fprint(w, manifest)
	})
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
		"/empty":                                    "the document, of 0 bytes, has no object in it",
		"/comments":                                 "the document, of 14 bytes, has no object in it",
		"/cut":                                      "unexpected EOF",
		"/large":                                    "the document has more than 32 MiB",
		"/page":                                     "line 1: is no object",
		"/half":                                     "not valid YAML",
	} {
		u, err := config.ParseURL(server.URL + path)
		put(t, err)
		m, err := fetchManifest(t.Context(), nil, u)
		objects, said := len(m.Objects), strings.Join(m.Problems, "\n")
		if err != nil {
			said = err.Error()
		}
		if (said == "") != (want == "") || !strings.Contains(said, want) || (want == "" || path == "/half") != (objects == 1) {
			t.Errorf("%s: %d objects, %q, want %q", path, objects, said, want)
		}
	}
}
