package doctor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/roster"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/clock"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/garboard-os/garboard/services/system/resolver"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

const nodeName = "n1"

// patience of a test for what the controllers and services of its node do.
const patience = 30 * time.Second

// pace is measured before the first node of all tests begins. What a diagnosis may take is
// a promise: a person waits for it.
var pace = sync.OnceValue(eventually.Measure)

var nodeAddress = netip.MustParseAddr("10.5.0.2")

// node is a node as far as the doctor sees one: resources as the real controllers
// make them, a real graph, real files below a directory, and servers in the place of
// etcd, Kubernetes and the kubelet. As made it is healthy; a test makes it ill.
type node struct {
	have      func(ctx context.Context, image, instead string) error // of static pods
	t         *testing.T
	dir       string
	config    *config.Config
	authority pki.CA // of Kubernetes, with its key
	store     *resource.Store
	logs      *logs.Logs
	graph     *dag.Graph
	api       *kubernetesAPI
	etcd      *etcdServer
	others    map[string]*server // of the control plane's other programs
	kubelet   *server

	age       atomic.Int64 // since boot, beside what has passed
	now       func() time.Time
	began     time.Time
	mode      boot.Mode
	full      func(path string) (space, bool)
	dial      func(ctx context.Context, from netip.Addr, address string) (net.Conn, error) // to trustd; nil: not at all
	text      []byte
	situation configuration.Situation
	answers   []resolver.Answer // of name servers
	images    []*containerd.Registry
	wayless   bool // it has no default route
}

// ill changes a node before it starts.
type ill func(*node, map[string]*dag.Service)

func (n *node) must(err error) {
	n.t.Helper()
	if err != nil {
		n.t.Fatal(err)
	}
}

// start runs a node until the test ends. Its services have been up for a while
// unless they are not to be.
func start(t *testing.T, typ config.MachineType, illnesses ...ill) *node {
	t.Helper()
	pace()
	n := &node{t: t, dir: t.TempDir(), store: resource.NewStore(), logs: logs.New(nil), began: time.Now(), now: time.Now, mode: boot.Machine}
	n.full = func(string) (space, bool) {
		return space{size: 100 << 30, free: 50 << 30, nodes: 1000, left: 900}, true
	}
	n.age.Store(int64(time.Hour))
	n.api = &kubernetesAPI{t: t, objects: map[string]kubeclient.Object{}, missing: map[string]bool{}, fails: map[string]func(http.ResponseWriter){}}
	n.serve(typ)
	services := n.services()
	for _, i := range illnesses {
		i(n, services)
	}
	n.publish()
	n.files()
	n.run(services)
	n.settle()
	return n
}

// serve starts the servers and makes a configuration that names them.
func (n *node) serve(typ config.MachineType) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	n.must(err)
	made, err := config.NewSecrets(time.Now())
	n.must(err)
	c, err := config.Generate(config.Options{
		ClusterName: "test", Endpoint: "https://" + listener.Addr().String(), Type: typ, Secrets: made, Hostname: nodeName, InstallDisk: "/dev/sda", AllowScheduling: true,
	})
	n.must(err)
	// A worker's configuration has no key to sign with.
	ca := made.KubernetesCA.CA()
	n.authority = ca
	serveTLS(n.t, listener, n.api, issue(n.t, ca, pki.Leaf{CN: "kube-apiserver", IPs: []netip.Addr{netip.MustParseAddr("127.0.0.1")}, DNS: []string{"localhost", balancer.ServerName}}))
	if typ.ControlPlane() {
		port := listener.Addr().(*net.TCPAddr).Port
		c.Cluster.ControlPlane.LocalAPIServerPort = port
	}
	n.etcd = newEtcd(n.t, made.EtcdCA)
	n.others = map[string]*server{controllerManager: newServer(n.t, "/healthz"), scheduler: newServer(n.t, "/readyz")}
	n.kubelet = &server{code: http.StatusOK, body: podList(staticPod(apiServer, running), staticPod(controllerManager, running), staticPod(scheduler, running))}
	n.kubelet.url = serveTLS(n.t, nil, n.kubelet, issue(n.t, ca, pki.Leaf{CN: "system:node:" + nodeName, DNS: []string{nodeName}}))
	n.api.put(kubeclient.Object{"apiVersion": "v1", "kind": "Node", "metadata": map[string]any{"name": nodeName, "labels": map[string]any{"node-role.kubernetes.io/control-plane": ""}},
		"status": map[string]any{"conditions": []any{readiness("Ready", "True", "KubeletReady", "kubelet is posting ready status")}}})
	n.text, err = c.Encode()
	n.must(err)
	n.config, _, err = config.Load("test", n.text)
	n.must(err)
}

func readiness(typ, status, reason, message string) map[string]any {
	return map[string]any{"type": typ, "status": status, "reason": reason, "message": message, "lastTransitionTime": time.Now().Add(-time.Hour).UTC().Format(time.RFC3339)}
}

// services are those of a node, with their dependencies; each is up at once.
func (n *node) services() map[string]*dag.Service {
	all := map[string]*dag.Service{}
	for id, needs := range map[string][]string{
		"udevd": nil, "machined": {"udevd"}, "networkd": {"udevd"}, "disks": {"machined"}, "timed": {"networkd", "disks"}, "containerd": {"disks"},
		"etcd": {"containerd", "networkd", "timed"}, "kubelet": {"containerd", "networkd", "timed"},
	} {
		all[id] = &dag.Service{ID: id, DependsOn: needs, Run: func(ctx context.Context, h *dag.Handle) error {
			h.Started("Started")
			<-ctx.Done()
			return nil
		}}
	}
	if !n.config.Machine.Type.ControlPlane() {
		all["etcd"].Skip = func() string { return "etcd runs on control planes only" }
	}
	return all
}

// publish puts what services publish, and runs the controllers.
func (n *node) publish() {
	if n.config == nil {
		n.must(configuration.Stages.Put(n.store.As(configuration.ID), configuration.StageID, configuration.Maintenance))
		return
	}
	n.must(configuration.Stages.Put(n.store.As(configuration.ID), configuration.StageID, configuration.Configured))
	n.must(configuration.Configs.Put(n.store.As(configuration.ID), configuration.ConfigID, n.config))
	w := n.store.As(network.ID)
	n.must(network.Hostnames.Put(w, network.HostnameID, nodeName))
	n.must(network.Addresses.Put(w, network.AddressID, network.NodeAddress{Primary: nodeAddress, All: []netip.Prefix{netip.PrefixFrom(nodeAddress, 24)}}))
	if _, err := network.Resolvers.Get(n.store, network.ResolversID); err != nil {
		n.must(network.Resolvers.Put(w, network.ResolversID, []netip.Addr{netip.MustParseAddr("10.5.0.1")}))
	}
	if _, err := clock.Statuses.Get(n.store, clock.StatusID); err != nil {
		n.must(clock.Statuses.Put(n.store.As(clock.ID), clock.StatusID, clock.Status{Synced: true, Source: clock.SourceNTP, LastSync: time.Now()}))
	}
	if n.config.Machine.Type.ControlPlane() {
		if _, err := etcd.Statuses.Get(n.store, etcd.StatusID); err != nil {
			n.must(etcd.Statuses.Put(n.store.As("etcd"), etcd.StatusID, etcd.StatusSpec{Ready: true, Endpoint: n.etcd.client}))
		}
	}
	makers := secrets.Controllers(secrets.Options{Dir: n.path("system/secrets"), Balancer: n.endpoint(), Dial: n.dial, APIFile: n.path("machine-api.pem")})
	if !n.config.Machine.Type.ControlPlane() && n.dial == nil {
		// It would ask other nodes, and there are none.
		makers = slices.DeleteFunc(makers, func(c resource.Controller) bool { return c.Name == apiSecrets })
	}
	rt, err := resource.NewRuntime(n.store, n.logs.Logger("controller-runtime"), append(
		makers,
		controlplane.Controllers(controlplane.Options{
			Logs: n.logs, StaticPodsDir: n.path(boot.StaticPodsDir), CheckpointsDir: n.path(boot.CheckpointsDir), FilesDir: n.path("etc/kubernetes"), AuditDir: n.path("audit"), SecretsDir: n.path("system/secrets"), CNIConfDir: n.path("cni"),
			SubnetFile: n.path("subnet.env"), KubeletURL: n.kubelet.url, Have: n.have,
			Initialized: func(context.Context, resource.Reader, string) (bool, error) { return false, nil },
			Roster:      func(context.Context) (roster.Facts, error) { return roster.Facts{}, nil },
			Issuers: func(_ context.Context, _ resource.Reader, _, issuer string) ([]string, error) {
				return []string{issuer}, nil
			},
		})...)...)
	n.must(err)
	n.background(func(ctx context.Context) { n.must(rt.Run(ctx)) })
}

func (n *node) background(run func(context.Context)) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); run(ctx) }()
	n.t.Cleanup(func() { cancel(); <-done })
}

func (n *node) run(services map[string]*dag.Service) {
	var list []dag.Service
	for _, s := range services {
		list = append(list, *s)
	}
	graph, err := dag.New(dag.Options{Log: n.logs.Logger, SinceBoot: n.sinceBoot}, list...)
	n.must(err)
	n.graph = graph
	n.background(func(ctx context.Context) { n.must(graph.Run(ctx)) })
}

func (n *node) sinceBoot() time.Duration { return time.Since(n.began) + time.Duration(n.age.Load()) }

// later lets time pass since the boot.
func (n *node) later(d time.Duration) { n.age.Add(int64(d)) }

// settle waits until controllers and services have done what they can.
func (n *node) settle() {
	n.t.Helper()
	if n.config != nil && n.config.Machine.Type.ControlPlane() && len(n.config.Cluster.AggregatorCA.Crt) > 0 {
		eventually.That(n.t, patience, "secrets and manifests", func() error {
			_, err := secrets.Kubernetes.Get(n.store, secrets.KubernetesID)
			if status, e := etcd.Statuses.Get(n.store, etcd.StatusID); err == nil && e == nil && status.Spec.Ready {
				if names, _ := filepath.Glob(n.path(boot.StaticPodsDir, "*.yaml")); len(names) < 3 {
					return fmt.Errorf("%d static pods", len(names))
				}
			}
			if err == nil && len(controlplane.BootstrapManifests.List(n.store)) == 0 {
				return errors.New("no manifests")
			}
			return err
		})
	}
	eventually.That(n.t, patience, "services that stand still", func() error {
		for _, s := range n.graph.Statuses() {
			if s.State == dag.Initialized {
				return fmt.Errorf("%s is %s", s.ID, s.State)
			}
		}
		if st, _ := n.graph.Status("containerd"); !st.Up && st.State != dag.Failed && st.State != dag.Waiting && st.State != dag.Preparing {
			return fmt.Errorf("%s is %s", st.ID, st.State)
		}
		return nil
	})
}

func (n *node) path(parts ...string) string {
	return filepath.Join(append([]string{n.dir}, parts...)...)
}

func (n *node) write(text string, parts ...string) {
	n.t.Helper()
	path := n.path(parts...)
	n.must(os.MkdirAll(filepath.Dir(path), 0o755))
	n.must(os.WriteFile(path, []byte(text), 0o600))
}

// files are those of a node that has been up for a while.
func (n *node) files() {
	n.writeNew("MemTotal:        4026532 kB\nMemFree:         1000000 kB\nMemAvailable:    3000000 kB\n", "/proc/meminfo")
	if n.config == nil {
		return
	}
	if _, err := os.Lstat(n.path(boot.EtcdDataDir)); err != nil && n.config.Machine.Type.ControlPlane() {
		n.write("", boot.EtcdDataDir, "member", "snap", "db")
	}
	if _, err := os.Stat(n.path(clientFile)); err == nil {
		return
	}
	crt, key, err := n.authority.Issue(pki.Leaf{CN: "system:node:" + nodeName, Orgs: []string{"system:nodes"}, Client: true, Now: time.Now()})
	n.must(err)
	n.writeNew(string(crt)+string(key), clientFile)
}

// writeNew leaves what a test has put there.
func (n *node) writeNew(text string, parts ...string) {
	if _, err := os.Lstat(n.path(parts...)); err == nil {
		return
	}
	n.write(text, parts...)
}

// Text and Situation make a node the doctor's Configuration.
func (n *node) Text(uint64) ([]byte, error) {
	if n.text == nil {
		return nil, configuration.ErrNoConfig
	}
	return n.text, nil
}
func (n *node) Situation() configuration.Situation { return n.situation }

// endpoint stands in for the node's balancer, which passes everything on to it.
func (n *node) endpoint() string {
	if n.config == nil {
		return ""
	}
	return n.config.Cluster.ControlPlane.Endpoint.String()
}

func (n *node) doctor() *Doctor {
	programs := map[string]string{}
	for name, s := range n.others {
		programs[name] = s.url
	}
	return New(Options{
		Mode: n.mode, Store: n.store, Statuses: n.graph.Statuses, Events: n.graph.Events, Tail: n.logs.Tail, Configuration: n, SinceBoot: n.sinceBoot, Now: n.now,
		root: n.dir, health: n.etcd.health, programs: programs, balancer: n.endpoint(), statfs: n.full, wayless: func() bool { return n.wayless },
		resolvers:  func(context.Context, *resource.Store, *config.Config) []resolver.Answer { return n.answers },
		registries: func(context.Context, *config.Config) []*containerd.Registry { return n.images },
	})
}

// diagnose returns the findings, and fails the test where it takes too long.
func (n *node) diagnose() []*garboardv1.Finding {
	n.t.Helper()
	began := time.Now()
	found, checked := n.doctor().Diagnose(n.t.Context())
	if err := pace().Kept(began, time.Now(), budget); err != nil {
		n.t.Errorf("the diagnosis: %v", err)
	}
	if len(checked) == 0 {
		n.t.Error("nothing was checked")
	}
	return found
}

// finds expects the condition, with all of the words somewhere in it, and returns
// it. It waits: what it depends on may only be happening.
func (n *node) finds(id string, severity garboardv1.Finding_Severity, words ...string) *garboardv1.Finding {
	n.t.Helper()
	var found *garboardv1.Finding
	eventually.That(n.t, patience, "finding "+id, func() error {
		all := n.diagnose()
		for _, f := range all {
			text := show(f)
			if f.Id != id || slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(text, w) }) {
				continue
			}
			if f.Severity != severity {
				return fmt.Errorf("it is %s, not %s:\n%s", f.Severity, severity, showAll(all))
			}
			found = f
			return nil
		}
		return fmt.Errorf("no %s with %q among:\n%s", id, words, showAll(all))
	})
	if found.What == "" || found.Why == "" || found.Next == "" || len(found.Evidence) == 0 {
		n.t.Errorf("it lacks something:\n%s", show(found))
	}
	n.t.Log(show(found))
	return found
}

// healthy expects no finding at all.
func (n *node) healthy() {
	n.t.Helper()
	eventually.That(n.t, patience, "no finding", func() error {
		if all := n.diagnose(); len(all) > 0 {
			return errors.New("\n" + showAll(all))
		}
		return nil
	})
}

// lacks expects that the condition doesn't hold.
func (n *node) lacks(ids ...string) {
	n.t.Helper()
	eventually.That(n.t, patience, fmt.Sprintf("no finding %q", ids), func() error {
		for _, f := range n.diagnose() {
			if slices.Contains(ids, f.Id) {
				return fmt.Errorf("found:\n%s", show(f))
			}
		}
		return nil
	})
}

func show(f *garboardv1.Finding) string {
	return fmt.Sprintf("%s %s: %s\n  why: %s\n  next: %s\n  %s", strings.TrimPrefix(f.Severity.String(), "SEVERITY_"), f.Id, f.What, f.Why, f.Next, strings.Join(f.Evidence, "\n  "))
}

func showAll(all []*garboardv1.Finding) string {
	var out []string
	for _, f := range all {
		out = append(out, show(f))
	}
	return strings.Join(out, "\n")
}
