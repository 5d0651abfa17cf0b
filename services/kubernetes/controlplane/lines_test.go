package controlplane

import (
	"bytes"
	"context"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/roster"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// logged are the lines of the controllers' log, without their times.
func logged(l *logs.Logs) (lines []string) {
	for _, line := range l.Tail(controllerLog, 0) {
		_, text, _ := strings.Cut(line, "  ")
		lines = append(lines, text)
	}
	return lines
}

// The exact log lines of a control plane's controllers.
func TestS277S278BootstrapStatusAndStaticPodsAreLogged(t *testing.T) {
	f := start(t, testConfig(t))
	f.etcd(true)
	for _, line := range []string{
		"v1alpha1.BootstrapStatusController: bootkube initialized status not found",
		fmt.Sprintf("k8s.KubeletStaticPodController: writing static pod %q", f.file(apiServer)),
	} {
		eventually.That(t, patience, "a line of the log", func() error {
			if all := logged(f.logs); !slices.Contains(all, line) {
				return fmt.Errorf("the log lacks %q:\n%s", line, strings.Join(all, "\n"))
			}
			return nil
		})
	}
}

func TestS281CreatedObjectsAreLogged(t *testing.T) {
	t.Parallel()
	const roles = "/apis/rbac.authorization.k8s.io/v1/clusterroles"
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/api":
			fmt.Fprint(w, `{"items":[]}`)
		case r.URL.Path == "/apis":
			fmt.Fprint(w, `{"items":[{"metadata":{"name":"rbac.authorization.k8s.io"},"versions":[{"version":"v1","resources":[{"resource":"clusterroles","scope":"Cluster","responseKind":{"kind":"ClusterRole"}}]}]}]}`)
		case r.Method == http.MethodPost && r.URL.Path == roles, r.URL.Path == roles+"/kept":
			fmt.Fprint(w, `{}`)
		default:
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(server.Close)
	client, err := kubeclient.New(kubeclient.Options{Server: server.URL, CA: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})})
	put(t, err)
	role := func(name string) kubeclient.Object {
		return kubeclient.Object{"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": object{"name": name}}
	}
	l := logs.New(nil)
	a := &application{client: client, log: l.Logger(controllerLog)}
	put(t, a.look(t.Context(), []resource.Object[Manifest]{manifestOf("01-own", role("psp:privileged"), role("kept"))}))
	put(t, a.make(t.Context(), nil))
	if diff := cmp.Diff([]string{"created rbac.authorization.k8s.io/v1/ClusterRole/psp:privileged"}, logged(l)); diff != "" {
		t.Error(diff)
	}
}

// The console shows the node's label as a task, and each error until it is done.
func TestS255LabelTaskIsOnTheConsole(t *testing.T) {
	t.Parallel()
	patches := 0
	store := served(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/readyz":
		case r.URL.Path == "/api":
			fmt.Fprint(w, `{"items":[{"metadata":{},"versions":[{"version":"v1","resources":[{"resource":"nodes","scope":"Cluster","responseKind":{"kind":"Node"}}]}]}]}`)
		case r.URL.Path == "/apis":
			fmt.Fprint(w, `{"items":[]}`)
		case r.Method == http.MethodPatch:
			if patches++; patches == 1 {
				http.Error(w, "quota", http.StatusForbidden)
				return
			}
			fallthrough
		case strings.HasPrefix(r.URL.Path, "/api/v1/nodes"):
			fmt.Fprint(w, `{"apiVersion":"v1","kind":"Node","metadata":{"name":"n1","resourceVersion":"1"}}`)
		default:
			http.NotFound(w, r)
		}
	}))
	console := &bytes.Buffer{}
	l := logs.New(console)
	c := controllerOf(t, Options{Logs: l, Roster: noNodes}, "k8s.NodeLabelController")
	v := view{store.As("test"), l.Logger(controllerLog)}
	if _, err := c.Reconcile(t.Context(), v); err == nil {
		t.Error("the API server refused, and it is no error")
	}
	_, err := c.Reconcile(t.Context(), v)
	put(t, err)
	want, err := os.ReadFile("../../../tools/gbctl/testdata/console.log") // which gbctl's tests show
	put(t, err)
	if diff := cmp.Diff(string(want), console.String()); diff != "" {
		t.Error(diff)
	}
}

func noNodes(context.Context) (roster.Facts, error) { return roster.Facts{}, nil }

// A Node that another machine has registered gets nothing of this control plane's, which waits
// for the name; its own one does.
func TestLabelsAreForTheOwnNode(t *testing.T) {
	t.Parallel()
	patches := 0
	store := served(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/readyz":
		case r.URL.Path == "/api":
			fmt.Fprint(w, `{"items":[{"metadata":{},"versions":[{"version":"v1","resources":[{"resource":"nodes","scope":"Cluster","responseKind":{"kind":"Node"}}]}]}]}`)
		case r.URL.Path == "/apis":
			fmt.Fprint(w, `{"items":[]}`)
		case r.Method == http.MethodPatch:
			patches++
			fallthrough
		default:
			fmt.Fprint(w, `{"apiVersion":"v1","kind":"Node","metadata":{"name":"n1","resourceVersion":"1"},"status":{"nodeInfo":{"machineID":"m1"}}}`)
		}
	}))
	file := filepath.Join(t.TempDir(), "machine-id")
	l := logs.New(io.Discard)
	for i, own := range []string{"m2\n", "m1\n"} {
		put(t, os.WriteFile(file, []byte(own), 0o600))
		c := NodeLabelController{printf: l.Printf, machineID: file, roster: noNodes}
		_, err := c.Reconcile(t.Context(), view{store.As("test"), l.Logger(controllerLog)})
		put(t, err)
		if patches != i {
			t.Errorf("as machine %q: %d patches", own, patches)
		}
	}
}
