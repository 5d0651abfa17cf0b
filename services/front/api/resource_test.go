package api

import (
	"context"
	"encoding/base64"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/clock"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/files"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/garboard-os/garboard/services/system/sysctl"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/google/go-cmp/cmp"
	"gopkg.in/yaml.v3"
)

func (r *rig) resources(headers map[string]string) garboardv1connect.ResourceServiceClient {
	return garboardv1connect.NewResourceServiceClient(r.as(headers), host)
}

func TestResourcesAreListed(t *testing.T) {
	r := newRig(t)
	w := r.opts.Store.As("test.NoteController")
	n := note{Text: "hello"}
	n.Deep.List = []string{"a", "b: c"}
	must(t, notes.Put(w, "two", note{}))
	must(t, notes.Put(w, "one", note{}))
	must(t, notes.Put(w, "one", n))
	must(t, notes.In("stone").Put(w, "one", note{Text: "\xff"}))
	must(t, notes.AddFinalizer(w, "one", `k8s.StaticPodStatus("one")`))
	r.serve()
	client := r.resources(reader)
	for _, name := range []string{"nt", "notes", "NOTES", "Note", "Notes.test.garboard.dev"} { // S-008
		res, err := ask(t, client.List, &apiv1.ListResourcesRequest{Type: name})
		must(t, err)
		var ids []string
		for _, item := range res.GetItems() {
			ids = append(ids, item.GetNamespace()+"/"+item.GetId())
		}
		if diff := cmp.Diff([]string{"paper/one", "paper/two", "stone/one"}, ids); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
		d := res.GetDefinition() // S-005, S-009
		if d.GetType() != "Notes.test.garboard.dev" || d.GetKind() != "Note" || d.GetDefaultNamespace() != "paper" || !slices.Equal(d.GetColumns(), []string{"TEXT"}) {
			t.Errorf("definition: %v", d)
		}
	}
	res, err := ask(t, client.List, &apiv1.ListResourcesRequest{Type: "nt", Id: "one", Namespace: "paper"}) // S-006
	must(t, err)
	if len(res.GetItems()) != 1 {
		t.Fatal(res)
	}
	one := res.GetItems()[0]
	// S-007
	wantSpec := "text: hello\ndeep:\n    list:\n        - a\n        - 'b: c'\n"
	// S-010
	if one.GetSpec() != wantSpec || one.GetVersion() != 2 || one.GetPhase() != "running" || one.GetOwner() != "test.NoteController" ||
		!slices.Equal(one.GetFinalizers(), []string{`k8s.StaticPodStatus("one")`}) || !slices.Equal(one.GetColumns(), []string{"hello"}) || one.GetType() != "Notes.test.garboard.dev" {
		t.Errorf("got %v", one)
	}
	_, err = ask(t, client.List, &apiv1.ListResourcesRequest{Type: "nt", Id: "three"})
	wantCode(t, err, connect.CodeNotFound, `Note "three"`, "there are one, two, one")
	_, err = ask(t, client.List, &apiv1.ListResourcesRequest{Type: "hats"})
	wantCode(t, err, connect.CodeNotFound, "hats", "machineconfigs")
	_, err = ask(t, client.List, &apiv1.ListResourcesRequest{})
	wantCode(t, err, connect.CodeInvalidArgument, "gbctl get rd")
}

func TestWhatIsShownIsWhatIsThere(t *testing.T) {
	r := newRig(t).serve()
	w := r.opts.Store.As("test")
	for i, n := range []note{{Text: "one"}, {Text: "one"}, {Text: "two"}} { // of the same version each time
		must(t, notes.Put(w, "a", n))
		for range 2 {
			res, err := ask(t, r.resources(reader).List, &apiv1.ListResourcesRequest{Type: "nt"})
			must(t, err)
			if item := res.GetItems()[0]; !strings.HasPrefix(item.GetSpec(), "text: "+n.Text) || item.GetColumns()[0] != n.Text || item.GetVersion() != 1 {
				t.Errorf("time %d: %v", i, item)
			}
		}
		must(t, notes.Delete(w, "a"))
	}
	var s shown
	for i := range 3 * maxShown {
		_, _, err := s.of(notes.Definition(), resource.Object[any]{Meta: resource.Meta{ID: fmt.Sprint(i)}, Spec: note{}})
		must(t, err)
	}
	if len(s.objects) > maxShown {
		t.Errorf("%d are kept", len(s.objects))
	}
}

func TestDefinitionsAndGraphs(t *testing.T) {
	r := newRig(t).serve()
	client := r.resources(reader)
	res, err := ask(t, client.Definitions, &apiv1.ListDefinitionsRequest{})
	must(t, err)
	if len(res.GetDefinitions()) != len(resource.Definitions()) {
		t.Errorf("%d definitions", len(res.GetDefinitions()))
	}
	for services, want := range map[bool]string{true: `"kubelet" -> "containerd"`, false: "digraph controllers"} {
		res, err := ask(t, client.Graph, &apiv1.GraphRequest{Services: services})
		must(t, err)
		if !strings.Contains(res.GetDot(), want) {
			t.Errorf("graph: %s", res.GetDot())
		}
	}
}

func TestWatchTellsWhatIsThereAndThenChanges(t *testing.T) {
	r := newRig(t)
	w := r.opts.Store.As("test")
	for _, id := range []string{"b", "a", "c"} {
		must(t, notes.Put(w, id, note{Text: id}))
	}
	must(t, notes.In("stone").Put(w, "a", note{}))
	r.serve()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream, err := r.resources(reader).Watch(ctx, connect.NewRequest(&apiv1.ListResourcesRequest{Type: "nt", Namespace: "paper"}))
	must(t, err)
	next := func() string {
		t.Helper()
		if !stream.Receive() {
			t.Fatal(stream.Err())
		}
		e := stream.Msg()
		return strings.TrimPrefix(e.GetKind().String(), "KIND_") + " " + e.GetResource().GetId() + " " + strings.Join(e.GetResource().GetColumns(), "") + " " + e.GetDefinition().GetKind()
	}
	for _, want := range []string{"PRESENT a a Note", "PRESENT b b ", "PRESENT c c ", "SYNCED   "} {
		if got := next(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	must(t, notes.Put(w, "a", note{Text: "newer"}))
	if got := next(); got != "UPDATED a newer " {
		t.Errorf("got %q", got)
	}
	must(t, notes.Delete(w, "b"))
	must(t, notes.In("stone").Put(w, "d", note{}))
	must(t, notes.Put(w, "d", note{}))
	for _, want := range []string{"DELETED b b ", "CREATED d  "} {
		if got := next(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	none, err := r.resources(reader).Watch(ctx, connect.NewRequest(&apiv1.ListResourcesRequest{Type: "hats"}))
	must(t, err)
	if none.Receive() {
		t.Error("got something")
	}
	wantCode(t, none.Err(), connect.CodeNotFound)
}

// TestASlowWatcherGetsTheLastState and holds up nobody: the store takes far more
// changes than fit between the two.
func TestASlowWatcherGetsTheLastState(t *testing.T) {
	r := newRig(t).serve()
	w := r.opts.Store.As("test")
	client := garboardv1connect.NewResourceServiceClient(r.client(reader, true), host)
	stream, err := client.Watch(t.Context(), connect.NewRequest(&apiv1.ListResourcesRequest{Type: "nt"}))
	must(t, err)
	const changes = 5000
	for i := range changes {
		must(t, notes.Put(w, "a", note{Text: fmt.Sprint(i, strings.Repeat(" ", 1000))}))
	}
	must(t, notes.Put(w, "a", note{Text: "last"}))
	events := 0
	for stream.Receive() {
		events++
		if columns := stream.Msg().GetResource().GetColumns(); slices.Equal(columns, []string{"last"}) {
			if events >= changes/2 {
				t.Errorf("%d events: nothing was merged", events)
			}
			return
		}
	}
	t.Error(stream.Err())
}

// secretsOf are the secrets in a value by the types of their fields.
func secretsOf(v reflect.Value, found map[string]bool) {
	if !v.IsValid() {
		return
	}
	switch v.Type() {
	case reflect.TypeFor[config.Secret]():
		found[v.String()] = true
		return
	case reflect.TypeFor[config.KeyPEM]():
		found[string(v.Bytes())] = true
		return
	}
	switch v.Kind() {
	case reflect.Pointer, reflect.Interface:
		secretsOf(v.Elem(), found)
	case reflect.Struct:
		for i := range v.NumField() {
			secretsOf(v.Field(i), found)
		}
	case reflect.Slice, reflect.Array:
		if v.Type().Elem().Kind() != reflect.Uint8 {
			for i := range v.Len() {
				secretsOf(v.Index(i), found)
			}
		}
	case reflect.Map:
		for _, key := range v.MapKeys() {
			secretsOf(v.MapIndex(key), found)
		}
	}
}

// controlPlane fills the store with what a control plane has, by its own
// controllers.
func (r *rig) controlPlane() {
	t := r.t
	t.Helper()
	c, _ := document(t)
	w := r.opts.Store.As("test")
	must(t, configuration.Configs.Put(r.opts.Store.As(configuration.ID), configuration.ConfigID, c))
	address := netip.MustParseAddr("10.5.0.2")
	must(t, network.Addresses.Put(w, network.AddressID, network.NodeAddress{Primary: address, All: []netip.Prefix{netip.PrefixFrom(address, 24)}}))
	must(t, network.Hostnames.Put(w, network.HostnameID, "n1"))
	must(t, network.Resolvers.Put(w, network.ResolversID, []netip.Addr{address}))
	must(t, network.TimeServers.Put(w, network.TimeServersID, []netip.Addr{address}))
	must(t, clock.Statuses.Put(w, clock.StatusID, clock.Status{Synced: true, Source: clock.SourceNTP}))
	must(t, etcd.Statuses.Put(w, etcd.StatusID, etcd.StatusSpec{Ready: true, Endpoint: "https://127.0.0.1:1"}))
	must(t, controlplane.StaticPodStatuses.Put(w, "kube-system/x", controlplane.PodStatus{"phase": "Running"}))
	must(t, files.Statuses.Put(w, "/var/x", files.Status{}))
	must(t, files.Layouts.Put(w, files.LayoutID, files.Layout{}))
	must(t, sysctl.Statuses.Put(w, "kernel.panic", sysctl.Status{}))
	must(t, notes.Put(w, "a", note{Text: "-----BEGIN EC PRIVATE KEY-----\nhushhush\n"}))

	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	controllers := secrets.Controllers(secrets.Options{Dir: path("secrets")})
	for _, c := range controlplane.Controllers(controlplane.Options{
		Logs: r.opts.Logs, StaticPodsDir: path("static-pods"), CheckpointsDir: path("checkpoints"), FilesDir: path("files"), AuditDir: path("audit"), SecretsDir: path("secrets"),
		CNIConfDir: path("cni"), SubnetFile: path("subnet.env"), KubeletURL: "https://127.0.0.1:1",
		Initialized: func(context.Context, resource.Reader, string) (bool, error) { return false, nil },
		Issuers: func(_ context.Context, _ resource.Reader, _, issuer string) ([]string, error) {
			return []string{issuer}, nil
		},
	}) {
		// Those that only look outwards would find nobody.
		if name := c.Name; slices.ContainsFunc([]string{"ManifestApply", "ManifestDrift", "NodeLabel", "KubeletStaticPod", "CNIConfig"}, func(part string) bool { return strings.Contains(name, part) }) {
			continue
		}
		controllers = append(controllers, c)
	}
	rt, err := resource.NewRuntime(r.opts.Store, slog.New(slog.DiscardHandler), controllers...)
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = rt.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	eventually.That(t, 30*time.Second, "the control plane is made", func() error {
		for _, c := range controllers {
			for _, typ := range c.Outputs {
				if len(r.opts.Store.Objects(typ, "")) == 0 {
					return fmt.Errorf("%s has none", typ)
				}
			}
		}
		return nil
	})
}

// suspicious are fields that sound like secrets and have no type of a secret.
func suspicious(t reflect.Type, path string, seen map[reflect.Type]bool) (found []string) {
	if t == reflect.TypeFor[config.Secret]() || t == reflect.TypeFor[config.KeyPEM]() || seen[t] {
		return nil
	}
	seen[t] = true
	switch t.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Array, reflect.Map:
		return suspicious(t.Elem(), path, seen)
	case reflect.Struct:
		for i := range t.NumField() {
			f := t.Field(i)
			inner := path + "." + f.Name
			if kind := f.Type.Kind(); telling.MatchString(f.Name) && f.Name != "PublicKey" && (kind == reflect.String || kind == reflect.Slice && f.Type.Elem().Kind() == reflect.Uint8) &&
				f.Type != reflect.TypeFor[config.Secret]() && f.Type != reflect.TypeFor[config.KeyPEM]() {
				found = append(found, inner)
			}
			found = append(found, suspicious(f.Type, inner, seen)...)
		}
	}
	return found
}

var telling = regexp.MustCompile(`(?i)token|password|passphrase|private|secret|key$`)

// TestKindsHaveTypesForSecrets holds for kinds that the next test has no object
// of.
func TestKindsHaveTypesForSecrets(t *testing.T) {
	for _, d := range resource.Definitions() {
		if d.Type == configuration.Configs.Type() {
			continue // package config redacts it by its own rules, and tests them
		}
		for _, field := range suspicious(d.Spec(), d.Type, map[reflect.Type]bool{}) {
			t.Errorf("%s: is it a secret? Then its type should be config.Secret or config.KeyPEM", field)
		}
	}
}

// TestNoResourceShowsASecret goes through all kinds, as a caller with the most
// rights.
func TestNoResourceShowsASecret(t *testing.T) {
	r := newRig(t)
	r.controlPlane()
	r.serve()
	hidden := map[string]bool{"hushhush": true}
	for _, d := range resource.Definitions() {
		for _, o := range r.opts.Store.Objects(d.Type, "") {
			secretsOf(reflect.ValueOf(o.Spec), hidden)
		}
	}
	if len(hidden) < 20 {
		t.Fatalf("only %d secrets to look for", len(hidden))
	}
	// Kubernetes' tokens have no type of their own.
	c, err := configuration.Config(r.opts.Store)
	must(t, err)
	_, tokenSecret, _ := strings.Cut(string(c.Cluster.Token), ".")
	hidden[tokenSecret] = true

	all := garboardv1connect.NewResourceServiceClient(r.as(admin), host)
	for _, d := range resource.Definitions() {
		res, err := ask(t, all.List, &apiv1.ListResourcesRequest{Type: d.Type})
		must(t, err)
		stream, err := all.Watch(t.Context(), connect.NewRequest(&apiv1.ListResourcesRequest{Type: d.Type}))
		must(t, err)
		for range res.GetItems() {
			if !stream.Receive() {
				t.Fatal(stream.Err())
			}
			res.Items = append(res.Items, stream.Msg().GetResource())
		}
		stream.Close()
		for _, item := range res.GetItems() {
			text := item.GetSpec() + strings.Join(item.GetColumns(), "\n")
			var parsed any
			if err := yaml.Unmarshal([]byte(item.GetSpec()), &parsed); err != nil {
				t.Errorf("%s %s: %v", d.Type, item.GetId(), err)
			}
			for secret := range hidden {
				if secret == "" {
					continue
				}
				for _, form := range []string{secret, base64.StdEncoding.EncodeToString([]byte(secret)), strings.ReplaceAll(secret, "\n", "\n    ")} {
					if strings.Contains(text, form) {
						t.Errorf("%s %s/%s shows %q…:\n%s", d.Type, item.GetNamespace(), item.GetId(), form[:min(len(form), 8)], text)
					}
				}
			}
			if strings.Contains(text, "PRIVATE KEY-----") {
				t.Errorf("%s %s/%s shows a private key:\n%s", d.Type, item.GetNamespace(), item.GetId(), text)
			}
		}
	}
}

func TestSecretsOfKubernetesAreHidden(t *testing.T) {
	key := "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIHushHush\n-----END PRIVATE KEY-----\n"
	inBase64 := base64.StdEncoding.EncodeToString([]byte(key))
	objects := []kubeclient.Object{
		{"kind": "Secret", "metadata": map[string]any{"name": "bootstrap", "annotations": map[string]any{"last": "hush3"}}, "stringData": map[string]any{"token": "hush1"}, "data": map[string]any{"list": []any{"hush2"}}, "type": "shown"},
		{"kind": "ConfigMap", "data": map[string]any{"plain": "shown too", "kubeconfig": "client-key-data: " + inBase64, "key": key, "wrapped": inBase64[:40] + "\n  " + inBase64[40:] + "\nmore: text"}},
		{"kind": "List", "items": []any{map[string]any{"kind": "Secret", "data": map[string]any{"a": "hush3"}}}},
		{"kind": "ConfigMap", "data": map[string]any{"certificate": base64.StdEncoding.EncodeToString([]byte("-----BEGIN CERTIFICATE-----\nMII\n"))}},
	}
	text, err := specYAML(resource.Object[any]{Spec: objects})
	must(t, err)
	for _, bad := range []string{"hush", "Hush", inBase64[:20] + inBase64[20:30], "PRIVATE"} {
		if strings.Contains(text, bad) {
			t.Errorf("shows %q:\n%s", bad, text)
		}
	}
	for _, good := range []string{"bootstrap", "token: (secret)", "type: shown", "shown too", "certificate: LS0tLS1CRUdJTi"} {
		if !strings.Contains(text, good) {
			t.Errorf("doesn't show %q:\n%s", good, text)
		}
	}
	malicious := strings.Repeat("LS0tLS1CRUdJTi"+"!", 1<<16)
	if privateKey(malicious) || privateKey(strings.Repeat("LS0tLS1CRUdJTi", 1<<16)) {
		t.Error("a key in what is none")
	}
}

func TestMachineConfigIsShownAsWritten(t *testing.T) { // S-269
	r := newRig(t)
	c, _ := document(t)
	must(t, configuration.Configs.Put(r.opts.Store.As(configuration.ID), configuration.ConfigID, c))
	r.serve()
	res, err := ask(t, r.resources(admin).List, &apiv1.ListResourcesRequest{Type: "mc"})
	must(t, err)
	spec := res.GetItems()[0].GetSpec()
	for _, part := range []string{"version: v1alpha1\n", "\nmachine:\n    type: init\n    token: (secret)\n", "    clusterName: test\n"} {
		if !strings.Contains(spec, part) {
			t.Errorf("doesn't have %q:\n%s", part, spec)
		}
	}
	if strings.Contains(spec, "#") || strings.Contains(spec, "null") {
		t.Errorf("comments or empty fields:\n%s", spec)
	}
}
