package rotateca

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"time"

	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/operations/rollout"
)

// RoundTrip is the API server.
func (r *rig) RoundTrip(q *http.Request) (*http.Response, error) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	w := httptest.NewRecorder()
	r.answer(w, q)
	return w.Result(), nil
}

const discovery = `{"kind":"APIGroupDiscoveryList","items":[{"metadata":{},"versions":[{"version":"v1","resources":[
	{"resource":"configmaps","scope":"Namespaced","responseKind":{"kind":"ConfigMap"}},{"resource":"secrets","scope":"Namespaced","responseKind":{"kind":"Secret"}},{"resource":"nodes","scope":"Cluster","responseKind":{"kind":"Node"}}]}]}]}`

func (r *rig) answer(w http.ResponseWriter, q *http.Request) {
	switch {
	case q.URL.Path == "/api" || q.URL.Path == "/apis":
		io.WriteString(w, discovery)
	case q.URL.Path == "/api/v1/nodes":
		items := []object{}
		for _, m := range r.nodes {
			labels := object{}
			if m.name[0] == 'n' {
				labels[rollout.ControlPlaneLabel] = ""
			}
			items = append(items, object{
				"metadata": object{"name": m.name, "labels": labels},
				"status":   object{"addresses": []object{{"type": "InternalIP", "address": m.address}}, "conditions": []object{{"type": "Ready", "status": "True"}}},
			})
		}
		json.NewEncoder(w).Encode(object{"items": items})
	case strings.HasSuffix(q.URL.Path, "/configmaps/"+authentication.Name):
		if q.Method == http.MethodPatch {
			var patch object
			json.NewDecoder(q.Body).Decode(&patch)
			maps.Copy(r.authentication, patch["data"].(object))
			r.Note("authentication")
		}
		json.NewEncoder(w).Encode(object{"data": r.authentication})
	case q.URL.Path == "/api/v1/secrets":
		if !strings.Contains(q.Header.Get("Accept"), "PartialObjectMetadataList") {
			r.T.Error("it asks for the content of all Secrets at once")
		}
		items := []object{{"metadata": object{"name": "deleted meanwhile", "namespace": "default"}}}
		for name := range r.sealed {
			items = append(items, object{"metadata": object{"name": name, "namespace": "default"}})
		}
		json.NewEncoder(w).Encode(object{"items": items})
	case strings.Contains(q.URL.Path, "/namespaces/kube-system/secrets/bootstrap-token-"):
		var patch object
		json.NewDecoder(q.Body).Decode(&patch)
		if end, err := time.Parse(time.RFC3339, fmt.Sprint(kubeclient.Object(patch).At("stringData", "expiration"))); err != nil || end.After(time.Now()) {
			r.T.Errorf("the token gets %v", patch)
		}
		if _, id, _ := strings.Cut(q.URL.Path, "bootstrap-token-"); r.ended != id {
			r.ended = id
			r.Note("token ended")
		}
		io.WriteString(w, "{}")
	case strings.Contains(q.URL.Path, "/namespaces/default/secrets/"):
		name := q.URL.Path[strings.LastIndexByte(q.URL.Path, '/')+1:]
		if _, there := r.sealed[name]; !there {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		r.sealed[name] = r.nodes[1].running().Cluster.Secret
		io.WriteString(w, "{}")
	case strings.HasSuffix(q.URL.Path, "/configmaps"):
		trusted := string(r.nodes[1].running().Cluster.TrustedCAs())
		json.NewEncoder(w).Encode(object{"items": []object{{"metadata": object{"name": rootCA, "namespace": "default"}, "data": object{"ca.crt": trusted}}}})
	default:
		w.WriteHeader(http.StatusNotFound)
	}
}
