package controlplane

import (
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
)

// fakeAPI has ConfigMaps. A Create of one called "forbidden" fails; "kept" exists.
func fakeAPI(t *testing.T) (client *kubeclient.Client, created *[]string) {
	t.Helper()
	created = new([]string)
	const all = "/api/v1/namespaces/default/configmaps"
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/api":
			fmt.Fprint(w, `{"items":[{"metadata":{},"versions":[{"version":"v1","resources":[{"resource":"configmaps","scope":"Namespaced","responseKind":{"kind":"ConfigMap"}}]}]}]}`)
		case r.URL.Path == "/apis":
			fmt.Fprint(w, `{"items":[]}`)
		case r.Method == http.MethodGet && r.URL.Path == all+"/kept":
			fmt.Fprint(w, `{}`)
		case r.Method == http.MethodPost && r.URL.Path == all:
			var o kubeclient.Object
			if err := json.NewDecoder(r.Body).Decode(&o); err != nil || o.Name() == "forbidden" {
				http.Error(w, "quota", http.StatusForbidden)
				return
			}
			*created = append(*created, o.Name())
			fmt.Fprint(w, `{}`)
		default:
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(server.Close)
	client, err := kubeclient.New(kubeclient.Options{Server: server.URL, CA: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})})
	put(t, err)
	return client, created
}

func configMap(name string) kubeclient.Object {
	return kubeclient.Object{"apiVersion": "v1", "kind": "ConfigMap", "metadata": object{"name": name, "namespace": "default"}}
}

// S-218: after one object that can't be made, or whose kind isn't known yet,
// the others are still made; it is tried again.
func TestCreateGoesOn(t *testing.T) {
	client, created := fakeAPI(t)
	custom := kubeclient.Object{"apiVersion": "x.example.org/v1", "kind": "X", "metadata": object{"name": "x"}}
	missing, err := missingObjects(t.Context(), client, []kubeclient.Object{configMap("first"), configMap("kept"), configMap("forbidden"), custom, configMap("last")})
	put(t, err)
	var names []string
	for _, o := range missing {
		names = append(names, o.Name())
	}
	if diff := cmp.Diff([]string{"first", "forbidden", "x", "last"}, names); diff != "" {
		t.Errorf("missing (-want +got):\n%s", diff)
	}
	err = create(t.Context(), view{resource.NewStore().As("test"), testLog(t)}, client, missing)
	if diff := cmp.Diff([]string{"first", "last"}, *created); diff != "" {
		t.Errorf("created (-want +got):\n%s", diff)
	}
	for _, part := range []string{"/v1/ConfigMap/forbidden", "x.example.org/v1/X/x"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("error %v doesn't name %s", err, part)
		}
	}
}
