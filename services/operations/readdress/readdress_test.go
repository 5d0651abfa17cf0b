package readdress

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"gopkg.in/yaml.v3"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot/source"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/operations/rollout"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
)

type object = map[string]any

var (
	former = netip.MustParseAddr("10.5.0.2")
	next   = netip.MustParseAddr("10.5.0.20")
)

// rig is a control plane whose address follows its configuration, as the operation sees it. The configuration is real,
// with its trials.
type rig struct {
	rollout.Peers // what isn't there below isn't called

	t       *testing.T
	dir     string
	store   *resource.Store
	applier *configuration.Applier
	runner  *operation.Runner
	off     func()

	mu      sync.Mutex // guards what follows
	member  netip.Addr // where the list of etcd's members has this node
	others  int        // members besides
	stop    error      // why it may not stop
	broken  bool       // nothing serves at the new address
	changes []string   // of the member
	renewed []string   // pods that were deleted
}

func put(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

var secrets = sync.OnceValues(func() (*config.Secrets, error) { return config.NewSecrets(time.Now().Add(-time.Hour)) })

func document(t *testing.T) []byte {
	t.Helper()
	s, err := secrets()
	put(t, err)
	c, err := config.Generate(config.Options{Type: config.ControlPlane, Endpoint: "https://10.5.0.2:6443", Hostname: "n1", Secrets: s})
	put(t, err)
	c.Machine.Network.Interfaces = []config.Interface{{Name: "eth0", CIDR: netip.MustParsePrefix("10.5.0.2/24")}}
	text, err := c.Encode()
	put(t, err)
	return append([]byte("# 110.5.0.2, 10.5.0.21 and 10.5.0.2.1 stay\n"), text...)
}

func start(t *testing.T, do func(*rig)) {
	t.Helper()
	text := document(t)
	synctest.Test(t, func(t *testing.T) {
		r := &rig{t: t, dir: t.TempDir(), member: former}
		put(t, os.WriteFile(filepath.Join(r.dir, "config.yaml"), text, 0o600))
		r.on()
		defer func() { r.off() }()
		do(r)
	})
}

// on is a start of the node.
func (r *rig) on() {
	t := r.t
	t.Helper()
	r.store = resource.NewStore()
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	r.applier = configuration.NewApplier(configuration.ApplierOptions{
		Store: r.store, StateDir: r.dir, Log: slog.New(slog.DiscardHandler),
		Restart: func(context.Context, string, bool) error { return nil }, Reboot: func(why string) { t.Errorf("it reboots: %s", why) },
	})
	g, err := dag.New(dag.Options{SinceBoot: func() time.Duration { return 0 }}, configuration.Service(configuration.Options{Store: r.store, Applier: r.applier, MountState: func(context.Context) (configuration.State, error) { return configuration.StateMounted, nil }, Sources: []source.Source{{
		Name: source.State, Read: func(context.Context) ([]byte, error) { return os.ReadFile(filepath.Join(r.dir, "config.yaml")) },
	}}}))
	put(t, err)
	all.Go(func() { _ = g.Run(ctx) })
	all.Go(func() { r.network(ctx) })
	as := r.store.As("test")
	put(t, network.Hostnames.Put(as, network.HostnameID, "n1"))
	put(t, etcd.Statuses.Put(as, etcd.StatusID, etcd.StatusSpec{Ready: true}))
	synctest.Wait()
	r.runner, err = operation.New(operation.Options{
		Store: r.store, Log: slog.New(slog.DiscardHandler), Dir: r.dir + "/operations",
		Definitions: []operation.Definition{Definition(Options{
			Store: r.store, Configuration: r.applier, Etcd: r, Peers: r,
			Kubernetes: func() (*kubeclient.Client, error) {
				return kubeclient.New(kubeclient.Options{Server: "https://api", Transport: r})
			},
		})},
	})
	put(t, err)
	all.Go(func() { _ = r.runner.Run(ctx) })
	r.off = func() { cancel(); all.Wait() }
	r.runner.Open()
	synctest.Wait()
}

// network gives the node the address of its configuration.
func (r *rig) network(ctx context.Context) {
	for range r.store.Watch(ctx, configuration.Configs.Type()) {
		if c, err := configuration.Config(r.store); err == nil {
			put(r.t, network.Addresses.Put(r.store.As("network"), network.AddressID, network.NodeAddress{Primary: c.Machine.Network.Interfaces[0].CIDR.Addr()}))
		}
	}
}

func (r *rig) at() netip.Addr {
	a, err := network.Addresses.Get(r.store, network.AddressID)
	put(r.t, err)
	return a.Spec.Primary
}

func (r *rig) Check() error { return nil }

func (r *rig) Resources(_ context.Context, node netip.Addr, typ, id string) ([]*apiv1.Resource, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if node != r.at() || r.broken {
		return nil, errors.New("no route to host")
	}
	spec := object{"image": "i:1"}
	if typ == controlplane.StaticPodStatuses.Type() {
		spec = object{controlplane.ConfigVersion: "1", "conditions": []object{{"type": "Ready", "status": "True"}}}
	}
	text, err := yaml.Marshal(spec)
	var all []*apiv1.Resource
	for _, name := range []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler"} {
		if typ == controlplane.StaticPodStatuses.Type() {
			all = append(all, &apiv1.Resource{Id: "kube-system/" + name + "-n1", Version: 1, Spec: string(text)})
		} else if name == id {
			all = append(all, &apiv1.Resource{Id: name, Version: 1, Spec: string(text)})
		}
	}
	return all, err
}

func (r *rig) MayStop(context.Context, time.Duration) error { return r.stop }

func (r *rig) MayMove(context.Context, netip.Addr) (int, error) { return r.others, nil }

func (r *rig) Move(_ context.Context, to netip.Addr) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.member != to {
		r.changes = append(r.changes, to.String()+" from "+r.at().String())
	}
	r.member = to
	return nil
}

func (r *rig) ForfeitLeadership(context.Context) (string, bool, error) { return "", false, nil }

// RoundTrip is the API server.
func (r *rig) RoundTrip(q *http.Request) (*http.Response, error) {
	w := httptest.NewRecorder()
	switch {
	case q.URL.Path == "/api" || q.URL.Path == "/apis":
		io.WriteString(w, `{"kind":"APIGroupDiscoveryList","items":[{"metadata":{},"versions":[{"version":"v1","resources":[{"resource":"nodes","scope":"Cluster","responseKind":{"kind":"Node"}},{"resource":"pods","scope":"Namespaced","responseKind":{"kind":"Pod"}}]}]}]}`)
	case q.URL.Path == "/api/v1/nodes/n1":
		json.NewEncoder(w).Encode(object{"metadata": object{"name": "n1"}, "status": object{
			"addresses": []object{{"type": "InternalIP", "address": r.at()}}, "conditions": []object{{"type": "Ready", "status": "True"}},
		}})
	case q.URL.Path == "/api/v1/namespaces/kube-system/pods":
		if fields := q.URL.Query().Get("fieldSelector"); fields != "spec.hostNetwork=true,spec.nodeName=n1" {
			r.t.Errorf("it looks for pods with %s", fields)
		}
		pod := func(name, owner string) object {
			return object{"metadata": object{"name": name, "namespace": "kube-system", "ownerReferences": []object{{"kind": owner}}}}
		}
		json.NewEncoder(w).Encode(object{"items": []object{pod("kube-flannel-1", "DaemonSet"), pod("kube-apiserver-n1", "Node"), {"metadata": object{"name": "bare"}}}})
	case q.Method == http.MethodDelete:
		r.mu.Lock()
		defer r.mu.Unlock()
		r.renewed = append(r.renewed, q.URL.Path[strings.LastIndexByte(q.URL.Path, '/')+1:]+" at "+r.at().String())
		io.WriteString(w, "{}")
	case strings.HasSuffix(q.URL.Path, "/endpointslices/kubernetes"):
		json.NewEncoder(w).Encode(object{"endpoints": []object{{"addresses": []any{r.at()}}}})
	default:
		w.WriteHeader(http.StatusNotFound)
	}
	return w.Result(), nil
}

func (r *rig) begin(a *apiv1.ReaddressRequest) string {
	r.t.Helper()
	o, err := r.runner.Start(r.t.Context(), operation.Ask{Name: Name, Arguments: a, By: "jo"})
	put(r.t, err)
	return o.ID
}

// until waits for a state of the operation.
func (r *rig) until(id string, is func(operation.Operation) bool) operation.Operation {
	r.t.Helper()
	for range 3000 {
		time.Sleep(time.Second)
		synctest.Wait()
		o, err := r.runner.Get(id)
		put(r.t, err)
		if is(o) {
			return o
		}
	}
	o, _ := r.runner.Get(id)
	r.t.Fatalf("%+v", o)
	return o
}

func asks(o operation.Operation) bool { return o.Question != nil }

func ended(o operation.Operation) bool { return !o.Ended.IsZero() }

// check compares where the node is, where etcd has it, and its document.
func (r *rig) check(want netip.Addr) {
	r.t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	text, err := os.ReadFile(filepath.Join(r.dir, "config.yaml"))
	put(r.t, err)
	for _, part := range []string{"# 110.5.0.2, 10.5.0.21 and 10.5.0.2.1 stay\n", "cidr: " + want.String() + "/24", "https://" + want.String() + ":6443"} {
		if !strings.Contains(string(text), part) {
			r.t.Errorf("the configuration lacks %q", part)
		}
	}
	if r.at() != want || r.member != want {
		r.t.Errorf("the node is at %s, and in etcd at %s; want %s", r.at(), r.member, want)
	}
}

func TestReaddress(t *testing.T) {
	start(t, func(r *rig) {
		id := r.begin(&apiv1.ReaddressRequest{Address: next.String(), Patch: "{machine: {network: {interfaces: [{interface: eth0, mtu: 1400}]}}}"})
		r.until(id, asks)
		if text, err := r.applier.Text(0); err != nil || !strings.Contains(string(text), "mtu: 1400") {
			t.Errorf("the patch isn't applied: %v", err)
		}
		if got := []string{next.String() + " from " + next.String()}; !slices.Equal(r.changes, got) {
			t.Errorf("etcd was told %q, want %q", r.changes, got)
		}
		put(t, r.runner.Answer(id, ReachQuestion, "yes", "jo"))
		if o := r.until(id, ended); o.State != operation.Done {
			t.Errorf("%s: %s", o.State, o.Error)
		}
		r.check(next)
		if want := []string{"kube-flannel-1 at " + next.String()}; !slices.Equal(r.renewed, want) {
			t.Errorf("it restarts %q, want %q", r.renewed, want)
		}
		if !r.applier.Situation().Try.IsZero() {
			t.Error("it is tried still")
		}
		r.off()
		r.on()
		r.check(next)
	})
}

// Nobody reaches the node, nothing serves, somebody aborts: it is as it was.
func TestGoesBack(t *testing.T) {
	for name, how := range map[string]func(*rig, string){
		"nobody answers": func(*rig, string) {},
		"aborted":        func(r *rig, id string) { r.until(id, asks); put(r.t, r.runner.Abort(id, "jo")) },
		"nothing serves": func(r *rig, _ string) { r.mu.Lock(); defer r.mu.Unlock(); r.broken = true },
	} {
		t.Run(name, func(t *testing.T) {
			start(t, func(r *rig) {
				id := r.begin(&apiv1.ReaddressRequest{Address: next.String()})
				how(r, id)
				if o := r.until(id, ended); o.State == operation.Done || slices.ContainsFunc(o.Steps, func(s operation.Status) bool { return s.State != operation.Undone && s.ID == "move" }) {
					t.Errorf("%s: %+v", o.State, o.Steps)
				}
				r.check(former)
				if want := []string{"kube-flannel-1 at " + former.String()}; !slices.Equal(r.renewed, want) {
					t.Errorf("it restarts %q, want %q", r.renewed, want)
				}
			})
		})
	}
}

// The power fails at the new address: the node comes up at the former one, and tries again.
func TestPowerFails(t *testing.T) {
	start(t, func(r *rig) {
		id := r.begin(&apiv1.ReaddressRequest{Address: next.String()})
		r.until(id, asks)
		r.off()
		r.on()
		r.until(id, asks)
		put(t, r.runner.Answer(id, ReachQuestion, "yes", "jo"))
		if o := r.until(id, ended); o.State != operation.Done {
			t.Errorf("%s: %s", o.State, o.Error)
		}
		r.check(next)
	})
}

// The address has changed before, as with DHCP: only etcd is told. Another change that is being tried meanwhile isn't
// touched.
func TestOnlyEtcd(t *testing.T) {
	start(t, func(r *rig) {
		r.member = next
		id := r.begin(&apiv1.ReaddressRequest{Address: former.String()})
		if o := r.until(id, func(o operation.Operation) bool { return asks(o) || ended(o) }); o.State != operation.Done {
			t.Errorf("%s: %s, %v", o.State, o.Error, o.Question)
		}
		r.check(former)
	})
}

func TestRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		*apiv1.ReaddressRequest
		stop error
		want string
	}{
		"no quorum":     {&apiv1.ReaddressRequest{Address: next.String()}, fmt.Errorf("stop: %w", etcd.ErrQuorum), "quorum"},
		"a secret":      {&apiv1.ReaddressRequest{Address: next.String(), Patch: "{machine: {token: a.b}}"}, nil, "has secrets"},
		"a reboot":      {&apiv1.ReaddressRequest{Address: next.String(), Patch: "{machine: {type: init}}"}, nil, "reboot"},
		"a bad patch":   {&apiv1.ReaddressRequest{Address: next.String(), Patch: "{machine: {network: {interfaces: [{interface: eth0, cidr: x}]}}}"}, nil, "x"},
		"no such field": {&apiv1.ReaddressRequest{Address: next.String(), Patch: "{machine: {nothing: 1}}"}, nil, "nothing"},
	} {
		t.Run(name, func(t *testing.T) {
			start(t, func(r *rig) {
				r.stop = c.stop
				_, err := r.runner.Start(r.t.Context(), operation.Ask{Name: Name, Arguments: c.ReaddressRequest, By: "jo"})
				if err == nil || !strings.Contains(err.Error(), c.want) {
					t.Errorf("%v, want %q", err, c.want)
				}
				r.check(former)
			})
		})
	}
}
