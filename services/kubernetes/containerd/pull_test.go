package containerd

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/tools/testing/freeport"
)

func TestPullErrorOfAFullDisk(t *testing.T) {
	t.Parallel()
	full := errors.New("failed to extract layer: write /var/lib/containerd/x: no space left on device")
	got := pullError("registry.example/etcd:1", full)
	for _, want := range []string{"the disk is full: /var (EPHEMERAL)", "MiB for image registry.example/etcd:1", "larger disk"} {
		if !strings.Contains(got.Error(), want) {
			t.Errorf("%q isn't in: %s", want, got)
		}
	}
	if reason.Of(got) != ImageNoSpace {
		t.Errorf("reason %q", reason.Of(got))
	}
}

// What real registries do to a real resolver is told apart.
func TestPullReasons(t *testing.T) {
	t.Parallel()
	closed := "http://" + freeport.Find(t).String()
	locked, secure := httptest.NewServer(&registry{user: "u", password: "p"}), httptest.NewTLSServer(&registry{})
	empty, busy := httptest.NewServer(http.NotFoundHandler()), httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "toomanyrequests", http.StatusTooManyRequests)
	}))
	for _, s := range []*httptest.Server{locked, secure, empty, busy} {
		defer s.Close()
	}
	bundle := filepath.Join(t.TempDir(), "bundle")
	write(t, bundle, "")
	for want, url := range map[reason.Code]string{
		RegistryUnanswered: closed, RegistryDenied: locked.URL, RegistryUntrusted: secure.URL, ImageNotFound: empty.URL, RegistryLimits: busy.URL,
		RegistryUnresolved: "http://registry.garboard.invalid", RegistryPlainHTTP: strings.Replace(empty.URL, "http:", "https:", 1),
	} {
		_, host, _ := strings.Cut(url, "://")
		if strings.HasPrefix(url, "https:") {
			host = upstream // the resolver tries another scheme with the host itself
		}
		err := pullFrom(t, host, filepath.Join(t.TempDir(), "hosts"), bundle, config.Machine{Registries: config.Registries{Mirrors: map[string]config.Mirror{host: mirror(t, url)}}})
		if err == nil {
			t.Errorf("%s: %s gave it", want, url)
			continue
		}
		told := pullError("etcd:1", err)
		if got := reason.Of(told); got != want || !IsPullReason(got) || !strings.Contains(told.Error(), err.Error()) || !strings.Contains(told.Error(), "machine.registries.mirrors") {
			t.Errorf("%q, want %q: %v", got, want, told)
		}
	}
	if code := PullReason("something new"); code != ImagePullFailed || !IsPullReason(code) || IsPullReason(Pulling) || IsPullReason("") {
		t.Error(code)
	}
}
