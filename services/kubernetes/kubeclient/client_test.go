package kubeclient

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config/pki"
)

// server answers "METHOD path" with what handlers say, and everything else with 404.
type server struct {
	t         *testing.T
	handlers  map[string]http.HandlerFunc
	discovery int // how often it was asked for
}

const coreDiscovery = `{"kind":"APIGroupDiscoveryList","items":[{"metadata":{},"versions":[{"version":"v1","resources":[
	{"resource":"pods","scope":"Namespaced","responseKind":{"kind":"Pod","version":"v1"}},
	{"resource":"secrets","scope":"Namespaced","responseKind":{"kind":"Secret"}},
	{"resource":"nodes","scope":"Cluster","responseKind":{"kind":"Node"}}]}]}]}`

const groupDiscovery = `{"kind":"APIGroupDiscoveryList","items":[{"metadata":{"name":"rbac.authorization.k8s.io"},"versions":[{"version":"v1","resources":[
	{"resource":"clusterroles","scope":"Cluster","responseKind":{"kind":"ClusterRole"}}]}]},
	{"metadata":{"name":"certificates.k8s.io"},"versions":[{"version":"v1","resources":[
	{"resource":"certificatesigningrequests","scope":"Cluster","responseKind":{"kind":"CertificateSigningRequest"}}]}]}]}`

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch handler := s.handlers[r.Method+" "+r.URL.Path]; {
	case handler != nil:
		handler(w, r)
	case r.URL.Path == "/api" || r.URL.Path == "/apis":
		s.discovery++
		if r.Header.Get("Accept") != aggregated {
			s.t.Errorf("%s asked with Accept %q", r.URL.Path, r.Header.Get("Accept"))
		}
		io.WriteString(w, map[string]string{"/api": coreDiscovery, "/apis": groupDiscovery}[r.URL.Path])
	default:
		status(w, http.StatusNotFound, "NotFound", r.URL.Path+" not found")
	}
}

func status(w http.ResponseWriter, code int, reason, message string) {
	w.WriteHeader(code)
	json.NewEncoder(w).Encode(map[string]any{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "message": message, "code": code})
}

func serve(t *testing.T, handlers map[string]http.HandlerFunc) (*Client, *server) {
	t.Helper()
	s := &server{t: t, handlers: handlers}
	ts := httptest.NewTLSServer(s)
	t.Cleanup(ts.Close)
	client, err := New(Options{Server: ts.URL + "/", CA: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ts.Certificate().Raw}), Token: "abc.def"})
	if err != nil {
		t.Fatal(err)
	}
	return client, s
}

func text(code int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(code)
		io.WriteString(w, body)
	}
}

var pod = Object{"apiVersion": "v1", "kind": "Pod", "metadata": map[string]any{"name": "a", "namespace": "ns"}}

func TestVerbs(t *testing.T) {
	var seen []string
	note := func(code int, body string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			sent, _ := io.ReadAll(r.Body)
			seen = append(seen, strings.Join([]string{r.Method, r.URL.RequestURI(), r.Header.Get("Content-Type"), string(sent)}, " "))
			if r.Header.Get("Authorization") != "Bearer abc.def" {
				t.Errorf("%s %s: Authorization %q", r.Method, r.URL, r.Header.Get("Authorization"))
			}
			text(code, body)(w, r)
		}
	}
	answer := `{"apiVersion":"v1","kind":"Pod","metadata":{"name":"a","resourceVersion":"5"}}`
	const one = "/api/v1/namespaces/ns/pods/a"
	c, s := serve(t, map[string]http.HandlerFunc{
		"GET " + one:                          note(200, answer),
		"GET /api/v1/namespaces/ns/pods":      note(200, `{"kind":"PodList","items":[`+answer+`]}`),
		"POST /api/v1/namespaces/ns/pods":     note(201, answer),
		"PATCH " + one:                        note(200, answer),
		"DELETE " + one:                       note(200, `{"kind":"Status","status":"Success"}`),
		"POST " + one + "/eviction":           note(201, `{"kind":"Status","status":"Success"}`),
		"GET /api/v1/nodes":                   note(200, `{"kind":"NodeList","items":[]}`),
		"DELETE /api/v1/namespaces/ns/pods/b": func(w http.ResponseWriter, _ *http.Request) { status(w, 404, "NotFound", "pods \"b\" not found") },
	})
	ctx := t.Context()
	ref := Ref{APIVersion: "v1", Kind: "Pod", Namespace: "ns", Name: "a"}
	check := func(o Object, err error) {
		t.Helper()
		if err != nil || o.ResourceVersion() != "5" {
			t.Errorf("got %v, %v", o, err)
		}
	}
	check(c.Get(ctx, ref))
	list, err := c.List(ctx, Ref{APIVersion: "v1", Kind: "Pod", Namespace: "ns"}, Selection{Labels: "app=x", Fields: "spec.nodeName=n"})
	if err != nil || len(list.Items()) != 1 || list.Items()[0].Name() != "a" {
		t.Errorf("list: %v, %v", list, err)
	}
	check(c.Create(ctx, pod))
	check(c.Apply(ctx, pod))
	check(c.Merge(ctx, ref, Object{"metadata": map[string]any{"labels": nil}}))
	for _, err := range []error{
		c.Delete(ctx, ref),
		c.Delete(ctx, Ref{APIVersion: "v1", Kind: "Pod", Namespace: "ns", Name: "b"}), // already gone
		c.Evict(ctx, Object{"metadata": map[string]any{"namespace": "ns", "name": "a", "uid": "u1"}}),
	} {
		if err != nil {
			t.Error(err)
		}
	}
	if _, err := c.List(ctx, Ref{APIVersion: "v1", Kind: "Node"}, Selection{}); err != nil {
		t.Error(err)
	}
	body, _ := json.Marshal(pod)
	want := []string{
		"GET " + one + "  ",
		"GET /api/v1/namespaces/ns/pods?fieldSelector=spec.nodeName%3Dn&labelSelector=app%3Dx  ",
		"POST /api/v1/namespaces/ns/pods?fieldManager=garboard application/json " + string(body),
		"PATCH " + one + "?fieldManager=garboard&force=true application/apply-patch+yaml " + string(body),
		"PATCH " + one + `?fieldManager=garboard application/merge-patch+json {"metadata":{"labels":null}}`,
		"DELETE " + one + ` application/json {"apiVersion":"v1","kind":"DeleteOptions","propagationPolicy":"Background"}`,
		"POST " + one + `/eviction application/json {"apiVersion":"policy/v1","deleteOptions":{"preconditions":{"uid":"u1"}},"kind":"Eviction","metadata":{"name":"a","namespace":"ns"}}`,
		"GET /api/v1/nodes  ",
	}
	if diff := cmp.Diff(want, seen); diff != "" {
		t.Errorf("requests (-want +got):\n%s", diff)
	}
	if s.discovery != 2 {
		t.Errorf("discovery was asked for %d times, want /api and /apis once", s.discovery)
	}
}

// S-218: what exists is left as it is, and a creator who was quicker is no error.
func TestCreateIfMissing(t *testing.T) {
	const one, all = "/api/v1/namespaces/ns/pods/a", "/api/v1/namespaces/ns/pods"
	exists := func(w http.ResponseWriter, _ *http.Request) {
		status(w, 409, "AlreadyExists", `pods "a" already exists`)
	}
	refuse := func(w http.ResponseWriter, _ *http.Request) {
		status(w, 403, "Forbidden", `namespace is being deleted`)
	}
	for _, tt := range []struct {
		name     string
		handlers map[string]http.HandlerFunc
		created  bool
		check    func(error) bool
	}{
		{"there", map[string]http.HandlerFunc{"GET " + one: text(200, "{}")}, false, nil},
		{"missing", map[string]http.HandlerFunc{"POST " + all: text(201, "{}")}, true, nil},
		{"raced", map[string]http.HandlerFunc{"POST " + all: exists}, false, nil},
		{"refused", map[string]http.HandlerFunc{"POST " + all: refuse}, false, IsForbidden},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, _ := serve(t, tt.handlers)
			created, err := c.CreateIfMissing(t.Context(), pod)
			if created != tt.created || (tt.check == nil) != (err == nil) || tt.check != nil && !tt.check(err) {
				t.Errorf("created %v, error %v", created, err)
			}
		})
	}
}

// An object that names no namespace is in "default", if its kind lives in one.
func TestDefaultNamespace(t *testing.T) {
	t.Parallel()
	const pods = "/api/v1/namespaces/default/pods"
	c, _ := serve(t, map[string]http.HandlerFunc{
		"POST " + pods: text(201, "{}"), "GET " + pods + "/p": text(200, "{}"), "PATCH " + pods + "/p": text(200, "{}"), "POST /api/v1/nodes": text(201, "{}"),
		"GET /api/v1/pods": text(200, `{"items":[{}]}`),
	})
	of := func(kind string) Object {
		return Object{"apiVersion": "v1", "kind": kind, "metadata": map[string]any{"name": "p"}}
	}
	for what, do := range map[string]func() error{
		"create":  func() error { _, err := c.Create(t.Context(), of("Pod")); return err },
		"get":     func() error { _, err := c.Get(t.Context(), of("Pod").Ref()); return err },
		"preview": func() error { _, err := c.Preview(t.Context(), of("Pod")); return err },
		"a node":  func() error { _, err := c.Create(t.Context(), of("Node")); return err },
		"all pods": func() error {
			_, err := c.List(t.Context(), Ref{APIVersion: "v1", Kind: "Pod"}, Selection{})
			return err
		},
	} {
		if err := do(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	if missing, err := c.Missing(t.Context(), of("Pod")); missing || err != nil {
		t.Errorf("missing %v, %v", missing, err)
	}
}

// S-279, S-280, S-350: the texts by which people search.
func TestErrors(t *testing.T) {
	secret := Object{"apiVersion": "v1", "kind": "Secret", "metadata": map[string]any{"name": "bootstrap-token-q9pyzr", "namespace": "kube-system"}}
	starting, _ := serve(t, map[string]http.HandlerFunc{"GET /api": text(503, "")})
	kubelet, _ := serve(t, map[string]http.HandlerFunc{
		"GET /pods": text(500, "Authorization error (user=apiserver-kubelet-client, verb=get, resource=nodes, subresource=proxy)\n"),
	})
	known, _ := serve(t, map[string]http.HandlerFunc{
		"GET /api/v1/nodes/n1": func(w http.ResponseWriter, _ *http.Request) { status(w, 404, "NotFound", `nodes "n1" not found`) },
		"GET /unauthorized":    text(401, "Unauthorized"),
		"GET /teapot":          text(418, "short and stout"),
		"GET /garbage":         text(200, "<html>"),
	})
	ctx := t.Context()
	fail := func(_ any, err error) error { return err }
	for _, tt := range []struct {
		name string
		err  error
		want string
		is   func(error) bool
	}{
		{"apiserver starts", fail(starting.Create(ctx, secret)), `error creating mapping for object /v1/Secret/bootstrap-token-q9pyzr: an error on the server ("") has prevented the request from succeeding`, nil},
		{"kubelet has no API yet", fail(kubelet.Raw(ctx, "/pods")), `an error on the server ("Authorization error (user=apiserver-kubelet-client, verb=get, resource=nodes, subresource=proxy)") has prevented the request from succeeding`, nil},
		{"not found", fail(known.Get(ctx, Ref{APIVersion: "v1", Kind: "Node", Name: "n1"})), `get /v1/Node/n1: nodes "n1" not found`, IsNotFound},
		{"unknown kind", fail(known.Get(ctx, Ref{APIVersion: "x.io/v1", Kind: "X", Name: "n1"})), `error creating mapping for object x.io/v1/X/n1: no matches for kind "X" in version "x.io/v1"`, IsNotFound},
		{"unauthorized", fail(known.Raw(ctx, "/unauthorized")), `the server has asked for the client to provide credentials`, func(err error) bool { return hasCode(err, 401) }},
		{"other", fail(known.Raw(ctx, "/teapot")), `the server answered 418 I'm a teapot ("short and stout")`, nil},
		{"not JSON", fail(known.Raw(ctx, "/garbage")), `GET /garbage: decode answer: invalid character '<' looking for beginning of value`, nil},
	} {
		if tt.err == nil || tt.err.Error() != tt.want || tt.is != nil && !tt.is(tt.err) {
			t.Errorf("%s:\n got %v\nwant %s", tt.name, tt.err, tt.want)
		}
	}
}

func TestWatch(t *testing.T) {
	lines := `{"type":"ADDED","object":{"metadata":{"name":"a","resourceVersion":"7"}}}
{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"9"}}}
`
	var query string
	c, _ := serve(t, map[string]http.HandlerFunc{
		"GET /api/v1/nodes": func(w http.ResponseWriter, r *http.Request) { query = r.URL.RawQuery; io.WriteString(w, lines) },
		"GET /api/v1/pods":  text(200, lines+`{"type":"ERROR","object":{"kind":"Status","reason":"Expired","message":"too old resource version","code":410}}`),
	})
	nodes := Ref{APIVersion: "v1", Kind: "Node"}
	var seen []string
	each := func(e Event) error {
		seen = append(seen, string(e.Type)+" "+e.Object.Name()+" "+e.Object.ResourceVersion())
		return nil
	}
	if err := c.Watch(t.Context(), nodes, Selection{}, "5", 1500*time.Millisecond, each); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff([]string{"ADDED a 7", "BOOKMARK  9"}, seen); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	if want := "allowWatchBookmarks=true&resourceVersion=5&timeoutSeconds=2&watch=true"; query != want {
		t.Errorf("query %s, want %s", query, want)
	}
	if err := c.Watch(t.Context(), Ref{APIVersion: "v1", Kind: "Pod"}, Selection{}, "1", time.Second, func(Event) error { return nil }); !IsGone(err) {
		t.Errorf("expired watch: %v", err)
	}
	enough := errors.New("enough")
	if err := c.Watch(t.Context(), nodes, Selection{}, "5", time.Second, func(Event) error { return enough }); !errors.Is(err, enough) {
		t.Errorf("watch that its caller ends: %v", err)
	}
}

// A server that hangs is left when the context ends.
// A question whose connection breaks is asked again, and a change isn't.
func TestBrokenConnections(t *testing.T) {
	asked := map[string]int{}
	breaks := 2
	handler := func(w http.ResponseWriter, r *http.Request) {
		if asked[r.Method]++; asked[r.Method] <= breaks {
			panic(http.ErrAbortHandler)
		}
		_, _ = w.Write([]byte("{}"))
	}
	c, _ := serve(t, map[string]http.HandlerFunc{"GET /version": handler, "PUT /version": handler})
	read := func(method string) error {
		_, err := c.read(t.Context(), request{method: method, path: "/version"})
		return err
	}
	if err := read(http.MethodGet); err != nil || asked[http.MethodGet] != asks {
		t.Errorf("asked %d times: %v", asked[http.MethodGet], err)
	}
	if err := read(http.MethodPut); err == nil || asked[http.MethodPut] != 1 {
		t.Errorf("changed %d times: %v", asked[http.MethodPut], err)
	}
	breaks = 100
	if err := read(http.MethodGet); err == nil || asked[http.MethodGet] != 2*asks {
		t.Errorf("asked %d times: %v", asked[http.MethodGet], err)
	}
}

func TestRequestEndsWithContext(t *testing.T) {
	hang := make(chan struct{})
	c, _ := serve(t, map[string]http.HandlerFunc{"GET /readyz": func(http.ResponseWriter, *http.Request) { <-hang }})
	defer close(hang)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := c.Ready(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
}

func TestDecideCSR(t *testing.T) {
	const path = "/apis/certificates.k8s.io/v1/certificatesigningrequests/x"
	var sent Object
	c, _ := serve(t, map[string]http.HandlerFunc{
		"GET " + path: text(200, `{"apiVersion":"certificates.k8s.io/v1","kind":"CertificateSigningRequest","metadata":{"name":"x"}}`),
		"PUT " + path + "/approval": func(w http.ResponseWriter, r *http.Request) {
			json.NewDecoder(r.Body).Decode(&sent)
			w.Write([]byte("{}"))
		},
		"GET " + path + "y": text(200, `{"status":{"conditions":[{"type":"Approved","status":"True"}]}}`),
	})
	if err := c.DecideCSR(t.Context(), "x", Denied, "", "because"); err != nil || !sent.Condition(Denied) || sent.Condition(Approved) {
		t.Errorf("sent %v, error %v", sent, err)
	}
	if err := c.DecideCSR(t.Context(), "xy", Denied, "", "because"); err != nil { // no second PUT
		t.Error(err)
	}
}

// The kubelet replaces its certificate while we are connected by the old one.
func TestClientCertificateFromFile(t *testing.T) {
	ca, err := pki.NewKubernetesCA(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "kubelet-client-current.pem")
	write := func(name string) {
		crt, key, err := ca.Issue(pki.Leaf{CN: name, Client: true, Now: time.Now()})
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, append(crt, key...), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var user string
	ts := httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { user = r.TLS.PeerCertificates[0].Subject.CommonName }))
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca.Cert)
	ts.TLS = &tls.Config{ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool}
	ts.StartTLS()
	defer ts.Close()
	client, err := New(Options{Server: ts.URL, CA: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ts.Certificate().Raw}), CertFile: file})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"first", "second"} {
		write(name)
		client.Close()
		if err := client.Ready(t.Context()); err != nil || user != name {
			t.Errorf("as %q: %v", user, err)
		}
	}
}

func TestNewRefuses(t *testing.T) {
	ca, err := pki.NewKubernetesCA(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	for name, o := range map[string]Options{
		"plain http":  {Server: "http://127.0.0.1", CA: ca.Cert},
		"no host":     {Server: "https://", CA: ca.Cert},
		"no CA":       {Server: "https://127.0.0.1"},
		"broken pair": {Server: "https://127.0.0.1", CA: ca.Cert, Cert: ca.Cert, Key: []byte("x")},
	} {
		if _, err := New(o); err == nil {
			t.Errorf("%s is accepted", name)
		}
	}
}

func TestObject(t *testing.T) {
	o := Object{"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": map[string]any{"name": "psp:privileged"}}
	if got := o.String(); got != "rbac.authorization.k8s.io/v1/ClusterRole/psp:privileged" { // S-281
		t.Error(got)
	}
	if o.At("metadata", "name", "deeper") != nil || o.At("no", "where") != nil || o.Items() == nil || len(o.Items()) != 0 {
		t.Error("missing paths aren't nil")
	}
}

func TestSecretsAreHiddenInYAML(t *testing.T) {
	secret := Object{"kind": "Secret", "metadata": map[string]any{"annotations": map[string]any{"last": "hush"}}, "stringData": map[string]any{"token": "hush"}, "data": map[string]any{"k": "aHVzaA=="}}
	text, err := yaml.Marshal([]Object{secret})
	if err != nil || strings.Contains(string(text), "hush") || strings.Contains(string(text), "aHVzaA") || !strings.Contains(string(text), "token: (secret)") {
		t.Errorf("%s %v", text, err)
	}
	if data, _ := json.Marshal(secret); !strings.Contains(string(data), "hush") {
		t.Errorf("JSON must be complete: %s", data)
	}
}
