package doctor

import (
	"context"
	"crypto/x509"
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/kubelet"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/kubernetes/vip"
	"github.com/garboard-os/garboard/services/system/clock"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/garboard-os/garboard/services/system/resolver"
	"github.com/garboard-os/garboard/services/system/slots"
	"github.com/garboard-os/garboard/services/system/volumes"
)

// snapshot is what was seen of the node. Conditions only read it. What could not
// be seen is absent: a condition holds by evidence, never for want of it.
type snapshot struct {
	now       time.Time
	sinceBoot time.Duration
	mode      boot.Mode
	tail      func(id string, lines int) []string
	checked   []string // what was looked at, in words
	silent    []string // looks that gave no answer in time

	services map[string]service

	stage     configuration.Stage
	config    *config.Config // nil: there is none
	warnings  []config.Warning
	situation configuration.Situation

	operations  []resource.Object[operation.Spec]
	slots       []resource.Object[slots.Status]
	controllers []resource.Object[resource.Failure] // those that fail
	troubled    []resource.Object[any]

	unrecoverable []resource.Object[volumes.Status] // encrypted volumes without a recovery key

	hostname  string
	address   *network.NodeAddress
	resolvers []netip.Addr
	known     bool // what name servers there are
	shared    []vip.Status
	clock     *clock.Status

	pods         map[string]kubeclient.Object // status, by program
	staticPods   int                          // rendered
	certificates []certificate

	files    files
	wayless  bool      // no default route
	endpoint *endpoint // nil: no configuration names one
	local    *answer   // of this node's apiserver; nil: not asked
	programs map[string]answer
	servers  []resolver.Answer // of names
	images   []*containerd.Registry
	etcd     *member
	cluster  *cluster
	health   kubelet.NodeHealth
}

// service is where a service stands and how it got there.
type service struct {
	dag.Status
	events []dag.Event // of this service, oldest first
}

// certificate is one that something on the node works with.
type certificate struct {
	of   string // its purpose, for the user
	cert *x509.Certificate
	// renewed: the node replaces it automatically.
	renewed bool
}

// collector collects one kind of facts. It gets the snapshot of what is in memory, which
// it must not change, and returns a function that adds to it; nil: it adds nothing.
type collector struct {
	name string // what is checked, for the user
	run  func(ctx context.Context, s *snapshot) func(*snapshot)
}

// collect makes a snapshot: first of what is in memory, then with all collectors in
// parallel.
func (d *Doctor) collect(ctx context.Context) *snapshot {
	s := d.remember()
	ctx, cancel := context.WithTimeout(ctx, collectBudget)
	defer cancel()
	collectors := d.collectors(s)
	type result struct {
		name string
		add  func(*snapshot)
	}
	results := make(chan result, len(collectors)) // room for those that come too late
	waiting := map[string]bool{}
	for _, l := range collectors {
		s.checked = append(s.checked, l.name)
		// While an earlier one of that name still hangs, as on a disk that doesn't answer, a second one isn't started.
		if _, hangs := d.stuck.LoadOrStore(l.name, true); hangs {
			s.silent = append(s.silent, l.name)
			continue
		}
		waiting[l.name] = true
		known := *s // a collector doesn't see what another one adds
		go func() {
			defer d.stuck.Delete(l.name)
			results <- result{l.name, l.try(ctx, &known)}
		}()
	}
	// A moment longer than the collectors' timeout, for those that end because of it.
	grace := time.NewTimer(collectBudget + (budget-collectBudget)/2)
	defer grace.Stop()
	for len(waiting) > 0 {
		select {
		case r := <-results:
			delete(waiting, r.name)
			if r.add != nil {
				r.add(s)
			}
		case <-grace.C:
			s.silent = append(s.silent, slices.Sorted(maps.Keys(waiting))...)
			return s
		}
	}
	return s
}

// try runs the collector. A panic becomes an entry of silent.
func (l collector) try(ctx context.Context, known *snapshot) (add func(*snapshot)) {
	defer func() {
		if p := recover(); p != nil {
			add = func(s *snapshot) { s.silent = append(s.silent, fmt.Sprintf("%s: panic: %v", l.name, p)) }
		}
	}()
	return l.run(ctx, known)
}

// collectors are those that fit the configuration.
func (d *Doctor) collectors(s *snapshot) []collector {
	collectors := []collector{
		{fmt.Sprintf("files: static pods, etcd's data, container logs, free space of %s and %s, memory", boot.StateDir, boot.EphemeralDir), d.collectFiles},
		{"default routes", d.collectRoutes},
	}
	if s.config == nil {
		return collectors
	}
	collectors = append(collectors,
		collector{"the cluster's endpoint " + s.config.Cluster.ControlPlane.Endpoint.String(), d.collectEndpoint},
		collector{"name servers", d.collectNameServers},
		collector{"registries and their mirrors", d.collectRegistries},
	)
	if s.config.Machine.Type.ControlPlane() {
		collectors = append(collectors,
			collector{"kube-apiserver on this node", d.collectLocal},
			collector{"kube-controller-manager and kube-scheduler on this node", d.collectPrograms},
			collector{"etcd on this node: health, members, alarms", d.collectEtcd},
		)
	}
	return append(collectors, collector{"Kubernetes: the node, its certificate requests, its pods, webhooks, APIServices, what was to be made at bootstrap", d.collectCluster})
}

// remember is a snapshot of what is in memory: nothing of it can hang.
func (d *Doctor) remember() *snapshot {
	s := &snapshot{now: d.o.Now(), sinceBoot: d.o.SinceBoot(), mode: d.o.Mode, tail: d.o.Tail, services: map[string]service{}}
	d.rememberServices(s)
	store := d.o.Store
	stage, _ := configuration.Stages.Get(store, configuration.StageID)
	s.stage = stage.Spec
	s.config, _ = configuration.Config(store)
	if d.o.Configuration != nil {
		s.situation = d.o.Configuration.Situation()
		if text, err := d.o.Configuration.Text(0); err == nil {
			_, s.warnings, _ = config.Load("configuration", text)
			// A mirror without TLS is a choice, and was warned of when the configuration was applied.
			s.warnings = slices.DeleteFunc(s.warnings, func(w config.Warning) bool { return strings.HasPrefix(w.Path, "machine.registries.mirrors") })
		}
	}
	hostname, _ := network.Hostnames.Get(store, network.HostnameID)
	s.hostname = hostname.Spec
	if o, err := network.Addresses.Get(store, network.AddressID); err == nil {
		s.address = &o.Spec
	}
	if o, err := network.Resolvers.Get(store, network.ResolversID); err == nil {
		s.resolvers, s.known = o.Spec, true
	}
	s.shared = lists.Of(vip.Statuses.List(store), func(o resource.Object[vip.Status]) vip.Status { return o.Spec })
	if o, err := clock.Statuses.Get(store, clock.StatusID); err == nil {
		s.clock = &o.Spec
	}
	s.slots = slots.Statuses.List(store)
	s.unrecoverable = volumes.WithoutRecovery(store)
	s.health = kubelet.Health(store)
	s.operations, s.controllers = operation.Operations.List(store), resource.Failures.List(store)
	s.troubled = store.Troubled()
	s.staticPods = len(controlplane.StaticPods.List(store))
	s.pods = map[string]kubeclient.Object{}
	for _, o := range controlplane.StaticPodStatuses.List(store) {
		name := strings.TrimSuffix(strings.TrimPrefix(o.ID, kubeSystem+"/"), "-"+s.hostname)
		s.pods[name] = kubeclient.Object{"status": map[string]any(o.Spec)}
	}
	s.certificates = d.rememberCertificates(s.config)
	s.checked = append(s.checked,
		fmt.Sprintf("services: %s, with their events and last log lines", strings.Join(slices.Sorted(maps.Keys(s.services)), ", ")),
		"failures of controllers", "problems of resources", "the machine configuration, its warnings and whether one is staged or tried",
		"operations", "slots", "addresses, the shared one among them, name servers, clock", fmt.Sprintf("%d certificates", len(s.certificates)))
	return s
}

func (d *Doctor) rememberServices(s *snapshot) {
	for _, st := range d.o.Statuses() {
		s.services[st.ID] = service{Status: st}
	}
	for _, e := range d.o.Events() {
		svc, ok := s.services[e.Service]
		if !ok {
			continue
		}
		svc.events = append(svc.events, e)
		s.services[e.Service] = svc
	}
}

// rememberCertificates are those in the configuration and those that the node has
// made. Keys stay where they are.
func (d *Doctor) rememberCertificates(c *config.Config) (all []certificate) {
	add := func(of string, renewed bool, pem config.PEM) {
		if cert, err := pki.ParseCert(pem); err == nil {
			all = append(all, certificate{of, cert, renewed})
		}
	}
	if c != nil {
		add("machine.ca", false, c.Machine.CA.Crt)
		add("cluster.ca", false, c.Cluster.CA.Crt)
		add("cluster.aggregatorCA", false, c.Cluster.AggregatorCA.Crt)
		add("cluster.etcd.ca", false, c.Cluster.Etcd.CA.Crt)
	}
	// What wasn't made yet is empty, and no certificate.
	ownAPI, _ := secrets.API.Get(d.o.Store, secrets.APIID)
	add("the machine API", true, ownAPI.Spec.Serving.Crt)
	ownEtcd, _ := secrets.Etcd.Get(d.o.Store, secrets.EtcdID)
	add("etcd for its clients", true, ownEtcd.Spec.Server.Crt)
	add("etcd among its members", true, ownEtcd.Spec.Peer.Crt)
	add("Garboard as a client of etcd", true, ownEtcd.Spec.Client.Crt)
	ownKubernetes, _ := secrets.Kubernetes.Get(d.o.Store, secrets.KubernetesID)
	add("kube-apiserver", true, ownKubernetes.Spec.APIServer.Crt)
	add("kube-apiserver as a client of kubelets", true, ownKubernetes.Spec.KubeletClient.Crt)
	add("kube-apiserver as a client of etcd", true, ownKubernetes.Spec.EtcdClient.Crt)
	add("kube-apiserver as a client of aggregated servers", true, ownKubernetes.Spec.FrontProxy.Crt)
	add("Garboard as the administrator of Kubernetes", true, ownKubernetes.Spec.Admin.Crt)
	add("kube-controller-manager", true, ownKubernetes.Spec.ControllerManager.Crt)
	add("kube-scheduler", true, ownKubernetes.Spec.Scheduler.Crt)
	ownKubelet, _ := secrets.Kubelet.Get(d.o.Store, secrets.KubeletID)
	add("the kubelet", true, ownKubelet.Spec.Serving.Crt)
	return all
}

// path is a path of the node.
func (d *Doctor) path(parts ...string) string {
	return filepath.Join(append([]string{d.o.root, "/"}, parts...)...)
}

// controlPlane says whether the node is to run one.
func (s *snapshot) controlPlane() bool {
	return s.config != nil && s.config.Machine.Type.ControlPlane()
}

// at is the wall clock at a time since boot.
func (s *snapshot) at(since time.Duration) time.Time { return s.now.Add(since - s.sinceBoot) }

// settles is until when it may be normal that Kubernetes doesn't serve: after a boot longer than at other times.
func (s *snapshot) settles(since time.Time) time.Time {
	return latest(s.at(bootstrapTime), since.Add(problemTime))
}

// latest of some times.
func latest(all ...time.Time) time.Time { return slices.MaxFunc(all, time.Time.Compare) }
