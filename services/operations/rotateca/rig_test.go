package rotateca

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"gopkg.in/yaml.v3"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/merge"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/kubelet"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/operations/operationtest"
	"github.com/garboard-os/garboard/services/operations/rollout"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
)

type object = map[string]any

// rig is a cluster of three control planes and a worker, as the operation sees it. Their
// configurations are real, and so are the handshakes of their servers.
type rig struct {
	rollout.Peers // what isn't there below isn't called

	operationtest.Node
	store *resource.Store
	me    int    // the node of the operation
	dirs  string // of the nodes

	// what follows is guarded by Mu
	nodes []*member
	// lost is a node that doesn't answer.
	lost string
	// authentication is the ConfigMap to which API servers only add.
	authentication map[string]any
	// sealed are Secrets in etcd, with the key that encrypts each of them. API servers write others at any time.
	sealed map[string]config.Secret
	ended  string // the ID of the token of nodes that join
}

type member struct {
	name     string
	address  netip.Addr
	document []byte
	redacted []byte         // document without secrets, if somebody has asked for it
	config   *config.Config // of document
	former   *config.Config // what programs run with for a moment
	version  uint64
	changed  time.Time
	health   kubelet.NodeHealth
}

// startTime is how long programs take to run with new files.
const startTime = 4 * time.Second

// running is what the programs of a node run with now.
func (m *member) running() *config.Config {
	if m.former != nil && time.Since(m.changed) < startTime {
		return m.former
	}
	return m.config
}

var authorities = sync.OnceValues(func() (*config.Secrets, error) { return config.NewSecrets(time.Now().Add(-time.Hour)) })

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{Node: operationtest.Node{T: t}, dirs: t.TempDir()}
	s, err := authorities()
	operationtest.Put(t, err)
	r.sealed = map[string]config.Secret{"first": s.ClusterSecret}
	for i, name := range []string{"n1", "n2", "n3", "w1"} {
		typ := config.ControlPlane
		if name[0] == 'w' {
			typ = config.Worker
		}
		c, err := config.Generate(config.Options{Type: typ, Endpoint: "https://10.5.0.1:6443", Hostname: name, Secrets: s})
		operationtest.Put(t, err)
		text, err := c.Encode()
		operationtest.Put(t, err)
		m := &member{name: name, address: netip.AddrFrom4([4]byte{10, 5, 0, byte(i + 2)}), version: 1, document: append([]byte("# kept\n"), text...)}
		m.config, _, err = config.Load(name, m.document)
		operationtest.Put(t, err)
		r.nodes = append(r.nodes, m)
	}
	c := r.nodes[0].config.Cluster
	r.authentication = object{"client-ca-file": string(c.CA.Crt), "requestheader-client-ca-file": string(c.AggregatorCA.Crt)}
	return r
}

// boot is a start of the node that runs the operation.
func (r *rig) boot() {
	r.T.Helper()
	me := r.nodes[r.me]
	r.store = resource.NewStore()
	operationtest.Put(r.T, configuration.Configs.Put(r.store.As("test"), configuration.ConfigID, me.config))
	operationtest.Put(r.T, network.Addresses.Put(r.store.As("test"), network.AddressID, network.NodeAddress{Primary: me.address}))
	accepts := map[string]func(context.Context, netip.Addr, config.CertKey) error{}
	for _, a := range config.Authorities {
		accepts[a.Name] = func(_ context.Context, n netip.Addr, ca config.CertKey) error { return r.handshake(a, n, ca) }
	}
	r.Dir = filepath.Join(r.dirs, me.name)
	r.Boot(r.store, Definition(Options{
		Store: r.store, Peers: r, AcceptedBy: accepts, IssuedBy: r.issuedBy, Kubernetes: operationtest.Kubernetes(r),
	}))
}

func (r *rig) start(chosen ...string) (operation.Operation, error) {
	return r.Start(Name, &apiv1.RotateCARequest{Authorities: chosen})
}

// run starts the operation and follows it to its end.
func (r *rig) run(answer string, chosen ...string) operation.Operation {
	r.T.Helper()
	o, err := r.start(chosen...)
	operationtest.Put(r.T, err)
	return r.end(o.ID, answer)
}

// end follows an operation, over a power cut.
func (r *rig) end(id, answer string) operation.Operation {
	r.T.Helper()
	return r.End(id, r.boot, func(string) string { return answer })
}

// until waits for a change.
func (r *rig) until(what string) {
	r.T.Helper()
	for range 30000 {
		time.Sleep(time.Second)
		r.Mu.Lock()
		there := slices.Contains(r.Did, what)
		r.Mu.Unlock()
		if there {
			return
		}
	}
	r.T.Fatalf("it never did %q: %q", what, r.Did)
}

func (r *rig) at(a netip.Addr) (*member, error) {
	i := slices.IndexFunc(r.nodes, func(m *member) bool { return m.address == a })
	if i < 0 || r.nodes[i].name == r.lost {
		return nil, connect.NewError(connect.CodeUnavailable, fmt.Errorf("no answer from %s", a))
	}
	return r.nodes[i], nil
}

// handshake is a TLS connection to the server of an authority on a node, with a client
// certificate of ca.
func (r *rig) handshake(a config.Authority, n netip.Addr, ca config.CertKey) error {
	r.Mu.Lock()
	m, err := r.at(n)
	if err != nil {
		r.Mu.Unlock()
		return err
	}
	c := m.running()
	issuing, accepts := a.Of(c)
	trusted := x509.NewCertPool()
	trusted.AppendCertsFromPEM(config.Trusted(*issuing, *accepts))
	signer, _ := a.Of(r.nodes[0].config) // a worker's certificate is signed by a control plane
	if !bytesEqual(signer.Crt, issuing.Crt) {
		signer = issuing
	}
	r.Mu.Unlock()
	serving, err := pair(*signer, pki.Leaf{CN: m.name, DNS: []string{m.name}, Server: true})
	if err != nil {
		return err
	}
	client, err := pair(ca, pki.Leaf{CN: "client", Client: true})
	if err != nil {
		return err
	}
	near, far := net.Pipe()
	defer near.Close()
	served := make(chan error, 1)
	go func() {
		defer far.Close()
		served <- tls.Server(far, &tls.Config{Certificates: []tls.Certificate{serving}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: trusted}).Handshake()
	}()
	conn := tls.Client(near, &tls.Config{ServerName: m.name, RootCAs: trusted, Certificates: []tls.Certificate{client}})
	go io.Copy(io.Discard, conn)
	return errors.Join(conn.Handshake(), <-served)
}

func bytesEqual(a, b []byte) bool { return string(a) == string(b) }

func pair(ca config.CertKey, leaf pki.Leaf) (tls.Certificate, error) {
	leaf.Now = time.Now()
	if len(ca.Key) == 0 {
		return tls.Certificate{}, errors.New("no key")
	}
	crt, key, err := ca.CA().Issue(leaf)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.X509KeyPair(crt, key)
}

func (r *rig) issuedBy(_ context.Context, server netip.AddrPort, ca config.PEM) error {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	m, err := r.at(server.Addr())
	if err != nil {
		return err
	}
	c := m.running()
	now := c.Machine.CA.Crt
	if server.Port() == kubeletPort {
		now = c.Cluster.CA.Crt
	}
	if !bytesEqual(now, ca) {
		return errors.New("an old certificate")
	}
	return nil
}

func (r *rig) Check() error { return r.Restart.Check() }

func (r *rig) Version(_ context.Context, a netip.Addr) (*apiv1.VersionResponse, error) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	_, err := r.at(a)
	return &apiv1.VersionResponse{Version: boot.Version}, err
}

func (r *rig) Services(_ context.Context, a netip.Addr) ([]*apiv1.Service, error) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	_, err := r.at(a)
	return []*apiv1.Service{{Id: "containerd", Up: true}, {Id: "etcd", Up: true}, {Id: "kubelet", Up: true}}, err
}

func (r *rig) Config(_ context.Context, a netip.Addr) (*apiv1.GetConfigResponse, error) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	m, err := r.at(a)
	if err != nil {
		return nil, err
	}
	if m.redacted == nil {
		m.redacted, err = config.Redact(m.document)
	}
	return &apiv1.GetConfigResponse{Document: m.redacted, Digest: strconv.FormatUint(m.version, 10)}, err
}

func (r *rig) Patch(_ context.Context, a netip.Addr, base string, patch []byte) (*apiv1.ApplyConfigResponse, error) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	m, err := r.at(a)
	if err != nil {
		return nil, err
	}
	if base != strconv.FormatUint(m.version, 10) {
		return nil, connect.NewError(connect.CodeAborted, errors.New("the configuration has changed"))
	}
	document, err := merge.Apply(m.document, patch)
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	next, _, err := config.Load(m.name, document)
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	changes := config.Diff(m.config, next)
	for _, c := range changes {
		if c.Effect == config.Reboot {
			r.T.Errorf("node %s would reboot: %s", m.name, c)
		}
	}
	if !strings.HasPrefix(string(document), "# kept") {
		r.T.Errorf("the document of %s has lost its comment", m.name)
	}
	if len(changes) == 0 {
		return &apiv1.ApplyConfigResponse{}, nil
	}
	before := m.config
	m.former, m.document, m.redacted, m.config, m.changed = m.running(), document, nil, next, time.Now()
	m.version++
	if m == r.nodes[r.me] {
		operationtest.Put(r.T, configuration.Configs.Put(r.store.As("test"), configuration.ConfigID, next))
	}
	r.write(m)
	r.Note(m.name + " " + r.phase(before, next))
	return &apiv1.ApplyConfigResponse{}, nil
}

// write is a Secret that a node writes, which each control plane can read, with all others.
func (r *rig) write(m *member) {
	if m.name[0] == 'n' {
		r.sealed["of "+m.name] = m.config.Cluster.Secret
	}
	for name, key := range r.sealed {
		for _, n := range r.nodes {
			if c := n.config.Cluster; n.name[0] == 'n' && c.Secret != key && !slices.Contains(c.AcceptedSecrets, key) {
				r.T.Errorf("node %s can't read the Secret %s, after a change of %s", n.name, name, m.name)
			}
		}
	}
}

// phase is what a change of a configuration is, and which effects it has.
func (r *rig) phase(before, after *config.Config) string {
	was, is := before.Machine, after.Machine
	if was.Token != is.Token && before.Cluster.Token != after.Cluster.Token {
		return "join"
	}
	if bytesEqual(was.CA.Crt, is.CA.Crt) && len(was.AcceptedCAs) == len(is.AcceptedCAs) {
		return "kubelets"
	}
	switch {
	case !bytesEqual(was.CA.Crt, is.CA.Crt):
		return "issue"
	case len(is.AcceptedCAs) > len(was.AcceptedCAs):
		return "accept"
	}
	return "drop"
}

func (r *rig) Resources(_ context.Context, a netip.Addr, typ, id string) (all []*apiv1.Resource, err error) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	m, err := r.at(a)
	if err != nil {
		return nil, err
	}
	add := func(id string, spec any) {
		text, merr := yaml.Marshal(spec)
		err = errors.Join(err, merr)
		all = append(all, &apiv1.Resource{Id: id, Version: 1, Spec: string(text)})
	}
	digests := func(c *config.Config) map[string]string {
		d, derr := c.Digests()
		err = errors.Join(err, derr)
		return d
	}
	// The files are there at once, and the programs run with them later.
	files, running := digests(m.config), digests(m.running())
	switch typ {
	case secrets.Statuses.Type():
		add(secrets.KubeletID, secrets.StatusSpec{Authorities: only(files, config.KubernetesAuthority)})
		if m.name[0] == 'n' {
			add(secrets.EtcdID, secrets.StatusSpec{Version: files[config.EtcdAuthority], Authorities: only(files, config.EtcdAuthority)})
			versions := map[string]string{}
			for _, name := range controlplane.Programs {
				versions[name] = fmt.Sprint(files)
			}
			add(secrets.KubernetesID, secrets.StatusSpec{Programs: versions, Authorities: only(files, config.KubernetesAuthority, config.EtcdAuthority, config.AggregatorAuthority, config.ServiceAccountKey, config.AtRestKey)})
		}
	case etcd.Statuses.Type():
		add(etcd.StatusID, etcd.StatusSpec{Ready: true, Files: running[config.EtcdAuthority]})
	case kubelet.NodeHealths.Type():
		add(kubelet.HealthID, m.health)
	case controlplane.Configs.Type():
		add(id, object{"image": "i:1"})
	case controlplane.StaticPodStatuses.Type():
		for _, name := range controlplane.Programs {
			add("kube-system/"+name+"-"+m.name, object{
				controlplane.ConfigVersion: "1", controlplane.SecretsVersion: fmt.Sprint(running),
				"conditions": []object{{"type": "Ready", "status": "True"}},
			})
		}
	}
	return all, err
}

func only(all map[string]string, names ...string) map[string]string {
	some := maps.Clone(all)
	maps.DeleteFunc(some, func(name, _ string) bool { return !slices.Contains(names, name) })
	return some
}
