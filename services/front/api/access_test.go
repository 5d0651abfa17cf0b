package api

import (
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/roster"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/configuration"
	"google.golang.org/protobuf/types/known/durationpb"
)

// fakeSecrets are the Secrets of an API server, by name.
type fakeSecrets struct {
	t    *testing.T
	all  map[string]kubeclient.Object
	body kubeclient.Object // of the last change
}

func (f *fakeSecrets) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	const path = "/api/v1/namespaces/kube-system/secrets"
	name := strings.TrimPrefix(strings.TrimPrefix(r.URL.Path, path), "/")
	if r.Method != http.MethodGet {
		f.body = nil
		if err := json.NewDecoder(r.Body).Decode(&f.body); err != nil {
			f.t.Error(err)
		}
	}
	answer := any(f.all[name])
	switch {
	case r.URL.Path == "/api":
		io.WriteString(w, `{"kind":"APIGroupDiscoveryList","items":[{"metadata":{},"versions":[{"version":"v1","resources":[{"resource":"secrets","scope":"Namespaced","responseKind":{"kind":"Secret"}}]}]}]}`)
		return
	case r.URL.Path == "/apis":
		io.WriteString(w, `{"kind":"APIGroupDiscoveryList","items":[]}`)
		return
	case r.Method == http.MethodPost:
		answer = f.body
	case name == "":
		if r.URL.Query().Get("fieldSelector") != "type=bootstrap.kubernetes.io/token" {
			f.t.Errorf("it lists %s", r.URL)
		}
		items := []kubeclient.Object{}
		for _, id := range []string{"aaaaaa", "bbbbbb", "cccccc"} {
			items = append(items, f.all[tokenName+id])
		}
		answer = map[string]any{"kind": "SecretList", "apiVersion": "v1", "items": items}
	case f.all[name] == nil:
		w.WriteHeader(http.StatusNotFound)
		answer = map[string]any{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "message": name + " not found", "code": 404}
	}
	if err := json.NewEncoder(w).Encode(answer); err != nil {
		f.t.Error(err)
	}
}

func tokenSecret(id string, labels map[string]any, fields map[string]string) kubeclient.Object {
	data := map[string]any{"token-id": base64.StdEncoding.EncodeToString([]byte(id)), "token-secret": base64.StdEncoding.EncodeToString([]byte("hushhushhushhush"))}
	for field, text := range fields {
		data[field] = base64.StdEncoding.EncodeToString([]byte(text))
	}
	return kubeclient.Object{"apiVersion": "v1", "kind": "Secret", "type": tokenType, "data": data,
		"metadata": map[string]any{"name": tokenName + id, "namespace": "kube-system", "labels": labels}}
}

// Tokens are made with an end, listed without their secrets, and ended in a way that keeps
// control planes from making the one of the configuration again.
func TestTokens(t *testing.T) {
	later := time.Now().Add(48 * time.Hour).UTC().Truncate(time.Second)
	kubernetes := &fakeSecrets{t: t, all: map[string]kubeclient.Object{
		tokenName + "aaaaaa": tokenSecret("aaaaaa", map[string]any{madeToken: ""}, map[string]string{"expiration": later.Format(time.RFC3339), "description": "rack 4"}),
		tokenName + "bbbbbb": tokenSecret("bbbbbb", nil, nil),
		tokenName + "cccccc": tokenSecret("cccccc", nil, map[string]string{"expiration": "2026-01-01T00:00:00Z"}),
	}}
	r := newRig(t)
	cfg, err := config.Generate(config.Options{ClusterName: "test", Endpoint: "https://10.5.0.2:6443"})
	must(t, err)
	crt, key, err := cfg.Cluster.CA.CA().Issue(pki.Leaf{DNS: []string{balancer.ServerName}, Server: true, Now: time.Now()})
	must(t, err)
	own, err := tls.X509KeyPair(crt, key)
	must(t, err)
	server := httptest.NewUnstartedServer(kubernetes)
	server.TLS = &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{own}}
	server.StartTLS()
	t.Cleanup(server.Close)
	cfg.Cluster.Token, cfg.Machine.Token = "bbbbbb.hushhushhushhush", "mmmmmm.hushhushhushhush"
	recorded := map[string]roster.Token{
		"aaaaaa": roster.NewToken("aaaaaa.hushhushhushhush", later),
		"dddddd": roster.NewToken("dddddd.hushhushhushhush", later), // somebody has deleted its Secret
	}
	forgets := map[string]bool{}
	names := map[string]roster.Record{"w1": {Key: "k", Certified: true}, "held": {Key: "k", Certified: true, Address: netip.MustParseAddr("10.5.0.66")}, "deleted": {Key: "k", Joined: true}}
	r.opts.Roster = func(context.Context) (roster.Facts, error) {
		return roster.Facts{Tokens: maps.Clone(recorded), Records: maps.Clone(names), Nodes: map[string]bool{"w1": true}, Now: time.Now()}, nil
	}
	r.opts.Enlist = func(_ context.Context, name string, r roster.Record) error {
		names[name] = r
		return nil
	}
	r.opts.EnlistToken = func(_ context.Context, id string, t roster.Token, forget bool) error {
		recorded[id], forgets[id] = t, forget
		return nil
	}
	must(t, configuration.Configs.Put(r.opts.Store.As("test"), configuration.ConfigID, cfg))
	pair, err := secrets.Admin(cfg.Cluster.CA, time.Now())
	must(t, err)
	must(t, secrets.Kubernetes.Put(r.opts.Store.As("test"), secrets.KubernetesID, secrets.KubernetesSpec{
		Balancer: server.URL, Trusted: cfg.Cluster.CA.Crt, Admin: pair,
	}))
	r.serve()
	client := garboardv1connect.NewAccessServiceClient(r.as(admin), host)

	list, err := ask(t, client.ListTokens, &apiv1.ListTokensRequest{})
	must(t, err)
	wantParts(t, list.String(), `id:"aaaaaa"`, `description:"rack 4"`, `id:"bbbbbb" `, `description:"cluster.token of this node"`, `id:"cccccc"`, `id:"mmmmmm" `, `description:"machine.token of this node"`, `id:"dddddd"`, `description:"for the machine API only"`)
	wantParts(t, list.String(), `id:"node/held"`, "a machine at 10.5.0.66 has this name, and no Node")
	if strings.Contains(list.String(), "w1") || strings.Contains(list.String(), "deleted") {
		t.Errorf("the list has names that need nothing: %v", list)
	}
	if !list.Tokens[0].Ends.AsTime().Equal(later) || list.Tokens[1].Ends != nil || strings.Contains(list.String(), "hush") {
		t.Errorf("the list is %v", list)
	}

	made, err := ask(t, client.CreateToken, &apiv1.CreateTokenRequest{Ttl: durationpb.New(time.Hour), Description: "rack 5"})
	must(t, err)
	wantParts(t, r.audited(), "AccessService/CreateToken peer=jane", `ttl 1h0m0s, description \"rack 5\"`)
	text := func(field string) string { return kubernetes.body.Text("stringData", field) }
	if made.Token != text("token-id")+"."+text("token-secret") || strings.Contains(r.audited(), text("token-secret")) {
		t.Errorf("token %s, and the Secret is %v", made.Token, kubernetes.body)
	}
	// The same token is for the machine API, until the same moment; its secret is nowhere else.
	if got := recorded[text("token-id")]; got != roster.NewToken(made.Token, got.Ends) || !got.Ends.Equal(made.Ends.AsTime()) || !forgets[text("token-id")] {
		t.Errorf("%s is recorded as %+v", made.Token, got)
	}
	if end, err := time.Parse(time.RFC3339, text("expiration")); err != nil || time.Until(end) > time.Hour || time.Until(end) < 59*time.Minute || text("usage-bootstrap-authentication") != "true" {
		t.Errorf("the Secret is %v", kubernetes.body["stringData"])
	}
	for _, bad := range []time.Duration{0, time.Second, 366 * 24 * time.Hour} {
		_, err = ask(t, client.CreateToken, &apiv1.CreateTokenRequest{Ttl: durationpb.New(bad)})
		wantCode(t, err, connect.CodeInvalidArgument, "it must be for 1m0s to 8760h0m0s")
	}

	for _, tc := range []struct {
		id    string
		after time.Duration
		want  time.Time
		kept  bool
	}{
		{"aaaaaa", 0, time.Now(), false},
		{"aaaaaa", time.Hour, time.Now().Add(time.Hour), false},
		{"aaaaaa", 72 * time.Hour, later, false}, // it isn't put off
		{"bbbbbb", 0, time.Now(), true},
		{"bbbbbb", -time.Hour, time.Now(), true},
		{"cccccc", 0, time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC), true},
	} {
		recorded["aaaaaa"] = roster.NewToken("aaaaaa.hushhushhushhush", later)
		got, err := ask(t, client.RevokeToken, &apiv1.RevokeTokenRequest{Id: tc.id, After: durationpb.New(tc.after)})
		must(t, err)
		end, err := time.Parse(time.RFC3339, text("expiration"))
		if err != nil || end.Sub(tc.want).Abs() > time.Minute || got.Message != "token "+tc.id+" ends at "+text("expiration") {
			t.Errorf("%s after %s: %s, and the patch is %v, want %s", tc.id, tc.after, got.Message, kubernetes.body, tc.want)
		}
		if kept := kubernetes.body.At("metadata", "finalizers") != nil; kept != tc.kept {
			t.Errorf("%s is kept: %t", tc.id, kept)
		}
	}
	// machine.token, and a token whose Secret is gone, end where trustd looks. That of the configuration is remembered
	// for good.
	for id, forget := range map[string]bool{"aaaaaa": true, "dddddd": true, "mmmmmm": false} {
		got, err := ask(t, client.RevokeToken, &apiv1.RevokeTokenRequest{Id: id})
		must(t, err)
		token := recorded[id]
		if since := time.Since(token.Ends); since < 0 || since > time.Minute || token.Hash != roster.NewToken(id+".hushhushhushhush", token.Ends).Hash || forgets[id] != forget {
			t.Errorf("%s: %s, and it is recorded as %+v, forgotten: %t", id, got.Message, token, forgets[id])
		}
	}
	list, err = ask(t, client.ListTokens, &apiv1.ListTokensRequest{})
	must(t, err)
	for _, token := range list.Tokens {
		if token.Id == "mmmmmm" && (token.Ends == nil || token.Description != "machine.token of this node") {
			t.Errorf("the list has %v", token)
		}
	}
	// A name that a machine has without a Node is freed, and no other one.
	_, err = ask(t, client.RevokeToken, &apiv1.RevokeTokenRequest{Id: "node/held"})
	must(t, err)
	if r := names["held"]; !r.Joined || r.Key != "k" {
		t.Errorf("the name is recorded as %+v", r)
	}
	for _, name := range []string{"held", "w1", "nosuch"} {
		_, err = ask(t, client.RevokeToken, &apiv1.RevokeTokenRequest{Id: "node/" + name})
		wantCode(t, err, connect.CodeFailedPrecondition, "no machine has the name \""+name+"\" without a Node")
	}
	_, err = ask(t, client.RevokeToken, &apiv1.RevokeTokenRequest{Id: "nosuch"})
	wantCode(t, err, connect.CodeFailedPrecondition, "not found")
	_, err = ask(t, garboardv1connect.NewAccessServiceClient(r.as(reader), host).ListTokens, &apiv1.ListTokensRequest{})
	wantCode(t, err, connect.CodePermissionDenied)
	worker := *cfg
	worker.Machine.Type, worker.Cluster.CA.Key = config.Worker, nil
	must(t, configuration.Configs.Put(r.opts.Store.As("test"), configuration.ConfigID, &worker))
	_, err = ask(t, client.ListTokens, &apiv1.ListTokensRequest{})
	wantCode(t, err, connect.CodeFailedPrecondition, "ask a control plane")
}
