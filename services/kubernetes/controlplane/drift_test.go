package controlplane

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
)

// driftServer has every ConfigMap as in the manifest, and may have another kind.
type driftServer struct {
	custom bool // it has x.example.org/v1 X
	asked  int  // requests for the kinds that it has
}

func (s *driftServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	const kinds = `{"items":[{"metadata":{"name":%q},"versions":[{"version":"v1","resources":[{"resource":%q,"scope":"Namespaced","responseKind":{"kind":%q}}]}]}]}`
	_, name, found := strings.Cut(r.URL.Path, "/configmaps/")
	switch {
	case r.URL.Path == "/readyz":
	case r.URL.Path == "/api":
		s.asked++
		fmt.Fprintf(w, kinds, "", "configmaps", "ConfigMap")
	case r.URL.Path == "/apis" && s.custom:
		fmt.Fprintf(w, kinds, "x.example.org", "xs", "X")
	case r.URL.Path == "/apis":
		fmt.Fprint(w, `{"items":[]}`)
	case found:
		fmt.Fprintf(w, `{"metadata":{"name":%q}}`, name)
	case strings.HasSuffix(r.URL.Path, "/xs/custom"):
		fmt.Fprint(w, `{"metadata":{"name":"custom"}}`)
	default:
		http.NotFound(w, r)
	}
}

// The list of kinds is requested once, and again for an unknown kind.
func TestDriftKeepsTheKinds(t *testing.T) {
	t.Parallel()
	s := &driftServer{}
	store := served(t, s)
	as := store.As("test")
	put(t, etcd.Statuses.Put(as, etcd.StatusID, etcd.StatusSpec{Ready: true}))
	put(t, BootstrapStatuses.Put(as, "control-plane", BootstrapStatus{}))
	put(t, builtin.Put(as, "known", Manifest{Objects: []kubeclient.Object{configMap("one")}}))
	c := &ManifestDriftController{}
	look := func(want string, asked int) {
		t.Helper()
		_, err := c.Reconcile(t.Context(), view{as, testLog(t)})
		put(t, err)
		var all []string
		for _, d := range ManifestDrifts.List(store) {
			all = append(all, d.ID+" "+d.Spec.String())
		}
		if got := strings.Join(all, "; "); got != want || s.asked != asked {
			t.Errorf("drift %q, want %q; asked for the kinds %d times in all, want %d", got, want, s.asked, asked)
		}
	}
	look("known none", 1)
	look("known none", 1)
	custom := kubeclient.Object{"apiVersion": "x.example.org/v1", "kind": "X", "metadata": object{"name": "custom", "namespace": "default"}}
	put(t, builtin.Put(as, "new", Manifest{Objects: []kubeclient.Object{custom}}))
	look("known none; new x.example.org/v1/X/custom: missing", 2)
	s.custom = true
	look("known none; new none", 3)
	look("known none; new none", 3)
}
