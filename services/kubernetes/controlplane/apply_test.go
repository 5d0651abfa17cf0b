package controlplane

import (
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
)

// fakeAPI keeps what is made, and has a few kinds. A Create of an object called "forbidden" fails. A kind that is
// defined is there after the second look at its definition.
type fakeAPI struct {
	mu      sync.Mutex
	objects map[string]kubeclient.Object // by path
	created []string                     // names, in order
	looks   int                          // at definitions
	ready   bool                         // EndpointSlices have a ready endpoint
}

// fakeKinds are group and version, kind, resource, and whether it lives in a namespace.
var fakeKinds = [][4]string{
	{"v1", "ConfigMap", "configmaps", "Namespaced"}, {"v1", "Namespace", "namespaces", "Cluster"}, {"v1", "Secret", "secrets", "Namespaced"},
	{"v1", "Service", "services", "Namespaced"}, {"apps/v1", "Deployment", "deployments", "Namespaced"}, {"discovery.k8s.io/v1", "EndpointSlice", "endpointslices", "Namespaced"},
	{"apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions", "Cluster"},
	{"admissionregistration.k8s.io/v1", "ValidatingWebhookConfiguration", "validatingwebhookconfigurations", "Cluster"},
	{"admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicyBinding", "validatingadmissionpolicybindings", "Cluster"},
	{"apiregistration.k8s.io/v1", "APIService", "apiservices", "Cluster"},
}

func (f *fakeAPI) kinds(core bool) string {
	all := fakeKinds
	if f.looks > 1 {
		all = append(slices.Clip(all), [4]string{"policies.example.org/v1", "Rule", "rules", "Cluster"})
	}
	var items []string
	for _, k := range all {
		group, version, grouped := strings.Cut(k[0], "/")
		if !grouped {
			group, version = "", group
		}
		if core != grouped {
			items = append(items, fmt.Sprintf(`{"metadata":{"name":%q},"versions":[{"version":%q,"resources":[{"resource":%q,"scope":%q,"responseKind":{"kind":%q}}]}]}`, group, version, k[2], k[3], k[1]))
		}
	}
	return `{"items":[` + strings.Join(items, ",") + `]}`
}

func (f *fakeAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	o, there := f.objects[r.URL.Path]
	switch {
	case r.URL.Path == "/api" || r.URL.Path == "/apis":
		fmt.Fprint(w, f.kinds(r.URL.Path == "/api"))
	case strings.HasSuffix(r.URL.Path, "/endpointslices"):
		fmt.Fprintf(w, `{"items":[{"endpoints":[{"conditions":{"ready":false}},{"conditions":{"ready":%v}}]}]}`, f.ready)
	case r.Method == http.MethodPost:
		if err := json.NewDecoder(r.Body).Decode(&o); err != nil || o.Name() == "forbidden" {
			http.Error(w, "quota", http.StatusForbidden)
			return
		}
		f.objects[r.URL.Path+"/"+o.Name()] = o
		f.created = append(f.created, o.Name())
		fmt.Fprint(w, `{}`)
	case !there:
		http.NotFound(w, r)
	case o.Kind() == "CustomResourceDefinition":
		f.looks++
		fmt.Fprintf(w, `{"status":{"conditions":[{"type":"Established","status":"%s"}]}}`, map[bool]string{true: "True", false: "False"}[f.looks > 1])
	default:
		if err := json.NewEncoder(w).Encode(o); err != nil {
			panic(err) // the map has what tests put there
		}
	}
}

// delete removes an object, as an administrator does.
func (f *fakeAPI) delete(t *testing.T, path string) {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.objects[path] == nil {
		t.Errorf("there is no %s", path)
	}
	delete(f.objects, path)
}

func (f *fakeAPI) client(t *testing.T) *kubeclient.Client {
	t.Helper()
	server := httptest.NewTLSServer(f)
	t.Cleanup(server.Close)
	client, err := kubeclient.New(kubeclient.Options{Server: server.URL, CA: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})})
	put(t, err)
	return client
}

func configMap(name string) kubeclient.Object {
	return kubeclient.Object{"apiVersion": "v1", "kind": "ConfigMap", "metadata": object{"name": name, "namespace": "default"}}
}

// manifestOf is a manifest with an ID, which is a configuration's if it has its prefix.
func manifestOf(id string, objects ...kubeclient.Object) resource.Object[Manifest] {
	return resource.Object[Manifest]{Meta: resource.Meta{Namespace: namespace, ID: id}, Spec: Manifest{Objects: objects}}
}

// applied is one attempt, and its results by manifest. made is what etcd remembers.
func applied(t *testing.T, client *kubeclient.Client, made map[string]bool, manifests ...resource.Object[Manifest]) (results map[string]string) {
	t.Helper()
	a := &application{client: client, log: testLog(t), made: made}
	put(t, a.look(t.Context(), manifests))
	put(t, a.make(t.Context(), func(key string) error {
		if !strings.HasPrefix(key, madeKey) {
			t.Errorf("recorded: %s", key)
		}
		return nil
	}))
	results = map[string]string{}
	for _, m := range manifests {
		results[m.ID] = a.result(m.Meta).String()
	}
	return results
}

// S-218: after one object that can't be made, or whose kind isn't known yet, the others are still made.
func TestCreateGoesOn(t *testing.T) {
	t.Parallel()
	f := &fakeAPI{objects: map[string]kubeclient.Object{"/api/v1/namespaces/default/configmaps/kept": configMap("kept")}}
	custom := kubeclient.Object{"apiVersion": "x.example.org/v1", "kind": "X", "metadata": object{"name": "x"}}
	made := map[string]bool{}
	results := applied(t, f.client(t), made,
		manifestOf("05-own", configMap("first"), configMap("kept")), manifestOf("20-bad", configMap("forbidden"), custom, configMap("middle")), manifestOf("20-good", configMap("last")))
	if diff := cmp.Diff([]string{"first", "middle", "last"}, f.created); diff != "" {
		t.Errorf("created (-want +got):\n%s", diff)
	}
	if results["05-own"] != "made" || results["20-good"] != "made" || !strings.Contains(results["20-bad"], `create /v1/ConfigMap/forbidden: the server answered 403 Forbidden ("quota")`) ||
		!strings.Contains(results["20-bad"], "x.example.org/v1/X/x: no matches for kind") || strings.Contains(results["20-bad"], "middle") {
		t.Errorf("results %q", results)
	}
	if len(made) != 2 {
		t.Errorf("etcd remembers %v: the node's own objects, or those that aren't there", made)
	}
}

// The objects of an admission webhook are made in an order in which they work, and the webhook once it has an answer to
// give.
func TestWebhooksAreMadeLast(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("testdata/webhook.yaml")
	put(t, err)
	m := readManifest(text)
	if len(m.Objects) != 7 || len(m.Problems) > 0 {
		t.Fatalf("%d objects, problems %q", len(m.Objects), m.Problems)
	}
	service := object{"name": "metrics", "namespace": "metrics"}
	extra := []kubeclient.Object{
		{"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": object{"name": "v1.metrics"}, "spec": object{"service": service}},
		{"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding", "metadata": object{"name": "binding"}},
		{"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": object{"name": "v1.local"}, "spec": object{}},
		{"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": object{"name": "v1.elsewhere"}, "spec": object{"service": object{"name": "elsewhere", "namespace": "metrics"}}},
	}
	f := &fakeAPI{objects: map[string]kubeclient.Object{"/api/v1/namespaces/metrics/services/elsewhere": {
		"apiVersion": "v1", "kind": "Service", "metadata": object{"name": "elsewhere", "namespace": "metrics"}, "spec": object{"type": "ExternalName"},
	}}}
	client, made := f.client(t), map[string]bool{}
	all := []resource.Object[Manifest]{manifestOf("20-policy", slices.Concat(extra, m.Objects)...), manifestOf("20-zz", configMap("theirs")), manifestOf("21-own", configMap("own"))}
	results := applied(t, client, made, all...)
	if diff := cmp.Diff([]string{"own", "policy-system", "rules.policies.example.org", "only-known-registries", "policy-tls", "policy", "policy", "theirs", "binding", "v1.local", "v1.elsewhere"}, f.created); diff != "" {
		t.Errorf("before its pods run (-want +got):\n%s", diff)
	}
	want := "admissionregistration.k8s.io/v1/ValidatingWebhookConfiguration/policy waits for a ready pod of Service policy-system/policy: kubectl -n policy-system get pods"
	if got := results["20-policy"]; !strings.Contains(got, want) || !strings.Contains(got, "APIService/v1.metrics waits for a ready pod of Service metrics/metrics") {
		t.Errorf("result %q, want %q", got, want)
	}
	f.ready, f.created = true, nil
	results = applied(t, client, made, all...)
	if diff := cmp.Diff([]string{"policy", "v1.metrics"}, f.created); diff != "" || results["20-policy"] != "made" {
		t.Errorf("once they run: %s (-want +got):\n%s", results["20-policy"], diff)
	}
}

// What an administrator has deleted isn't made again, unless its manifest changes. The node's own objects are.
func TestDeletedObjectsStayDeleted(t *testing.T) {
	t.Parallel()
	f := &fakeAPI{objects: map[string]kubeclient.Object{"/api/v1/namespaces/default/configmaps/older": configMap("older")}, ready: true}
	webhook := kubeclient.Object{"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration", "metadata": object{"name": "policy"}}
	client, made := f.client(t), map[string]bool{}
	all := []resource.Object[Manifest]{manifestOf("05-own", configMap("own")), manifestOf("20-mine", webhook, configMap("older"), configMap("kept"))}
	applied(t, client, made, all...)
	for _, path := range []string{
		"/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/policy", "/api/v1/namespaces/default/configmaps/older", "/api/v1/namespaces/default/configmaps/own",
	} {
		f.delete(t, path)
	}
	f.created = nil
	results := applied(t, client, made, all...)
	if diff := cmp.Diff([]string{"own"}, f.created); diff != "" {
		t.Errorf("made again (-want +got):\n%s", diff)
	}
	want := "/v1/ConfigMap/older: deleted by an administrator, and not made again; admissionregistration.k8s.io/v1/ValidatingWebhookConfiguration/policy: deleted by an administrator, and not made again"
	if results["20-mine"] != want || results["05-own"] != "made" {
		t.Errorf("results %q", results)
	}

	changed := configMap("older")
	changed["data"] = object{"word": "new"}
	all[1] = manifestOf("20-mine", webhook, changed, configMap("kept"))
	f.created = nil
	results = applied(t, client, made, all...)
	if diff := cmp.Diff([]string{"older"}, f.created); diff != "" || strings.Contains(results["20-mine"], "older") {
		t.Errorf("changed: %s (-want +got):\n%s", results["20-mine"], diff)
	}
	f.delete(t, "/api/v1/namespaces/default/configmaps/older")
	former := manifestOf("20-mine", configMap("older")) // of another control plane, which doesn't have the change yet
	for _, m := range []resource.Object[Manifest]{all[1], former} {
		if results = applied(t, client, made, all[0], m); !strings.Contains(results["20-mine"], "/v1/ConfigMap/older: deleted by an administrator") {
			t.Errorf("deleted after the change: %q", results)
		}
	}
}

// Nothing is done without a need, and an API server that doesn't answer isn't asked for each object.
func TestLooksAreCheap(t *testing.T) {
	t.Parallel()
	f := &fakeAPI{objects: map[string]kubeclient.Object{}}
	client, made := f.client(t), map[string]bool{}
	all := []resource.Object[Manifest]{manifestOf("05-own", configMap("own")), manifestOf("20-mine", configMap("a"), configMap("b"))}
	applied(t, client, made, all...)
	f.delete(t, "/api/v1/namespaces/default/configmaps/a")
	a := &application{client: client, log: testLog(t), made: made}
	put(t, a.look(t.Context(), all))
	if slices.ContainsFunc(a.parts, a.open) {
		t.Error("there is something to do")
	}
	silent, err := kubeclient.New(kubeclient.Options{Server: "https://k", Transport: refusing{}})
	put(t, err)
	a = &application{client: silent, log: testLog(t)}
	if err := a.look(t.Context(), all); !errors.Is(err, errRefused) || len(a.parts) > 0 {
		t.Errorf("%v, %d objects", err, len(a.parts))
	}
}

type refusing struct{}

var errRefused = errors.New("refused")

func (refusing) RoundTrip(*http.Request) (*http.Response, error) { return nil, errRefused }

// The digest of a Secret in etcd says nothing of its content.
func TestRecordsHoldNoSecret(t *testing.T) {
	t.Parallel()
	digest := func(o kubeclient.Object) string {
		f := &fakeAPI{objects: map[string]kubeclient.Object{}}
		made := map[string]bool{}
		applied(t, f.client(t), made, manifestOf("20-mine", o))
		return strings.Join(slices.Collect(maps.Keys(made)), " ")
	}
	secret := func(word string) kubeclient.Object {
		return kubeclient.Object{"apiVersion": "v1", "kind": "Secret", "metadata": object{"name": "a", "namespace": "b"}, "stringData": object{"k": word}}
	}
	if a, b := digest(secret("one")), digest(secret("two")); a == "" || a != b {
		t.Errorf("%s and %s", a, b)
	}
}
