package containerd

import (
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/google/go-cmp/cmp"
	"github.com/pelletier/go-toml/v2"
)

// registry answers for one image, to those who have the password if it has one.
type registry struct {
	user, password string

	mu    sync.Mutex // guards asked
	asked []string   // "host path"
}

// upstream is what the mirrors stand for: nobody serves there, so it can't help.
const upstream = "127.0.0.1:1"

const manifestDigest = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

func (r *registry) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	r.mu.Lock()
	r.asked = append(r.asked, q.Host+" "+q.URL.Path)
	r.mu.Unlock()
	if user, password, _ := q.BasicAuth(); user != r.user || password != r.password {
		w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	w.Header().Set("Content-Type", "application/vnd.oci.image.manifest.v1+json")
	w.Header().Set("Docker-Content-Digest", manifestDigest)
	w.Header().Set("Content-Length", "2")
	io.WriteString(w, "{}")
}

// pull resolves an image as the system's own pulls do.
func pull(t *testing.T, dir, bundle string, m config.Machine) error {
	t.Helper()
	return pullFrom(t, upstream, dir, bundle, m)
}

func pullFrom(t *testing.T, host, dir, bundle string, m config.Machine) error {
	t.Helper()
	if err := writeHosts(dir, m.Registries); err != nil {
		t.Fatal(err)
	}
	if bundle == "" {
		bundle = filepath.Join(dir, "none")
	}
	r, done := origin{hostsDir: dir, bundle: bundle, machine: m}.resolver(t.Context())
	defer done()
	_, desc, err := r.Resolve(t.Context(), host+"/etcd:1")
	if err == nil && string(desc.Digest) != manifestDigest {
		t.Errorf("resolved to %s", desc.Digest)
	}
	return err
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

func certificate(s *httptest.Server) string {
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw}))
}

func through(t *testing.T, endpoints ...string) config.Registries {
	return config.Registries{Mirrors: map[string]config.Mirror{upstream: mirror(t, endpoints...)}}
}

// S-146: an authority that is added to the bundle is trusted from the next pull
// on, and one that is taken out isn't any more; in a process that has long looked
// at the system's authorities.
func TestS146BundleOfTheMoment(t *testing.T) {
	t.Parallel()
	if _, err := x509.SystemCertPool(); err != nil {
		t.Fatal(err)
	}
	s := httptest.NewTLSServer(&registry{})
	defer s.Close()
	other := httptest.NewTLSServer(&registry{})
	defer other.Close()
	dir, bundle := filepath.Join(t.TempDir(), "hosts"), filepath.Join(t.TempDir(), "bundle")
	m := config.Machine{Registries: through(t, s.URL)}
	for _, step := range []struct {
		bundle  string
		trusted bool
	}{{"", false}, {"# nothing\n" + certificate(s), true}, {"", false}} {
		write(t, bundle, step.bundle)
		err := pull(t, dir, bundle, m)
		if step.trusted && err != nil || !step.trusted && (err == nil || !strings.Contains(err.Error(), "unknown authority")) {
			t.Errorf("trusted %v: %v", step.trusted, err)
		}
	}
	if err := pull(t, dir, filepath.Join(dir, "none"), m); err == nil || !strings.Contains(err.Error(), "unknown authority") {
		t.Errorf("without a bundle: %v", err)
	}
}

// S-066, S-136: a host's own authority and login; the authority counts for that
// host only.
func TestS136OwnAuthorityAndLogin(t *testing.T) {
	t.Parallel()
	reg := &registry{user: "node", password: "pass:word"}
	s := httptest.NewTLSServer(reg)
	defer s.Close()
	u, _ := url.Parse(s.URL)
	dir, bundle := filepath.Join(t.TempDir(), "hosts"), filepath.Join(t.TempDir(), "bundle")
	write(t, bundle, "")
	for name, tt := range map[string]struct {
		host string
		reg  config.Registry
		want string
	}{
		"both":       {u.Host, config.Registry{TLS: &config.RegistryTLS{CA: config.PEM(certificate(s))}, Auth: &config.RegistryAuth{Username: "node", Password: "pass:word"}}, ""},
		"base64":     {u.Host, config.Registry{TLS: &config.RegistryTLS{CA: config.PEM(certificate(s))}, Auth: &config.RegistryAuth{Auth: "bm9kZTpwYXNzOndvcmQ="}}, ""},
		"unverified": {u.Host, config.Registry{TLS: &config.RegistryTLS{InsecureSkipVerify: true}, Auth: &config.RegistryAuth{Username: "node", Password: "pass:word"}}, ""},
		"no login":   {u.Host, config.Registry{TLS: &config.RegistryTLS{InsecureSkipVerify: true}}, "no basic auth credentials"},
		"wrong":      {u.Host, config.Registry{TLS: &config.RegistryTLS{InsecureSkipVerify: true}, Auth: &config.RegistryAuth{Username: "node", Password: "x"}}, "401"},
		"elsewhere":  {"other.example:5000", config.Registry{TLS: &config.RegistryTLS{CA: config.PEM(certificate(s))}}, "unknown authority"},
	} {
		m := config.Machine{Registries: through(t, s.URL)}
		m.Registries.Config = map[string]config.Registry{tt.host: tt.reg}
		err := pull(t, filepath.Join(dir, strings.ReplaceAll(name, " ", "-")), bundle, m)
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%s: %v, want %q", name, err, tt.want)
		}
	}
}

// S-145: the proxies of machine.env, not those of PID 1's environment, and not
// those of an earlier configuration.
func TestS145Proxy(t *testing.T) {
	t.Setenv("http_proxy", "http://127.0.0.1:1")
	reg := &registry{}
	s := httptest.NewServer(reg) // a proxy gets the same request, with the whole URL
	defer s.Close()
	dir, bundle := filepath.Join(t.TempDir(), "hosts"), filepath.Join(t.TempDir(), "bundle")
	write(t, bundle, "")
	m := config.Machine{
		Registries: through(t, "http://mirror.invalid:5000"), // found by the proxy only
		Env:        map[string]string{"HTTP_PROXY": s.URL},
	}
	if err := pull(t, dir, bundle, m); err != nil {
		t.Error(err)
	}
	if d := cmp.Diff([]string{"mirror.invalid:5000 /v2/etcd/manifests/1"}, reg.asked); d != "" {
		t.Error(d)
	}
}

// The CRI gets the same logins; docker.io is asked under another name.
func TestLoginsOfTheCRI(t *testing.T) {
	t.Parallel()
	data, err := renderConfig(boot.Machine, config.Registries{Config: map[string]config.Registry{
		"docker.io":      {Auth: &config.RegistryAuth{Username: "u", Password: "p"}},
		"token.example":  {Auth: &config.RegistryAuth{IdentityToken: "t"}},
		"public.example": {TLS: &config.RegistryTLS{InsecureSkipVerify: true}},
	}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	var parsed struct {
		Plugins map[string]struct {
			Registry struct {
				Configs map[string]struct{ Auth map[string]string }
			}
		}
	}
	if err := toml.Unmarshal(data, &parsed); err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for host, c := range parsed.Plugins["io.containerd.cri.v1.images"].Registry.Configs {
		got[host] = fmt.Sprint(c.Auth)
	}
	want := map[string]string{
		"docker.io": "map[password:p username:u]", dockerHub: "map[password:p username:u]", "token.example": "map[identitytoken:t]",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

// S-126: the endpoints of a registry are tried in their order, and one that doesn't have the image
// leaves it to the next one. A registry with mirrors of its own doesn't use those of '*'.
func TestS126EndpointsInTheirOrder(t *testing.T) {
	t.Parallel()
	lacking := httptest.NewServer(http.NotFoundHandler())
	defer lacking.Close()
	first, last, others := &registry{}, &registry{}, &registry{}
	var urls []string
	for _, r := range []*registry{first, last, others} {
		s := httptest.NewServer(r)
		defer s.Close()
		urls = append(urls, s.URL)
	}
	dir, bundle := filepath.Join(t.TempDir(), "hosts"), filepath.Join(t.TempDir(), "bundle")
	write(t, bundle, "")
	for _, tt := range []struct {
		endpoints []string
		asked     *registry
	}{
		{[]string{lacking.URL, urls[1]}, last},
		{[]string{urls[0], urls[1]}, first},
		{[]string{urls[0], urls[0] + "/v2/"}, first},
	} {
		m := config.Machine{Registries: through(t, tt.endpoints...)}
		m.Registries.Mirrors["*"] = mirror(t, urls[2])
		before := len(first.asked) + len(last.asked)
		if err := pull(t, dir, bundle, m); err != nil {
			t.Errorf("%v: %v", tt.endpoints, err)
		}
		if len(tt.asked.asked) == 0 || len(first.asked)+len(last.asked) != before+1 || len(others.asked) > 0 {
			t.Errorf("%v: the first was asked for %v, the last for %v, that of '*' for %v", tt.endpoints, first.asked, last.asked, others.asked)
		}
	}
	m := config.Machine{Registries: config.Registries{
		Mirrors: map[string]config.Mirror{"*": mirror(t, urls[2])}, Config: map[string]config.Registry{upstream: {TLS: &config.RegistryTLS{InsecureSkipVerify: true}}},
	}}
	if err := pull(t, dir, bundle, m); err != nil || len(others.asked) == 0 {
		t.Errorf("a registry with an authority of its own: %v, that of '*' was asked for %v", err, others.asked)
	}
}

// projects is a registry of which the test's image is in a project. Anything else isn't there.
type projects struct {
	registry
	path string
}

func (p *projects) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	if q.URL.Path != p.path {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.asked = append(p.asked, q.URL.Path)
		http.NotFound(w, q)
		return
	}
	p.registry.ServeHTTP(w, q)
}

// Mirrors may be projects of a registry: their paths are below /v2, or are used as they are.
func TestMirrorsWithPaths(t *testing.T) {
	t.Parallel()
	for endpoint, tt := range map[string]struct {
		override bool
		asked    string
	}{
		"":                         {false, "/v2/etcd/manifests/1"},
		"/v2":                      {false, "/v2/etcd/manifests/1"},
		"/v2/":                     {true, "/v2/etcd/manifests/1"},
		"/v2/proxy-docker.io":      {false, "/v2/proxy-docker.io/etcd/manifests/1"},
		"/v2/proxy/docker.io/":     {true, "/v2/proxy/docker.io/etcd/manifests/1"},
		"/v2x":                     {false, "/v2x/v2/etcd/manifests/1"},
		"/api/docker/hub":          {false, "/api/docker/hub/v2/etcd/manifests/1"},
		"/api/docker/hub/v2":       {false, "/api/docker/hub/v2/etcd/manifests/1"},
		"/artifacts/v2/docker/hub": {true, "/artifacts/v2/docker/hub/etcd/manifests/1"},
	} {
		reg := &projects{path: tt.asked}
		s := httptest.NewServer(reg)
		defer s.Close()
		m := config.Machine{Registries: through(t, s.URL+endpoint)}
		hub := m.Registries.Mirrors[upstream]
		hub.OverridePath = tt.override
		m.Registries.Mirrors[upstream] = hub
		if err := pull(t, filepath.Join(t.TempDir(), "hosts"), "", m); err != nil {
			t.Errorf("%s: %v; it was asked for %v", endpoint, err, reg.asked)
		}
	}
}

// Without a fallback, only the mirrors are asked, each with its own authority: not the registry itself, and not for a
// registry without mirrors of its own.
func TestMirrorsWithoutFallback(t *testing.T) {
	t.Parallel()
	lacking, own := httptest.NewServer(http.NotFoundHandler()), &registry{}
	defer lacking.Close()
	origin := httptest.NewServer(own)
	defer origin.Close()
	last := httptest.NewTLSServer(&registry{})
	defer last.Close()
	host := strings.TrimPrefix(origin.URL, "http://")
	at, _ := url.Parse(last.URL)
	for _, name := range []string{host, "*"} {
		for _, tt := range []struct {
			endpoints []string
			skip      bool
			want      string
			asked     int
		}{
			{[]string{lacking.URL}, false, "", 1},
			{[]string{lacking.URL}, true, "not found", 0},
			{[]string{lacking.URL, last.URL}, true, "", 0},
			{[]string{lacking.URL, origin.URL}, true, "", 1},
		} {
			own.asked = nil
			mirrors := mirror(t, tt.endpoints...)
			mirrors.SkipFallback = tt.skip
			m := config.Machine{Registries: config.Registries{
				Mirrors: map[string]config.Mirror{name: mirrors},
				Config:  map[string]config.Registry{at.Host: {TLS: &config.RegistryTLS{CA: config.PEM(certificate(last))}}},
			}}
			err := pullFrom(t, host, filepath.Join(t.TempDir(), "hosts"), "", m)
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) || len(own.asked) != tt.asked {
				t.Errorf("%s, %v, skip %v: %v, the registry was asked for %v", name, tt.endpoints, tt.skip, err, own.asked)
			}
		}
	}
}

// Only root reads keys, and every file that hosts.toml names is there.
func TestHostFilesOfOneRegistry(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	r := through(t, "https://mirror.example:5000")
	r.Config = map[string]config.Registry{
		"mirror.example:5000": {TLS: &config.RegistryTLS{CA: config.PEM("ca"), ClientIdentity: config.CertKey{Crt: config.PEM("crt"), Key: config.KeyPEM("key")}}},
		"*":                   {TLS: &config.RegistryTLS{InsecureSkipVerify: true}},
	}
	if err := writeHosts(dir, r); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		upstream + "/hosts.toml": "skip_verify = true\n[host.\"https://mirror.example:5000/v2\"]\ncapabilities = [\"pull\", \"resolve\", \"referrers\"]\noverride_path = true\n" +
			"ca = \"mirror.example_5000.ca.pem\"\nclient = [[\"mirror.example_5000.client.pem\", \"mirror.example_5000.client-key.pem\"]]\n",
		upstream + "/mirror.example_5000.ca.pem":         "ca",
		upstream + "/mirror.example_5000.client-key.pem": "key",
		"_default/hosts.toml":                            "skip_verify = true\n",
	} {
		got, err := os.ReadFile(filepath.Join(dir, path))
		if err != nil || string(got) != want {
			t.Errorf("%s is\n%s(%v), want\n%s", path, got, err, want)
		}
	}
	if info, err := os.Stat(filepath.Join(dir, upstream+"/mirror.example_5000.client-key.pem")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the key's mode is %v (%v)", info.Mode(), err)
	}
}

// What answers for a registry, and has no manifest, isn't taken for an image.
func TestPageInsteadOfAManifest(t *testing.T) {
	t.Parallel()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		io.WriteString(w, "<html>Please log in</html>")
	}))
	defer s.Close()
	m := config.Machine{Registries: through(t, s.URL)}
	if err := pull(t, filepath.Join(t.TempDir(), "hosts"), "", m); err == nil || !strings.Contains(err.Error(), `"text/html" is the type of what is there instead of a manifest`) {
		t.Error(err)
	}
}

// The doctor asks where pulls do, with their settings; who refuses has answered, and who fails hasn't.
func TestRegistriesAreAsked(t *testing.T) {
	t.Parallel()
	s := httptest.NewTLSServer(&registry{user: "somebody"})
	defer s.Close()
	broken := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadGateway) }))
	defer broken.Close()
	u, _ := url.Parse(s.URL)
	dir, bundle := filepath.Join(t.TempDir(), "hosts"), filepath.Join(t.TempDir(), "bundle")
	write(t, bundle, "")
	m := config.Machine{Registries: config.Registries{
		Mirrors: map[string]config.Mirror{"*": mirror(t, s.URL), upstream: mirror(t, broken.URL, "http://127.0.0.1:4")},
		Config:  map[string]config.Registry{u.Host: {TLS: &config.RegistryTLS{CA: config.PEM(certificate(s))}}},
	}}
	if err := writeHosts(dir, m.Registries); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, r := range (origin{hostsDir: dir, bundle: bundle, machine: m}).probe(t.Context(), []string{"127.0.0.1:2", "127.0.0.1:3", upstream}) {
		got = append(got, fmt.Sprintf("%s %s %v %v", r.Of, strings.NewReplacer(s.URL, "GOOD", broken.URL, "BAD").Replace(r.URL), r.Mirror, r.Err == nil))
	}
	want := []string{
		"127.0.0.1:2 GOOD/v2/ true true", "127.0.0.1:2 https://127.0.0.1:2/v2/ false false", "127.0.0.1:3 GOOD/v2/ true true", "127.0.0.1:3 https://127.0.0.1:3/v2/ false false",
		upstream + " BAD/v2/ true false", upstream + " http://127.0.0.1:4/v2/ true false", upstream + " https://127.0.0.1:1/v2/ false false",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}
