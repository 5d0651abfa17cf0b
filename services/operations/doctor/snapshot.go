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
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/kubernetes/vip"
	"github.com/garboard-os/garboard/services/system/clock"
	"github.com/garboard-os/garboard/services/system/machine"
	"github.com/garboard-os/garboard/services/system/network"
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

	stage     machine.Stage
	config    *config.Config // nil: there is none
	warnings  []config.Warning
	situation machine.Situation

	operations []resource.Object[operation.Spec]

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
	route    route
	endpoint *endpoint // nil: no configuration names one
	local    *answer   // of this node's apiserver; nil: not asked
	programs map[string]answer
	etcd     *member
	cluster  *cluster
}

// service is where a service stands and how it got there.
type service struct {
	dag.Status
	events []dag.Event // of this service, oldest first
}

// certificate is one that something on the node works with.
type certificate struct {
	of   string // in words
	cert *x509.Certificate
	// renewed says that the node replaces it by itself.
	renewed bool
}

// look is one thing to be looked at. It gets what is known from memory, which it
// must not change, and returns what it adds; nil for nothing.
type look struct {
	name string // what was checked, in words
	see  func(ctx context.Context, s *snapshot) func(*snapshot)
}

// collect takes everything in. Memory comes first; the rest side by side.
func (d *Doctor) collect(ctx context.Context) *snapshot {
	s := d.remember()
	ctx, cancel := context.WithTimeout(ctx, lookBudget)
	defer cancel()
	looks := d.looks(s)
	type result struct {
		index int
		add   func(*snapshot)
	}
	results := make(chan result, len(looks)) // room for those that come too late
	waiting := map[int]bool{}
	for i, l := range looks {
		s.checked = append(s.checked, l.name)
		if !d.begin(l.name) {
			s.silent = append(s.silent, l.name)
			continue
		}
		waiting[i] = true
		known := *s // a look never sees what another adds
		go func() {
			defer d.end(l.name)
			results <- result{i, l.try(ctx, &known)}
		}()
	}
	// A moment more than the looks have, for those that end because of it.
	grace := time.NewTimer(lookBudget + (budget-lookBudget)/2)
	defer grace.Stop()
	for len(waiting) > 0 {
		select {
		case r := <-results:
			delete(waiting, r.index)
			if r.add != nil {
				r.add(s)
			}
		case <-grace.C:
			for i := range looks {
				if waiting[i] {
					s.silent = append(s.silent, looks[i].name)
				}
			}
			return s
		}
	}
	return s
}

// try turns a defect of the look into something that is told.
func (l look) try(ctx context.Context, known *snapshot) (add func(*snapshot)) {
	defer func() {
		if p := recover(); p != nil {
			add = func(s *snapshot) { s.silent = append(s.silent, fmt.Sprintf("%s: panic: %v", l.name, p)) }
		}
	}()
	return l.see(ctx, known)
}

// begin is false while an earlier look of that name still hangs, in a disk that
// doesn't answer: it isn't joined by a second one.
func (d *Doctor) begin(name string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, hangs := d.stuck[name]; hangs {
		return false
	}
	d.stuck[name] = struct{}{}
	return true
}

func (d *Doctor) end(name string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.stuck, name)
}

// looks are those that make sense with what is known.
func (d *Doctor) looks(s *snapshot) []look {
	looks := []look{
		{fmt.Sprintf("files: static pods, etcd's data, container logs, free space of %s and %s, memory", boot.StateDir, boot.EphemeralDir), d.lookAtFiles},
		{"default routes", d.lookAtRoutes},
	}
	if s.config == nil {
		return looks
	}
	looks = append(looks, look{"the cluster's endpoint " + s.config.Cluster.ControlPlane.Endpoint.String(), d.lookAtEndpoint})
	if s.config.Machine.Type.ControlPlane() {
		looks = append(looks,
			look{"kube-apiserver on this node", d.lookAtLocal},
			look{"kube-controller-manager and kube-scheduler on this node", d.lookAtPrograms},
			look{"etcd on this node: health, members, alarms", d.lookAtEtcd},
		)
	}
	return append(looks, look{"Kubernetes: the node, its certificate requests, the pods of kube-system, what was to be made at bootstrap", d.lookAtCluster})
}

// remember is what is in memory: nothing of it can hang.
func (d *Doctor) remember() *snapshot {
	s := &snapshot{now: d.o.Now(), sinceBoot: d.o.SinceBoot(), mode: d.o.Mode, tail: d.o.Tail, services: map[string]service{}}
	d.rememberServices(s)
	store := d.o.Store
	if o, err := machine.Stages.Get(store, machine.StageID); err == nil {
		s.stage = o.Spec
	}
	if c, err := machine.Config(store); err == nil {
		s.config = c
	}
	if d.o.Configuration != nil {
		s.situation = d.o.Configuration.Situation()
		if text, err := d.o.Configuration.Text(0); err == nil {
			_, s.warnings, _ = config.Load("configuration", text)
		}
	}
	if o, err := network.Hostnames.Get(store, network.HostnameID); err == nil {
		s.hostname = o.Spec
	}
	if o, err := network.Addresses.Get(store, network.AddressID); err == nil {
		s.address = &o.Spec
	}
	if o, err := network.Resolvers.Get(store, network.ResolversID); err == nil {
		s.resolvers, s.known = o.Spec, true
	}
	for _, o := range vip.Statuses.List(store) {
		s.shared = append(s.shared, o.Spec)
	}
	if o, err := clock.Statuses.Get(store, clock.StatusID); err == nil {
		s.clock = &o.Spec
	}
	s.operations = operation.Operations.List(store)
	s.staticPods = len(controlplane.StaticPods.List(store))
	s.pods = map[string]kubeclient.Object{}
	for _, o := range controlplane.StaticPodStatuses.List(store) {
		name := strings.TrimSuffix(strings.TrimPrefix(o.ID, kubeSystem+"/"), "-"+s.hostname)
		s.pods[name] = kubeclient.Object{"status": map[string]any(o.Spec)}
	}
	s.certificates = d.rememberCertificates(s.config)
	s.checked = append(s.checked,
		fmt.Sprintf("services: %s, with their events and last words", strings.Join(slices.Sorted(maps.Keys(s.services)), ", ")),
		"controllers and their last words", "the machine configuration, its warnings and whether one is staged or tried",
		"operations", "addresses, the shared one among them, name servers, clock", fmt.Sprintf("%d certificates", len(s.certificates)))
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
func (d *Doctor) rememberCertificates(c *config.Config) []certificate {
	var all []certificate
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
	if o, err := secrets.API.Get(d.o.Store, secrets.APIID); err == nil {
		add("the machine API", true, o.Spec.Serving.Crt)
	}
	if o, err := secrets.Etcd.Get(d.o.Store, secrets.EtcdID); err == nil {
		add("etcd for its clients", true, o.Spec.ServerCert)
		add("etcd among its members", true, o.Spec.PeerCert)
		add("Garboard as a client of etcd", true, o.Spec.ClientCert)
	}
	if o, err := secrets.Kubernetes.Get(d.o.Store, secrets.KubernetesID); err == nil {
		add("kube-apiserver", true, o.Spec.APIServer.Crt)
		add("kube-apiserver as a client of kubelets", true, o.Spec.KubeletClient.Crt)
		add("kube-apiserver as a client of etcd", true, o.Spec.EtcdClient.Crt)
		add("kube-apiserver as a client of aggregated servers", true, o.Spec.FrontProxy.Crt)
		add("Garboard as the administrator of Kubernetes", true, o.Spec.Admin.Crt)
		add("kube-controller-manager", true, o.Spec.ControllerManager.Crt)
		add("kube-scheduler", true, o.Spec.Scheduler.Crt)
	}
	if o, err := secrets.Kubelet.Get(d.o.Store, secrets.KubeletID); err == nil {
		add("the kubelet", true, o.Spec.Serving.Crt)
	}
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

// age is how long a service has been in its state.
func (s *snapshot) age(svc service) time.Duration { return s.sinceBoot - svc.Since }
