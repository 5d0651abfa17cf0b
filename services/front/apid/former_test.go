package apid

import (
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/resource"
	server "github.com/garboard-os/garboard/services/front/api"
	"github.com/garboard-os/garboard/services/system/configuration"
)

// moved are the methods that the former release has as other procedures.
func moved(t *testing.T) (all []api.Method) {
	t.Helper()
	for _, m := range api.Methods() {
		if m.Former != "" {
			all = append(all, m)
		}
	}
	if len(all) == 0 {
		t.Skip("all procedures are those of the former release: remove package api's former.go, and this file")
	}
	return all
}

// A client of the former release calls what it knows, over each protocol: the role is asked for, and PID 1 hears of it,
// as of the procedure of this release.
func TestFormerProceduresAreAnswered(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	b := newBench(t, normal(t, ca), everything())
	for _, role := range api.Roles() {
		cert := shown(t, ca, pki.Leaf{CN: "bob", Orgs: []string{string(role)}})
		for _, p := range protocols {
			c := b.client(t, cert, p.http2)
			for _, m := range moved(t) {
				former := m
				former.Procedure = m.Former
				err := ask(t.Context(), c, b.url(""), former, p.options...)
				seen := b.backend.take()
				if api.Allowed(m, []string{string(role)}) {
					if err != nil || len(seen) != 1 || seen[0].URL.Path != m.Procedure {
						t.Errorf("%s as %s, %s: %v; PID 1 was asked %d times", m.Former, role, p.name, err, len(seen))
					}
					continue
				}
				told, _ := b.backend.refused()
				if connect.CodeOf(err) != connect.CodePermissionDenied || !strings.Contains(err.Error(), m.Procedure+" needs the role "+string(m.Role)) || len(seen) > 0 || told.Procedure != m.Procedure {
					t.Errorf("%s as %s, %s: %v; PID 1 was asked %d times, and told of %s", m.Former, role, p.name, err, len(seen), told.Procedure)
				}
			}
		}
	}
	// It is the whole path, and nothing else.
	c := b.client(t, admin(t, ca), true)
	for _, path := range []string{"", "/", "//garboard.v1.NodeService/Reboot", "/garboard.v1.NodeService/Reboot/", "/x/../garboard.v1.NodeService/Reboot", "/garboard.v1.NodeService/reboot", "/garboard.v1.NodeService/List"} {
		if code, text, err := post(c, b.url(path), nil, strings.NewReader("{}")); err != nil || code != http.StatusForbidden || len(b.backend.take()) > 0 {
			t.Errorf("%q: %d %s, %v", path, code, text, err)
		}
	}
}

// withOperations is the gate before PID 1's side of the API, with operations, and its logs.
func withOperations(t *testing.T, b *bench) *logs.Logs {
	t.Helper()
	b.backend.close()
	store, l := resource.NewStore(), logs.New(nil)
	graph, err := dag.New(dag.Options{Log: l.Logger})
	if err != nil {
		t.Fatal(err)
	}
	runtime, err := resource.NewRuntime(store, l.Logger("controller-runtime"))
	if err != nil {
		t.Fatal(err)
	}
	runner, err := operation.New(operation.Options{Store: store, Log: slog.New(slog.DiscardHandler), Dir: filepath.Join(t.TempDir(), "operations")})
	if err != nil {
		t.Fatal(err)
	}
	if err := configuration.Stages.Put(store.As(configuration.ID), configuration.StageID, configuration.Configured); err != nil {
		t.Fatal(err)
	}
	serveNode(t, b.socket, os.Getpid(), server.Options{Store: store, Graph: graph, Runtime: runtime, Logs: l, Config: noConfig{}, Operations: runner, Since: dag.SinceBoot})
	return l
}

// What curl sends to the former path is answered, and audited, as what it sends to the present one.
func TestFormerProceduresWithTheRealServer(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	b := newBench(t, normal(t, ca), nil)
	l := withOperations(t, b)
	c := b.client(t, admin(t, ca), true)
	last := func() string { return strings.Join(l.Tail(server.AuditID, 1), "") }
	for _, m := range moved(t) {
		header, body := http.Header{}, "{}"
		if m.Streaming {
			header.Set("Content-Type", "application/connect+json")
			body = "\x00\x00\x00\x00\x02{}"
		}
		wantCode, want, err := post(c, b.url(m.Procedure), header, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		code, got, err := post(c, b.url(m.Former), header, strings.NewReader(body))
		if err != nil || code != wantCode || got != want || strings.Contains(got, "unimplemented") {
			t.Errorf("%s: %d %s, %v; want %d %s", m.Former, code, got, err, wantCode, want)
		}
		if name := strings.TrimPrefix(m.Procedure, "/garboard.v1."); m.Audited() && !strings.Contains(last(), name+" peer=alice roles=os:admin") {
			t.Errorf("%s is audited as %s", m.Former, last())
		}
	}
}

// recorded is a way to a node that remembers what was asked. To a former node, the procedures of this release are names
// that nobody has.
type recorded struct {
	http.RoundTripper
	former bool
	asked  []string
}

func (n *recorded) RoundTrip(r *http.Request) (*http.Response, error) {
	n.asked = append(n.asked, r.URL.Path)
	if m, ok := api.Lookup(r.URL.Path); ok && m.Former != "" && n.former {
		r = r.Clone(r.Context())
		r.URL.Path += "OfTheNextRelease"
	}
	return n.RoundTripper.RoundTrip(r)
}

// A client of this release asks a node of the former one by the names that it has. It does so where the gate doesn't
// know the procedure, and not where the caller lacks the role.
func TestNodesOfTheFormerReleaseAreAsked(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	b := newBench(t, normal(t, ca), everything())
	for _, p := range protocols[:2] { // gbctl and other nodes speak the first one
		for _, role := range api.Roles() {
			way := b.client(t, shown(t, ca, pki.Leaf{CN: "bob", Orgs: []string{string(role)}}), p.http2).Transport
			for _, former := range []bool{true, false} {
				for _, m := range moved(t) {
					node := &recorded{RoundTripper: way, former: former}
					err := ask(t.Context(), &http.Client{Transport: api.Former{RoundTripper: node}}, b.url(""), m, p.options...)
					if allowed := api.Allowed(m, []string{string(role)}); allowed != (err == nil) || !allowed && connect.CodeOf(err) != connect.CodePermissionDenied {
						t.Errorf("%s as %s, %s: %v", m.Procedure, role, p.name, err)
					}
					want := []string{m.Procedure}
					if former {
						want = append(want, m.Former)
					}
					if !slices.Equal(node.asked, want) {
						t.Errorf("%s as %s, %s: it asked %q, want %q", m.Procedure, role, p.name, node.asked, want)
					}
				}
			}
		}
	}
}
