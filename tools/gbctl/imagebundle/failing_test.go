package imagebundle

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/qemu/network/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

// failing is a registry with an image, in which requests for a part of the paths are answered otherwise.
func failing(t *testing.T, text, part string, answer http.HandlerFunc) string {
	t.Helper()
	return failingFor(t, text, part, func(http.Handler) http.HandlerFunc { return answer })
}

// failingFor gives the answers what the registry would answer.
func failingFor(t *testing.T, text, part string, answers func(store http.Handler) http.HandlerFunc) string {
	t.Helper()
	store := newRegistry()
	answer := answers(store)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet && strings.Contains(r.URL.Path, part) {
			answer(w, r)
			return
		}
		store.ServeHTTP(w, r)
	}))
	t.Cleanup(s.Close)
	image, err := random.Image(1000, 1)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(at(t, text, s.URL), image); err != nil {
		t.Fatal(err)
	}
	return s.URL
}

// A registry that can't say whether an image has signatures isn't one that has none. A mirror that has the image
// decides.
func TestSignaturesThatCantBeLookedUp(t *testing.T) {
	t.Parallel()
	const text = "registry.example/team/image:1"
	broken := func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "not now", http.StatusTeapot) }
	for part, want := range map[string]string{
		".sig":        "signatures of " + text + ": ",
		"/referrers/": "signatures of " + text + ": ",
		"/nothing/":   "",
	} {
		file := filepath.Join(t.TempDir(), "images.tar")
		var said []string
		b := Bundle{Say: func(line string) { said = append(said, line) }, Mirrors: map[string][]string{"*": {failing(t, text, part, broken)}}}
		err := b.Write(t.Context(), []string{text}, file)
		_, missing := os.Stat(file)
		if want == "" && (err != nil || missing != nil || !strings.Contains(strings.Join(said, "\n"), "registry.example isn't asked for signatures: ")) {
			t.Errorf("%s: %v, %v, %q", part, err, missing, said)
		}
		if want != "" && (err == nil || missing == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "418")) {
			t.Errorf("%s: %v, %v", part, err, missing)
		}
	}
}

// What a registry spoils isn't in a bundle: the error names the image. The next try, at a registry that is well, gets
// all.
func TestRegistryThatSpoils(t *testing.T) {
	t.Parallel()
	const text = "registry.example/team/image:1"
	for name, c := range map[string]struct {
		part, want string
		answer     http.HandlerFunc
	}{
		"another content": {"/blobs/", "sha256", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(make([]byte, 1000)) }},
		"truncated": {"/blobs/", "EOF", func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write([]byte("{"))
			_ = http.NewResponseController(w).Flush() // the client misses what it doesn't get
			panic(http.ErrAbortHandler)
		}},
		"too many requests": {"/manifests/", "429", func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "later", http.StatusTooManyRequests) }},
		"no manifest":       {"/manifests/", "invalid character", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("<html>")) }},
		"defective":         {"/blobs/", "500", func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "no", http.StatusInternalServerError) }},
	} {
		var well atomic.Bool
		url := failingFor(t, text, c.part, func(store http.Handler) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				if well.Load() {
					store.ServeHTTP(w, r)
				} else {
					c.answer(w, r)
				}
			}
		})
		file := filepath.Join(t.TempDir(), "images.tar")
		b := Bundle{Say: func(string) {}, Mirrors: map[string][]string{"*": {url}}}
		err := b.Write(t.Context(), []string{text}, file)
		if _, there := os.Stat(file); err == nil || there == nil || !strings.Contains(err.Error(), text) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, %v", name, err, there)
		}
		well.Store(true)
		if err := b.Write(t.Context(), []string{text}, file); err != nil {
			t.Errorf("after %s: %v", name, err)
		}
	}
}

// A registry that hangs is given up, before an answer and within one. The error has its host.
func TestRegistryThatHangs(t *testing.T) {
	t.Parallel()
	const text = "registry.example/team/image:1"
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	for part, begin := range map[string]bool{"/manifests/": false, "/blobs/": true} {
		end := make(chan struct{})
		url := failing(t, text, part, func(w http.ResponseWriter, r *http.Request) {
			if begin {
				_, _ = w.Write([]byte("{"))
				_ = http.NewResponseController(w).Flush() // the client waits for the rest, whether it comes or not
			}
			select {
			case <-end:
			case <-r.Context().Done():
			}
		})
		b := Bundle{Say: func(string) {}, Mirrors: map[string][]string{"*": {url}}, transport: patientTransport(100 * time.Millisecond)}
		err := b.Write(ctx, []string{text}, filepath.Join(t.TempDir(), "images.tar"))
		close(end)
		if want := strings.TrimPrefix(url, "http://") + " has sent nothing for 100ms"; err == nil || !strings.Contains(err.Error(), want) || ctx.Err() != nil {
			t.Errorf("%s: %v, want %q", part, err, want)
		}
	}
}

// Images aren't pushed forever to what accepts connections and says nothing.
func TestPushToWhatHangs(t *testing.T) {
	t.Parallel()
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	image, err := random.Image(1000, 1)
	if err != nil {
		t.Fatal(err)
	}
	archive, err := registry.OpenArchive(packed(t, map[string]v1.Image{"registry.example/team/image:1": image}))
	if err != nil {
		t.Fatal(err)
	}
	defer archive.Close()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() // the kernel accepts, and nobody answers
	b := Bundle{Say: func(string) {}, transport: patientTransport(100 * time.Millisecond)}
	err = b.Push(ctx, archive, l.Addr().String(), true)
	if want := l.Addr().String() + " has sent nothing for 100ms"; err == nil || !strings.Contains(err.Error(), want) || ctx.Err() != nil {
		t.Errorf("%v, want %q", err, want)
	}
}

// While something goes, a connection stays, and it ends when nothing goes or comes.
func TestSlowUpload(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		here, there := net.Pipe()
		defer there.Close()
		c := patientConn{here, "registry.example", time.Minute}
		read := make(chan error, 1)
		go func() {
			_, err := c.Read(make([]byte, 1))
			read <- err
		}()
		go func() {
			for range 5 {
				time.Sleep(40 * time.Second)
				_, _ = there.Read(make([]byte, 1)) // that the writer fails is an error
			}
		}()
		for range 5 {
			if _, err := c.Write([]byte{1}); err != nil {
				t.Fatal(err)
			}
		}
		select {
		case err := <-read:
			t.Fatalf("the upload is cut off: %v", err)
		default:
		}
		if _, err := c.Write([]byte{1}); err == nil || !strings.Contains(err.Error(), "registry.example has taken nothing for 1m") {
			t.Error(err)
		}
		if err := <-read; err == nil || !strings.Contains(err.Error(), "registry.example has sent nothing for 1m") {
			t.Error(err)
		}
	})
}
