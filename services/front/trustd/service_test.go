package trustd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/process"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/front/sandbox"
	"github.com/garboard-os/garboard/services/kubernetes/roster"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/garboard-os/garboard/tools/testing/freeport"
)

const socketSuffix = ".sock"

// node is a graph with trustd in it, which runs in this process.
type node struct {
	t       *testing.T
	store   *resource.Store
	graph   *dag.Graph
	b       *bench // of the one that runs, for asking it
	started atomic.Int32
	names   int

	mu    sync.Mutex // guards facts
	facts roster.Facts
}

func (n *node) roster(context.Context) (roster.Facts, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f := n.facts
	f.Records, f.Tokens, f.Now = maps.Clone(f.Records), maps.Clone(f.Tokens), time.Now()
	return f, nil
}

func (n *node) enlist(_ context.Context, name string, r roster.Record) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.facts.Records == nil {
		n.facts.Records = map[string]roster.Record{}
	}
	n.facts.Records[name] = r
	return nil
}

func newNode(t *testing.T, cfg *config.Config) *node {
	t.Helper()
	n := &node{t: t, store: resource.NewStore(), b: &bench{dir: filepath.Join(t.TempDir(), "trustd"), address: freeport.Find(t).String(), log: new(logBuffer)}}
	n.b.peer.Store(&worker)
	l := logs.New(nil)
	own := sandbox.NewSocket(os.Getuid(), n.b.dir+socketSuffix)
	own.PID.Store(int64(os.Getpid()))
	service := Service(Options{Store: n.store, Logs: l, Processes: process.New(), Roster: n.roster, Enlist: n.enlist, dir: n.b.dir, uid: os.Getuid(), address: n.b.address, process: n.run, socket: own})
	service.Health.Period = 100 * time.Millisecond
	var err error
	n.graph, err = dag.New(dag.Options{Log: l.Logger}, service)
	if err != nil {
		t.Fatal(err)
	}
	n.configure(cfg)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.graph.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return n
}

// run is the process of trustd.
func (n *node) run(ctx context.Context, h *dag.Handle) error {
	s, err := newServer(n.b.dir, n.b.dir+socketSuffix, slog.New(slog.NewTextHandler(n.b.log, nil)))
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", n.b.address)
	if err != nil {
		return err
	}
	n.started.Add(1)
	h.Started("Started")
	return s.listener().Serve(ctx, elsewhere{listener, &n.b.peer})
}

func (n *node) configure(cfg *config.Config) {
	n.t.Helper()
	if err := configuration.Configs.Put(n.store.As("test"), configuration.ConfigID, cfg); err != nil {
		n.t.Fatal(err)
	}
}

// certify is what secrets.APIController does on a control plane.
func (n *node) certify(ca pki.CA) {
	n.t.Helper()
	state := controlPlaneState(n.t, ca)
	spec := secrets.APISpec{CA: ca.Cert, Serving: config.CertKey{Crt: state.Cert, Key: state.Key}}
	if err := secrets.API.Put(n.store.As("test"), secrets.APIID, spec); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) wait(what string, ok func(dag.Status) bool) {
	n.t.Helper()
	eventually.That(n.t, 20*time.Second, what, func() error {
		s, _ := n.graph.Status(ID)
		if !ok(s) {
			return fmt.Errorf("%s %s %q %q", s.State, s.Health, s.Message, s.Waiting)
		}
		return nil
	})
}

func machineConfig(typ config.MachineType, ca pki.CA) *config.Config {
	c := &config.Config{}
	c.Machine.Type, c.Machine.Token = typ, token
	c.Machine.CA = config.CertKey{Crt: ca.Cert, Key: ca.Key}
	c.Cluster.Network.PodSubnets = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}
	return c
}

// S-097, Q-09: on a control plane it waits for its certificate, serves, and takes
// another token and another authority without a restart.
func TestS097ServiceThroughItsLife(t *testing.T) {
	t.Parallel()
	ca, next := newCA(t), newCA(t)
	cfg := machineConfig(config.ControlPlane, ca)
	n := newNode(t, cfg)
	n.wait("trustd to wait", func(s dag.Status) bool { return s.Waiting == "certificate of trustd to be made" })
	n.certify(ca)
	n.b.ca = ca
	up := func(s dag.Status) bool { return s.Up }
	n.wait("trustd to be up", up)
	good := request(t, pki.Ed25519, leaf())
	crt, err := n.b.sign(t, token, good)
	if err != nil || !pki.IsWorker(parse(t, crt)) {
		t.Errorf("%s, %v", crt, err)
	}
	if _, err := n.b.sign(t, token, good); err != nil {
		t.Errorf("the same machine again: %v", err)
	}
	_, err = n.b.sign(t, token, request(t, pki.Ed25519, leaf()))
	wantRefused(t, err, connect.CodePermissionDenied, "belongs to a machine with another key, at 192.0.2.20", "kubectl delete node worker-1, or gbctl token revoke node/worker-1 if there is no such Node")
	n.b.from(controlPlane.String())
	_, err = n.b.sign(t, token, good)
	wantRefused(t, err, connect.CodePermissionDenied, "of the control planes")
	n.b.from("10.244.1.1")
	_, err = n.b.sign(t, token, good)
	wantRefused(t, err, connect.CodePermissionDenied, "of pods")
	n.b.from("192.0.2.20")

	other := *cfg
	other.Machine.Token = "zzzzzz.0123456789abcdef"
	n.configure(&other)
	eventually.That(t, 20*time.Second, "the former token to be refused", func() error {
		n.another(&n.b.peer)
		if _, err := n.b.sign(t, token, n.good()); connect.CodeOf(err) != connect.CodeUnauthenticated {
			return fmt.Errorf("%w", errors.Join(err, errors.New("not yet")))
		}
		return nil
	})

	last := other
	last.Machine.CA = config.CertKey{Crt: next.Cert, Key: next.Key}
	n.configure(&last)
	n.certify(next)
	n.b.ca = next
	eventually.That(t, 20*time.Second, "the next authority", func() error {
		n.another(&n.b.peer)
		crt, err := n.b.sign(t, string(last.Machine.Token), n.good())
		if err != nil {
			return err
		}
		return parse(t, crt).CheckSignatureFrom(parse(t, next.Cert))
	})
	n.wait("trustd to be up", up)
	if started := n.started.Load(); started != 1 {
		t.Errorf("it was started %d times", started)
	}
	entries, err := os.ReadDir(n.b.dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		text, err := os.ReadFile(filepath.Join(n.b.dir, e.Name()))
		if err != nil || strings.Contains(string(text), token) {
			t.Errorf("%s holds the token: %v", e.Name(), err)
		}
		if info, err := e.Info(); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", e.Name(), info.Mode(), err)
		}
	}
}

// another makes the next connections come from an address that hasn't asked often.
func (n *node) another(peer *atomic.Pointer[netip.Addr]) {
	next := peer.Load().Next()
	peer.Store(&next)
}

func (n *node) good() []byte {
	l := leaf()
	n.names++ // a name of its own: each request has another key
	l.CN, l.DNS = fmt.Sprintf("worker-%d", n.names), nil
	l.IPs = append([]netip.Addr{*n.b.peer.Load()}, loopback...)
	return request(n.t, pki.Ed25519, l)
}

// A node needs the token to join. With its certificate it gets the next one without it, also for another key and from
// another address; for no other name, and only while the name belongs to the key of that certificate.
func TestRenewalWithoutTheToken(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	cfg := machineConfig(config.ControlPlane, ca)
	n := newNode(t, cfg)
	n.certify(ca)
	n.b.ca = ca
	n.wait("trustd to be up", func(s dag.Status) bool { return s.Up })
	key, err := pki.NewKey(pki.Ed25519)
	must(t, err)
	first, err := pki.NewRequest(key, leaf())
	must(t, err)
	crt, err := n.b.sign(t, token, first)
	must(t, err)

	other := *cfg
	other.Machine.Token = "zzzzzz.0123456789abcdef"
	n.configure(&other)
	eventually.That(t, 20*time.Second, "the former token to end", func() error {
		n.another(&n.b.peer)
		if _, err := n.b.sign(t, token, n.good()); connect.CodeOf(err) != connect.CodeUnauthenticated {
			return fmt.Errorf("%w", errors.Join(err, errors.New("not yet")))
		}
		return nil
	})

	// ask asks for a name with a proof, from an address that hasn't asked before.
	ask := func(name string, own, crt, key []byte, purpose string) ([]byte, error) {
		n.another(&n.b.peer)
		l := leaf()
		l.CN, l.DNS, l.IPs = name, nil, append([]netip.Addr{*n.b.peer.Load()}, loopback...)
		text, err := pki.NewRequest(own, l)
		must(t, err)
		proof, err := pki.Prove(crt, key, purpose, text)
		must(t, err)
		return n.b.ask(t, &apiv1.SignRequest{Request: text, Proof: proof})
	}
	renewed, err := ask("worker-1", key, crt, key, secrets.RenewPurpose)
	if err != nil || !pki.IsWorker(parse(t, renewed)) {
		t.Errorf("its own key: %s, %v", renewed, err)
	}
	next, err := pki.NewKey(pki.Ed25519)
	must(t, err)
	last, err := ask("worker-1", next, renewed, key, secrets.RenewPurpose)
	if err != nil {
		t.Fatalf("another key: %v", err)
	}

	strange, foreign, err := newCA(t).Issue(pki.Leaf{CN: "worker-1", DNS: []string{"worker-1"}, Server: true, Now: time.Now()})
	must(t, err)
	user, users, err := ca.Issue(pki.Leaf{CN: "worker-1", Orgs: []string{"os:reader"}, Client: true, Now: time.Now()})
	must(t, err)
	for what, try := range map[string]func() ([]byte, error){
		"another name":              func() ([]byte, error) { return ask("worker-2", next, last, next, secrets.RenewPurpose) },
		"a control plane's name":    func() ([]byte, error) { return ask("cp-1", next, last, next, secrets.RenewPurpose) },
		"the key before the last":   func() ([]byte, error) { return ask("worker-1", key, renewed, key, secrets.RenewPurpose) },
		"another authority":         func() ([]byte, error) { return ask("worker-1", foreign, strange, foreign, secrets.RenewPurpose) },
		"a user of the machine API": func() ([]byte, error) { return ask("worker-1", users, user, users, secrets.RenewPurpose) },
		"another key's signature":   func() ([]byte, error) { return ask("worker-1", key, last, key, secrets.RenewPurpose) },
		"another purpose":           func() ([]byte, error) { return ask("worker-1", next, last, next, secrets.SignPurpose) },
		"no certificate": func() ([]byte, error) {
			return n.b.sign(t, token, n.good())
		},
		"the request of another": func() ([]byte, error) {
			text := n.good()
			proof, err := pki.Prove(last, next, secrets.RenewPurpose, first)
			must(t, err)
			return n.b.ask(t, &apiv1.SignRequest{Request: text, Proof: proof})
		},
	} {
		n.another(&n.b.peer)
		if crt, err := try(); connect.CodeOf(err) != connect.CodeUnauthenticated {
			t.Errorf("%s: %s, %v", what, crt, err)
		}
	}
	if _, err := ask("worker-1", next, last, next, secrets.RenewPurpose); err != nil {
		t.Errorf("after them the node itself: %v", err)
	}
	// An administrator has deleted the Node: the machine has to join again.
	n.mu.Lock()
	r := n.facts.Records["worker-1"]
	r.Since = r.Since.Add(-roster.Grace)
	n.facts.Records["worker-1"] = r
	n.mu.Unlock()
	_, err = ask("worker-1", next, last, next, secrets.RenewPurpose)
	wantRefused(t, err, connect.CodeUnauthenticated, "the certificate to which the name belongs")
}

// The certificate of a node's kubelet outlives the Node, and so proves nothing for a name that is recorded: a machine
// that was taken over, and reinstalled, doesn't lose its name to the former owner. It proves the name of a node that a
// former release left unrecorded.
func TestFormerOwnerDoesNotGetTheNameBack(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	cfg := machineConfig(config.ControlPlane, ca)
	kubernetes, err := pki.NewKubernetesCA(time.Now())
	must(t, err)
	cfg.Cluster.CA.Crt = kubernetes.Cert
	n := newNode(t, cfg)
	n.certify(ca)
	n.b.ca = ca
	n.facts.Nodes = map[string]bool{"worker-1": true}
	n.wait("trustd to be up", func(s dag.Status) bool { return s.Up })
	crt, key, err := kubernetes.Issue(pki.Leaf{CN: config.NodeUser + "worker-1", Orgs: []string{"system:nodes"}, Client: true, Now: time.Now()})
	must(t, err)
	ask := func() ([]byte, error) {
		n.another(&n.b.peer)
		l := leaf()
		l.IPs = append([]netip.Addr{*n.b.peer.Load()}, loopback...)
		text := request(t, pki.Ed25519, l)
		proof, err := pki.Prove(crt, key, secrets.SignPurpose, text)
		must(t, err)
		return n.b.ask(t, &apiv1.SignRequest{Token: token, Request: text, Proof: proof})
	}
	if _, err := ask(); err != nil {
		t.Errorf("a node that isn't recorded: %v", err)
	}
	_, err = ask()
	wantRefused(t, err, connect.CodePermissionDenied, "belongs to a machine with another key", "kubectl delete node worker-1")
}

// A machine that was given a token for an hour tries it later; and somebody has machine.token out of an old file, which
// an administrator has ended. Both are refused from that moment on, and so is what only looks like a token. Who has
// joined goes on.
func TestTokensEnd(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	n := newNode(t, machineConfig(config.ControlPlane, ca))
	n.certify(ca)
	n.b.ca = ca
	n.wait("trustd to be up", func(s dag.Status) bool { return s.Up })
	record := func(token string, ends time.Time) {
		n.mu.Lock()
		defer n.mu.Unlock()
		tokens := maps.Clone(n.facts.Tokens)
		if tokens == nil {
			tokens = map[string]roster.Token{}
		}
		tokens[roster.TokenID(token)] = roster.NewToken(token, ends)
		n.facts.Tokens = tokens
	}
	const made, guessed = "rack04.0123456789abcdef", "rack04.0123456789abcdeg"
	tries := func(what, with string, counts bool) {
		t.Helper()
		n.another(&n.b.peer)
		crt, err := n.b.sign(t, with, n.good())
		if counts && (err != nil || !pki.IsWorker(parse(t, crt))) {
			t.Errorf("%s: %v", what, err)
		}
		if !counts {
			wantRefused(t, err, connect.CodeUnauthenticated, "nor one of gbctl token create that still counts")
			// What is wrong with its request isn't told to a stranger.
			_, err = n.b.sign(t, with, []byte("nothing"))
			wantRefused(t, err, connect.CodeUnauthenticated)
		}
	}
	tries("before it is made", made, false)
	record(made, time.Now().Add(time.Hour))
	tries("the token of a rack", made, true)
	tries("with its ID only", guessed, false)
	tries("machine.token", token, true)

	key, err := pki.NewKey(pki.Ed25519)
	must(t, err)
	own := func() []byte {
		n.another(&n.b.peer)
		l := leaf()
		l.IPs = append([]netip.Addr{*n.b.peer.Load()}, loopback...)
		text, err := pki.NewRequest(key, l)
		must(t, err)
		return text
	}
	crt, err := n.b.sign(t, made, own())
	must(t, err)
	record(made, time.Now())
	record(token, time.Now().Add(-time.Minute))
	tries("after its end", made, false)
	tries("machine.token after its end", token, false)
	text := own()
	proof, err := pki.Prove(crt, key, secrets.RenewPurpose, text)
	must(t, err)
	if _, err := n.b.ask(t, &apiv1.SignRequest{Token: made, Request: text, Proof: proof}); err != nil {
		t.Errorf("who has joined: %v", err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestWorkersHaveNoTrustd(t *testing.T) {
	t.Parallel()
	n := newNode(t, machineConfig(config.Worker, newCA(t)))
	n.wait("trustd to be skipped", func(s dag.Status) bool {
		return s.State == dag.Skipped && s.Message == "trustd runs on control planes only"
	})
}

// With an error of any kind in what is written, the former state stays in use.
func TestBadStateIsNotTaken(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	good, other := controlPlaneState(t, b.ca), controlPlaneState(t, b.ca)
	s := &server{log: slog.New(slog.DiscardHandler)}
	s.watcher.Dir, s.watcher.Use = b.dir, s.use
	if err := s.watcher.Next(); err != nil {
		t.Fatal(err)
	}
	was := s.watcher.State()
	for name, next := range map[string]facts{
		"half a pair":        {Cert: good.Cert},
		"the key of another": {Cert: good.Cert, Key: other.Key},
	} {
		b.write(t, next)
		if err := s.watcher.Next(); err == nil || s.watcher.State() != was {
			t.Errorf("%s: %v", name, err)
		}
	}
}
