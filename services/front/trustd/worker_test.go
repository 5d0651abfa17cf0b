package trustd

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/clock"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// cluster is a worker's controllers, and around them what a worker reaches: trustd of
// control planes, and Kubernetes. Addresses are those of a real cluster; only the way
// from one to the other is short.
type cluster struct {
	t      *testing.T
	ca     pki.CA // of the machine API
	store  *resource.Store
	log    *logBuffer
	config *config.Config
	stored string // file
	token  string // of control planes

	mu            sync.Mutex // guards all following fields
	controlPlanes map[string]*bench
	hang          map[string]bool // the address takes packets, and doesn't answer
	asked         []string
	ahead         time.Duration
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{
		t: t, ca: newCA(t), token: token, store: resource.NewStore(), log: new(logBuffer), stored: filepath.Join(t.TempDir(), "machine-api.pem"),
		controlPlanes: map[string]*bench{}, hang: map[string]bool{},
	}
	endpoint, err := config.ParseURL("https://127.0.0.1:6443")
	c.must(err)
	kubernetes, err := pki.NewKubernetesCA(time.Now())
	c.must(err)
	c.config = machineConfig(config.Worker, pki.CA{Cert: c.ca.Cert})
	c.config.Cluster.CA = config.CertKey{Crt: kubernetes.Cert}
	c.config.Cluster.ControlPlane.Endpoint = endpoint
	c.must(network.Hostnames.Put(c.store.As("test"), network.HostnameID, "worker-1"))
	c.must(network.Addresses.Put(c.store.As("test"), network.AddressID, network.NodeAddress{Primary: worker, All: []netip.Prefix{netip.PrefixFrom(worker, 24)}}))
	c.configure(token)
	return c
}

func (c *cluster) must(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

// start starts the worker's controllers.
func (c *cluster) start() (stop func()) {
	c.t.Helper()
	runtime, err := resource.NewRuntime(c.store, slog.New(slog.NewTextHandler(c.log, nil)), secrets.Controllers(secrets.Options{
		Dir: c.t.TempDir(), Now: c.now, APIFile: c.stored, Dial: c.dial,
	})...)
	c.must(err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- runtime.Run(ctx) }()
	stop = sync.OnceFunc(func() { cancel(); <-done })
	c.t.Cleanup(stop)
	return stop
}

func (c *cluster) configure(token string) {
	c.t.Helper()
	next := *c.config
	next.Machine.Token = config.Secret(token)
	c.must(configuration.Configs.Put(c.store.As("test"), configuration.ConfigID, &next))
}

func (c *cluster) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Now().Add(c.ahead)
}

// later lets time pass, for the worker and all control planes.
func (c *cluster) later(d time.Duration) {
	c.t.Helper()
	c.mu.Lock()
	c.ahead += d
	c.mu.Unlock()
	before, _ := clock.Statuses.Get(c.store, "node")
	c.must(clock.Statuses.Put(c.store.As("test"), "node", clock.Status{Synced: !before.Spec.Synced})) // any change
}

// controlPlane starts a trustd that is reached at addr.
func (c *cluster) controlPlane(addr string, ca pki.CA) *bench {
	c.t.Helper()
	b := newBench(c.t)
	b.server.now, b.ca, b.token = c.now, ca, c.token
	state := controlPlaneState(c.t, ca)
	cert, key, err := ca.Issue(pki.Leaf{CN: "cp", IPs: []netip.Addr{netip.MustParseAddr(addr)}, Server: true, Now: time.Now()})
	c.must(err)
	state.Cert, state.Key = cert, key
	b.write(c.t, state)
	eventually.That(c.t, 10*time.Second, "trustd to take in its certificate", func() error {
		if !bytes.Equal(b.server.watcher.State().Certificates[0].Certificate[0], parse(c.t, cert).Raw) {
			return errors.New("not yet")
		}
		return nil
	})
	c.set(addr, b)
	return b
}

// set puts b where addr is; nil: nobody is there.
func (c *cluster) set(addr string, b *bench) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.controlPlanes[addr] = b
}

// dial is the network.
func (c *cluster) dial(ctx context.Context, local netip.Addr, address string) (net.Conn, error) {
	addr, port, err := net.SplitHostPort(address)
	c.must(err)
	if port != "50001" {
		return nil, fmt.Errorf("nobody listens at %s", address)
	}
	c.mu.Lock()
	c.asked = append(c.asked, addr)
	b, hangs := c.controlPlanes[addr], c.hang[addr]
	c.mu.Unlock()
	switch {
	case hangs:
		<-ctx.Done()
		return nil, ctx.Err()
	case b == nil:
		return nil, syscall.ECONNREFUSED
	}
	b.peer.Store(&local)
	return new(net.Dialer).DialContext(ctx, "tcp", b.address)
}

// publish publishes control planes as those that Kubernetes reports.
func (c *cluster) publish(addresses ...string) {
	c.t.Helper()
	for _, a := range addresses {
		c.must(balancer.APIServers.Put(c.store.As(balancer.ID), a+":6443", balancer.APIServer{From: balancer.FromKubernetes}))
	}
}

// certificate waits for one that satisfies ok.
func (c *cluster) certificate(what string, ok func(*x509.Certificate) bool) secrets.APISpec {
	c.t.Helper()
	var spec secrets.APISpec
	eventually.That(c.t, 30*time.Second, what, func() error {
		o, err := secrets.API.Get(c.store, secrets.APIID)
		if err != nil {
			return fmt.Errorf("%w: %s", err, c.log)
		}
		if spec = o.Spec; !ok(parse(c.t, spec.Serving.Crt)) {
			return errors.New("not yet")
		}
		return nil
	})
	if _, err := tls.X509KeyPair(spec.Serving.Crt, spec.Serving.Key); err != nil {
		c.t.Error(err)
	}
	return spec
}

// logged waits for a line of the log.
func (c *cluster) logged(texts ...string) {
	c.t.Helper()
	eventually.That(c.t, 30*time.Second, fmt.Sprintf("the log to say %q", texts), func() error {
		for line := range strings.Lines(c.log.String()) {
			if !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(line, text) }) {
				return nil
			}
		}
		return errors.New(c.log.String())
	})
}

func made(*x509.Certificate) bool { return true }

// A worker gets its certificate from the control planes that Kubernetes knows; the
// first of them being dead, or mute, is no hindrance.
func TestWorkerAsksTheNextControlPlane(t *testing.T) {
	t.Parallel()
	for _, mute := range []bool{false, true} {
		t.Run(fmt.Sprint("mute ", mute), func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			c.publish("10.5.0.2", "10.5.0.3")
			c.hang["10.5.0.2"] = mute
			c.controlPlane("10.5.0.3", c.ca)
			c.start()
			spec := c.certificate("the worker's certificate", made)
			cert := parse(t, spec.Serving.Crt)
			if cert.Subject.CommonName != "worker-1" || !bytes.Equal(spec.CA, c.ca.Cert) || cert.VerifyHostname(worker.String()) != nil {
				t.Errorf("%s %v", cert.Subject, cert.IPAddresses)
			}
			if c.mu.Lock(); !slices.Equal(c.asked, []string{"10.5.0.2", "10.5.0.3"}) {
				t.Errorf("asked %v", c.asked)
			}
			c.mu.Unlock()
		})
	}
}

// Before the kubelet has joined there is the endpoint.
func TestWorkerFallsBackToTheEndpoint(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.controlPlane("127.0.0.1", c.ca) // the host of the endpoint
	c.start()
	c.certificate("the worker's certificate", made)
}

// A worker that knows nobody yet asks at once when Kubernetes has told whom.
func TestWorkerAsksWhenKubernetesLists(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.controlPlane("10.5.0.3", c.ca)
	c.start()
	c.logged("no control plane is known yet")
	c.publish("10.5.0.3")
	c.certificate("the worker's certificate", made)
}

// After a boot a worker goes on with the certificate that it has, while nobody is
// there to sign another one; not with one that has expired.
func TestWorkerKeepsItsCertificate(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.publish("10.5.0.3")
	b := c.controlPlane("10.5.0.3", c.ca)
	stop := c.start()
	first := c.certificate("the worker's certificate", made)
	eventually.That(t, 10*time.Second, "it is kept", func() error { _, err := os.Stat(c.stored); return err })
	if info, err := os.Stat(c.stored); err != nil || info.Mode() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	reboot := func() {
		stop()
		c.must(secrets.API.Delete(c.store.As("secrets.APIController"), secrets.APIID))
		stop = c.start()
	}
	c.set("10.5.0.3", nil)
	reboot()
	if now := c.certificate("the worker's certificate after a boot", made); !bytes.Equal(now.Serving.Crt, first.Serving.Crt) || !bytes.Equal(now.Serving.Key, first.Serving.Key) {
		t.Error("it is another one")
	}
	// It has another name: the old certificate is better than none.
	stop()
	c.must(network.Hostnames.Put(c.store.As("test"), network.HostnameID, "worker-2"))
	reboot()
	if now := c.certificate("the worker's certificate under a new name", made); !bytes.Equal(now.Serving.Crt, first.Serving.Crt) {
		t.Error("it is another one")
	}
	c.set("10.5.0.3", b)
	c.later(time.Minute)
	c.certificate("one for the new name", func(cert *x509.Certificate) bool { return cert.Subject.CommonName == "worker-2" })

	c.set("10.5.0.3", nil)
	c.later(pki.LeafValidity + time.Hour)
	reboot()
	c.logged("the stored certificate of the machine API", "isn't used: it expired on")
	if _, err := secrets.API.Get(c.store, secrets.APIID); err == nil {
		t.Error("it is used")
	}
}

// All are dead, which is told one by one; then one comes back.
func TestWorkerWaitsForControlPlanes(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.publish("10.5.0.2", "10.5.0.3")
	b := c.controlPlane("10.5.0.3", c.ca)
	c.set("10.5.0.3", nil)
	c.start()
	c.logged("controller failed: no control plane signs a certificate for the machine API: 10.5.0.2: ", "connection refused; 10.5.0.3: ", "; 127.0.0.1: ")
	c.set("10.5.0.3", b)
	c.certificate("the worker's certificate", made)
}

// A wrong token: it says what to do, and the right one helps at once.
func TestWorkerWithWrongToken(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.publish("10.5.0.2")
	b := c.controlPlane("10.5.0.2", c.ca)
	wrong := "zzzzzz.0123456789abcdef"
	c.configure(wrong)
	c.start()
	c.logged("10.5.0.2: it doesn't take this node's token: a node that joins", "change that: it takes effect at once")
	if text := c.log.String() + b.log.String(); strings.Contains(text, wrong) {
		t.Errorf("a log holds the token: %s", text)
	}
	c.configure(token)
	c.certificate("the worker's certificate", made)
}

// Somebody with another authority at a control plane's address isn't told the token.
func TestWorkerDoesntTrustAnImpostor(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.publish("10.5.0.2", "10.5.0.3")
	impostor := c.controlPlane("10.5.0.2", newCA(t))
	c.controlPlane("10.5.0.3", c.ca)
	c.start()
	c.certificate("the worker's certificate", made)
	if text := impostor.log.String(); strings.Contains(text, "refused") || strings.Contains(text, "signed") {
		t.Errorf("the impostor was asked: %s", text)
	}
}

// S-157: a certificate is renewed in time, by whoever is there then, for the same
// key and without the token; and while nobody is there, the worker goes on with the one that it has.
func TestWorkerRenews(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.publish("10.5.0.2", "10.5.0.3")
	c.controlPlane("10.5.0.2", c.ca)
	c.controlPlane("10.5.0.3", c.ca)
	c.start()
	first := c.certificate("the worker's certificate", made)
	c.later(pki.LeafValidity - pki.RenewBefore - time.Hour)
	c.set("10.5.0.2", nil)
	c.set("10.5.0.3", nil)
	c.later(2 * time.Hour)
	c.logged("renew the certificate of the machine API, which expires on " + parse(t, first.Serving.Crt).NotAfter.Format(time.DateOnly))
	if now := c.certificate("the certificate to be there", made); !bytes.Equal(now.Serving.Crt, first.Serving.Crt) {
		t.Error("the certificate is another one, and nobody is there to sign it")
	}
	c.token = "zzzzzz.0123456789abcdef" // that with which the worker has joined is at its end
	c.controlPlane("10.5.0.3", c.ca)
	c.later(time.Minute)
	renewed := c.certificate("the renewal", func(cert *x509.Certificate) bool {
		return cert.NotAfter.After(parse(t, first.Serving.Crt).NotAfter)
	})
	if !bytes.Equal(renewed.Serving.Key, first.Serving.Key) {
		t.Error("the key is another one")
	}
}
