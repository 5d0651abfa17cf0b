package apid

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/garboard-os/garboard/api"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/source"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/resource"
	server "github.com/garboard-os/garboard/services/front/api"
	"github.com/garboard-os/garboard/services/kubernetes/peers"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/garboard-os/garboard/tools/testing/freeport"
)

// controlPlane is a node with all that a call of another one goes through: the gate with
// its certificate, PID 1's side of the API, and the configuration on a STATE.
type controlPlane struct {
	addr    netip.Addr
	token   string // a secret of its configuration
	applier *configuration.Applier
	peers   *peers.Client
	bench   *bench
	skew    atomic.Int64 // of its clock
}

func (n *controlPlane) now() time.Time { return time.Now().Add(time.Duration(n.skew.Load())) }

func newControlPlane(t *testing.T, ca pki.CA, name string) *controlPlane {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	listener, addr := freeport.Listen(t, api.Port)
	cfg, err := config.Generate(config.Options{ClusterName: "test", Endpoint: "https://10.5.0.2:6443", Hostname: name})
	must(err)
	cfg.Machine.CA = config.CertKey{Crt: ca.Cert, Key: ca.Key}
	text, err := cfg.Encode()
	must(err)
	text = append([]byte("# the one in the cellar\n"), text...)
	store, l := resource.NewStore(), logs.New(nil)
	n := &controlPlane{addr: addr, token: string(cfg.Machine.Token), peers: peers.New(store)}
	n.peers.Now = n.now
	t.Cleanup(n.peers.Close)
	n.applier = configuration.NewApplier(configuration.ApplierOptions{
		Store: store, Log: l.Logger(configuration.ID), StateDir: t.TempDir(),
		Restart: func(context.Context, string, bool) error { return nil }, Reboot: func(string) { t.Error("it reboots") },
	})
	graph, err := dag.New(dag.Options{Log: l.Logger},
		dag.Service{ID: "udevd", Run: func(ctx context.Context, h *dag.Handle) error { h.Started(""); <-ctx.Done(); return nil }},
		configuration.Service(configuration.Options{
			Store: store, Applier: n.applier, MountState: func(context.Context) (configuration.State, error) { return configuration.StateMounted, nil },
			Sources: []source.Source{{Name: "test", Read: func(context.Context) ([]byte, error) { return text, nil }}},
		}))
	must(err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- graph.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	eventually.That(t, 10*time.Second, "the configuration", func() error { _, err := configuration.Config(store); return err })
	must(network.Hostnames.Put(store.As("test"), network.HostnameID, name))
	runtime, err := resource.NewRuntime(store, l.Logger("controller-runtime"))
	must(err)

	crt, key, err := ca.Issue(pki.Leaf{CN: name, IPs: []netip.Addr{addr}, Server: true, Now: time.Now()})
	must(err)
	n.bench = prepareBench(t, settings{mode: api.ModeNormal, bundle: ca.Cert, cert: crt, key: key}, nil)
	n.bench.backend.close() // the real one comes in its place
	serveNode(t, n.bench.socket, os.Getpid(), server.Options{
		Store: store, Graph: graph, Runtime: runtime, Logs: l, Config: n.applier, Since: dag.SinceBoot,
		Reboot: func(context.Context, string, bool, func() error) (string, error) {
			return "", errors.New("the cluster needs it")
		},
	})
	n.bench.gate.now = n.now
	n.bench.serve(t, listener)
	return n
}

// document is the node's own configuration.
func (n *controlPlane) document(t *testing.T) string {
	t.Helper()
	text, err := n.applier.Text(0)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// What operations ask of another node, from one control plane to the other and back.
func TestPeersRead(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	one, two := newControlPlane(t, ca, "n1"), newControlPlane(t, ca, "n2")
	for name, way := range map[string]struct{ from, to *controlPlane }{"n2": {one, two}, "n1": {two, one}} {
		v, err := way.from.peers.Version(t.Context(), way.to.addr)
		if err != nil || v.GetHostname() != name || v.GetVersion() != boot.Version {
			t.Errorf("%s: version %v, %v", name, v, err)
		}
	}
	services, err := one.peers.Services(t.Context(), two.addr)
	if err != nil || !slices.ContainsFunc(services, func(s *apiv1.Service) bool { return s.GetId() == configuration.ID && s.GetUp() }) {
		t.Errorf("services %v, %v", services, err)
	}
	found, err := one.peers.Resources(t.Context(), two.addr, configuration.Configs.Type(), configuration.ConfigID)
	if err != nil || len(found) != 1 || !strings.Contains(found[0].GetSpec(), "clusterName: test") {
		t.Fatalf("resources %v, %v", found, err)
	}
	cfg, err := one.peers.Config(t.Context(), two.addr)
	if err != nil || !cfg.GetRedacted() || cfg.GetDigest() != configuration.Digest([]byte(two.document(t))) {
		t.Errorf("configuration %v, %v", cfg, err)
	}
	if all := found[0].GetSpec() + string(cfg.GetDocument()); strings.Contains(all, two.token) || strings.Contains(all, string(ca.Key)) {
		t.Error("a peer reads secrets")
	}
	if !strings.Contains(two.document(t), two.token) {
		t.Error("the test looks for something that isn't a secret of the node")
	}
}

// A patch is applied by the node itself to what it has, unless that has changed, or would
// take a reboot.
func TestPeersPatch(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	one, two := newControlPlane(t, ca, "n1"), newControlPlane(t, ca, "n2")
	cfg, err := one.peers.Config(t.Context(), two.addr)
	if err != nil {
		t.Fatal(err)
	}
	const image = "registry.example/kube-scheduler:v9.9.9"
	res, err := one.peers.Patch(t.Context(), two.addr, cfg.GetDigest(), []byte("cluster: {scheduler: {image: "+image+"}}"))
	if err != nil || len(res.GetChanges()) != 1 || res.GetReboot() {
		t.Fatalf("%v, %v", res, err)
	}
	after := two.document(t)
	if !strings.Contains(after, image) || !strings.HasPrefix(after, "# the one in the cellar\n") || !strings.Contains(after, two.token) || strings.Contains(after, "(secret)") {
		t.Errorf("the configuration became %s", after)
	}
	if history, err := two.applier.History(); err != nil || history[0].By != "n1" {
		t.Errorf("history %v, %v", history, err)
	}
	_, err = one.peers.Patch(t.Context(), two.addr, cfg.GetDigest(), []byte("cluster: {scheduler: {image: registry.example/other:v1}}"))
	if connect.CodeOf(err) != connect.CodeAborted {
		t.Errorf("a patch to what isn't there any more: %v", err)
	}
	_, err = one.peers.Patch(t.Context(), two.addr, configuration.Digest([]byte(after)), []byte("machine: {type: worker}"))
	if connect.CodeOf(err) == 0 || err == nil {
		t.Error("a patch that takes a reboot is applied")
	}
	_, err = one.peers.Patch(t.Context(), two.addr, configuration.Digest([]byte(after)), []byte("cluster: {scheduler: {imago: x}}"))
	if connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Errorf("an unknown field: %v", err)
	}
	if now := two.document(t); now != after {
		t.Errorf("a patch that was refused has changed the configuration to %s", now)
	}
	// Another node may send nothing but a patch like this.
	raw := garboardv1connect.NewConfigServiceClient(two.bench.client(t, shown(t, ca, pki.Leaf{CN: "n1", Orgs: []string{string(api.Peer)}}), true), two.bench.url(""))
	base, patch := configuration.Digest([]byte(after)), []byte("cluster: {scheduler: {image: registry.example/other:v1}}")
	for name, req := range map[string]*apiv1.ApplyConfigRequest{
		"a document":           {Document: []byte(after), Base: base, Mode: apiv1.ApplyMode_APPLY_MODE_IMMEDIATE},
		"without a base":       {Patch: patch, Mode: apiv1.ApplyMode_APPLY_MODE_IMMEDIATE},
		"which may reboot":     {Patch: patch, Base: base},
		"which does reboot":    {Patch: patch, Base: base, Mode: apiv1.ApplyMode_APPLY_MODE_REBOOT},
		"for the next boot":    {Patch: patch, Base: base, Mode: apiv1.ApplyMode_APPLY_MODE_ON_REBOOT},
		"which undoes itself":  {Patch: patch, Base: base, Mode: apiv1.ApplyMode_APPLY_MODE_TRY},
		"of an unknown  mode":  {Patch: patch, Base: base, Mode: 99},
		"a document to reboot": {Document: []byte(after), Mode: apiv1.ApplyMode_APPLY_MODE_REBOOT},
	} {
		if _, err := raw.Apply(t.Context(), connect.NewRequest(req)); connect.CodeOf(err) != connect.CodePermissionDenied {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := raw.Confirm(t.Context(), connect.NewRequest(&apiv1.ConfirmConfigRequest{})); connect.CodeOf(err) != connect.CodePermissionDenied {
		t.Errorf("a method outside of the role: %v", err)
	}
}

// A pull gets as far as the node's containerd, which this one hasn't.
func TestPeersPull(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	one, two := newControlPlane(t, ca, "n1"), newControlPlane(t, ca, "n2")
	_, err := one.peers.Pull(t.Context(), two.addr, "registry.example/etcd:1", false, func(uint64, uint64) {})
	if connect.CodeOf(err) != connect.CodeUnavailable || !strings.Contains(err.Error(), "containerd isn't part of this node") {
		t.Error(err)
	}
	if _, err = one.peers.Pull(t.Context(), two.addr, "", false, func(uint64, uint64) {}); connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Error(err)
	}
}

// A certificate that has expired is refused, with the reason; the client has another one
// before that.
func TestPeersCertificateExpires(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	one, two := newControlPlane(t, ca, "n1"), newControlPlane(t, ca, "n2")
	version := func() error { _, err := one.peers.Version(t.Context(), two.addr); return err }
	if err := version(); err != nil {
		t.Fatal(err)
	}
	two.skew.Store(int64(2 * time.Hour))
	// The gate also closes the connection, at about the same time.
	eventually.That(t, 10*time.Second, "the expired certificate to be refused", func() error {
		if err := version(); connect.CodeOf(err) != connect.CodeUnauthenticated || !strings.Contains(err.Error(), "expired at") {
			return errors.Join(errors.New("the call ended otherwise"), err)
		}
		return nil
	})
	one.skew.Store(int64(2 * time.Hour))
	if err := version(); err != nil {
		t.Errorf("with the time of the other node: %v", err)
	}
}

// rotate gives a node a configuration with these authorities, and its gate the trust for it.
func (n *controlPlane) rotate(t *testing.T, issuing config.CertKey, accepted ...config.CertKey) {
	t.Helper()
	cfg, _, err := config.Load("test", []byte(n.document(t)))
	if err != nil {
		t.Fatal(err)
	}
	cfg.Machine.CA, cfg.Machine.AcceptedCAs = issuing, accepted
	text, err := cfg.Encode()
	if err == nil {
		_, err = n.applier.Apply(t.Context(), configuration.Request{Text: text, Mode: configuration.Immediate})
	}
	if err != nil {
		t.Fatal(err)
	}
	crt, key, err := issuing.CA().Issue(pki.Leaf{CN: "n", IPs: []netip.Addr{n.addr}, Server: true, Now: time.Now()})
	if err != nil {
		t.Fatal(err)
	}
	n.bench.write(t, settings{mode: api.ModeNormal, bundle: cfg.Machine.TrustedCAs(), cert: crt, key: key})
}

// Two nodes replace their authority one after the other, without a reboot. They call each
// other all the time, and refuse the old authority afterwards.
func TestPeersWhileTheAuthorityIsReplaced(t *testing.T) {
	t.Parallel()
	made, fresh := newCA(t), newCA(t)
	one, two := newControlPlane(t, made, "n1"), newControlPlane(t, made, "n2")
	former, next := config.CertKey{Crt: made.Cert, Key: made.Key}, config.CertKey{Crt: fresh.Cert, Key: fresh.Key}
	accepts := func(want bool, ca config.CertKey) {
		t.Helper()
		eventually.That(t, 10*time.Second, "both nodes to notice", func() error {
			for _, way := range [][2]*controlPlane{{one, two}, {two, one}} {
				if _, err := way[0].peers.Version(t.Context(), way[1].addr); err != nil {
					return err
				}
				if err := way[0].peers.AcceptedBy(t.Context(), way[1].addr, ca); (err == nil) != want {
					return errors.Join(errors.New("an authority is accepted, or is not"), err)
				}
			}
			return nil
		})
	}
	accepts(false, next)
	for _, step := range []struct {
		issuing  config.CertKey
		accepted []config.CertKey
	}{{former, []config.CertKey{next}}, {next, []config.CertKey{former}}, {next, nil}} {
		for _, n := range []*controlPlane{one, two} {
			n.rotate(t, step.issuing, step.accepted...)
			eventually.That(t, 10*time.Second, "the nodes to call each other", func() error {
				_, err := one.peers.Version(t.Context(), two.addr)
				_, back := two.peers.Version(t.Context(), one.addr)
				return errors.Join(err, back)
			})
		}
	}
	accepts(true, next)
	accepts(false, former)
}
