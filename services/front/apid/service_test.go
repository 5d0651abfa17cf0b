package apid

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/process"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/front/statefile"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/clock"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/garboard-os/garboard/tools/testing/freeport"
)

// node is a graph with apid in it, whose gate is a process of this program.
type node struct {
	store   *resource.Store
	graph   *dag.Graph
	console *syncBuffer
	b       *bench
	pids    chan int
}

type syncBuffer struct {
	mu sync.Mutex
	bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Buffer.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Buffer.String()
}

func newNode(t *testing.T, cmdline string) *node {
	t.Helper()
	dir := t.TempDir()
	n := &node{store: resource.NewStore(), console: new(syncBuffer), pids: make(chan int, 8)}
	n.b = &bench{dir: filepath.Join(dir, "apid"), socket: filepath.Join(dir, "machine.sock"), address: freeport.Find(t).String()}
	table := process.New()
	l := logs.New(logs.Plain(n.console))
	run := func(ctx context.Context, h *dag.Handle) error {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), gateVariable+"="+strings.Join([]string{n.b.dir, n.b.socket, n.b.address}, " "))
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		out := l.Writer(ID)
		defer out.Close()
		cmd.Stderr = out
		child, err := table.Start(cmd)
		if err != nil {
			return err
		}
		n.pids <- child.Pid()
		h.Started("Started")
		select {
		case <-child.Done():
			return child.Wait()
		case <-ctx.Done():
			return child.Stop(5 * time.Second)
		}
	}
	service := Service(Options{
		Store: n.store, Logs: l, Processes: table, Cmdline: boot.ParseCmdline(cmdline),
		dir: n.b.dir, socket: dag.File(n.b.socket), uid: os.Getuid(), address: n.b.address, signed: time.Second, process: run,
	})
	service.Health.Period = 200 * time.Millisecond
	var err error
	n.graph, err = dag.New(dag.Options{Log: l.Logger}, service)
	if err != nil {
		t.Fatal(err)
	}
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

func put[S any](t *testing.T, n *node, k *resource.Kind[S], id string, spec S) {
	t.Helper()
	if err := k.Put(n.store.As("test"), id, spec); err != nil {
		t.Fatal(err)
	}
}

func (n *node) wait(t *testing.T, what string, ok func(dag.Status) bool) {
	t.Helper()
	eventually.That(t, 20*time.Second, what, func() error {
		s, _ := n.graph.Status(ID)
		if !ok(s) {
			return fmt.Errorf("%s %s %q %q", s.State, s.Health, s.Message, s.Waiting)
		}
		return nil
	})
}

// A node's gate from its first breath: it waits, serves maintenance mode, tells how
// to reach it, takes in the node's own certificate, and the next one, all in one
// process.
func TestServiceThroughItsLife(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	n.wait(t, "apid to wait", func(s dag.Status) bool {
		return s.Waiting == fmt.Sprintf("certificate of the machine API to be made, file %q to exist, the configuration to be looked for", n.b.socket)
	})
	n.b.backend = newRecorder(t, n.b.socket, everything())
	put(t, n, configuration.Stages, configuration.StageID, configuration.Maintenance)
	n.wait(t, "apid to be up", func(s dag.Status) bool { return s.Up })
	version, _ := api.Lookup("/garboard.v1.NodeService/Version")
	if err := ask(t.Context(), n.b.client(t, nil, true), n.b.url(""), version); err != nil {
		t.Fatal(err)
	}
	put(t, n, network.Addresses, network.AddressID, network.NodeAddress{Primary: netip.MustParseAddr("10.0.2.15")})
	print := api.ShownFingerprint(parse(t, n.b.written(t).Cert).Raw)
	want := "maintenance mode: API at https://10.0.2.15:50000, certificate SHA-256 " + print +
		"; apply a configuration with: gbctl apply-config --insecure --fingerprint " + print + " -n 10.0.2.15 -f FILE\n"
	eventually.That(t, 20*time.Second, "the console to say it", func() error {
		if text := n.console.String(); strings.Count(text, want) != 1 {
			return fmt.Errorf("%q", text)
		}
		return nil
	})

	// Its disk is locked.
	put(t, n, configuration.Stages, configuration.StageID, configuration.Locked)
	eventually.That(t, 20*time.Second, "the console to say it", func() error {
		if text := n.console.String(); !strings.Contains(text, "the disk is locked: API at https://10.0.2.15:50000, certificate SHA-256 "+print+
			"; unlock it with: gbctl unlock --insecure --fingerprint "+print+" -n 10.0.2.15\n") {
			return fmt.Errorf("%q", text)
		}
		return nil
	})

	// It has a configuration, and no certificate yet: closed to all.
	put(t, n, configuration.Stages, configuration.StageID, configuration.Configured)
	n.wait(t, "apid to be closed", func(s dag.Status) bool { return !s.Up })
	eventually.That(t, 10*time.Second, "strangers to be refused by a node with a configuration", func() error {
		if err := ask(t.Context(), n.b.client(t, nil, true), n.b.url(""), version); err == nil {
			return errors.New("one was served")
		}
		return nil
	})

	ca, next := newCA(t), newCA(t)
	for _, ca := range []pki.CA{ca, next} {
		put(t, n, secrets.API, secrets.APIID, apiSecrets(t, ca))
		n.wait(t, "apid to take the certificate", func(s dag.Status) bool { return s.Up })
		eventually.That(t, 10*time.Second, "an administrator to be let in", func() error {
			return ask(t.Context(), n.b.client(t, admin(t, ca), true), n.b.url(""), version)
		})
	}
	// (The one that replaced it was taken in before, and with it this.)
	if err := ask(t.Context(), n.b.client(t, admin(t, ca), true), n.b.url(""), version); err == nil {
		t.Error("the authority that was replaced is still trusted")
	}
	if len(n.pids) != 1 {
		t.Errorf("the gate was started %d times", len(n.pids))
	}
}

// It dies, and comes back with what it knew; nobody else can read that.
func TestServiceComesBack(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	newRecorder(t, n.b.socket, everything())
	put(t, n, configuration.Stages, configuration.StageID, configuration.Configured)
	put(t, n, secrets.API, secrets.APIID, apiSecrets(t, newCA(t)))
	n.wait(t, "apid to be up", func(s dag.Status) bool { return s.Up })
	first := <-n.pids
	if err := syscall.Kill(first, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if second := <-n.pids; second == first {
		t.Error("the same process")
	}
	n.wait(t, "apid to be up again", func(s dag.Status) bool { return s.Up })
	if info, err := os.Stat(filepath.Join(n.b.dir, statefile.StateName)); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
}

func apiSecrets(t *testing.T, ca pki.CA) secrets.APISpec {
	k := normal(t, ca)
	return secrets.APISpec{CA: k.bundle, Serving: config.CertKey{Crt: k.cert, Key: k.key}}
}

// A certificate that has expired stays so when the clock goes back: PID 1 tells the gate what
// time is over. One that lasts for longer goes on, also on a connection that was open before.
func TestServiceKnowsTheFloor(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	n.b.backend = newRecorder(t, n.b.socket, everything())
	ca, now := newCA(t), time.Now()
	put(t, n, configuration.Stages, configuration.StageID, configuration.Configured)
	put(t, n, secrets.API, secrets.APIID, apiSecrets(t, ca))
	n.wait(t, "apid to be up", func(s dag.Status) bool { return s.Up })
	leaf := pki.Leaf{CN: "alice", Orgs: []string{string(api.Admin)}, Now: now, Validity: time.Hour}
	brief := shown(t, ca, leaf)
	leaf.Validity = 3 * time.Hour
	open, long := n.b.client(t, brief, true), n.b.client(t, shown(t, ca, leaf), true)
	version, _ := api.Lookup("/garboard.v1.NodeService/Version")
	for _, client := range []*http.Client{open, long} {
		if err := ask(t.Context(), client, n.b.url(""), version); err != nil {
			t.Fatal(err)
		}
	}
	put(t, n, clock.Statuses, clock.StatusID, clock.Status{Floor: now.Add(2 * time.Hour)})
	eventually.That(t, 10*time.Second, "the certificate to have expired", func() error {
		for _, client := range []*http.Client{open, n.b.client(t, brief, false)} {
			if err := ask(t.Context(), client, n.b.url(""), version); err == nil || !refusedAs(err, connect.CodeUnauthenticated, "expired at") {
				return fmt.Errorf("got %v", err)
			}
		}
		return nil
	})
	if err := ask(t.Context(), long, n.b.url(""), version); err != nil {
		t.Errorf("the one that lasts for longer: %v", err)
	}
	// The operator has set a clock back that was wrong.
	put(t, n, clock.Statuses, clock.StatusID, clock.Status{Floor: now.Add(-time.Hour)})
	eventually.That(t, 10*time.Second, "the certificate to be good again", func() error {
		return ask(t.Context(), n.b.client(t, brief, true), n.b.url(""), version)
	})
}

// A typing mistake in the pin doesn't open the node to everybody.
func TestServiceBadPin(t *testing.T) {
	t.Parallel()
	n := newNode(t, paramPinned+"=abc")
	newRecorder(t, n.b.socket, everything())
	put(t, n, configuration.Stages, configuration.StageID, configuration.Maintenance)
	n.wait(t, "apid to fail", func(s dag.Status) bool {
		return s.State == dag.Failed && strings.Contains(s.Message, "kernel parameter garboard.maintenance.ca: fingerprint \"abc\" must be SHA-256")
	})
}

// A configured node waits for its certificate.
func TestServiceWaitsForItsCertificate(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	newRecorder(t, n.b.socket, everything())
	put(t, n, configuration.Stages, configuration.StageID, configuration.Configured)
	n.wait(t, "apid to wait", func(s dag.Status) bool { return s.Waiting == "certificate of the machine API to be made" })
	put(t, n, secrets.API, secrets.APIID, apiSecrets(t, newCA(t)))
	n.wait(t, "apid to be up", func(s dag.Status) bool { return s.Up })
}

// A worker for which no control plane signs: its administrators get in, nobody else does, and
// the console shows them how. It isn't up before a control plane has signed.
func TestServiceWithoutSignedCertificate(t *testing.T) {
	t.Parallel()
	n := newNode(t, "")
	n.b.backend = newRecorder(t, n.b.socket, everything())
	ca := newCA(t)
	worker := &config.Config{Version: config.Version}
	worker.Machine.Type, worker.Machine.CA.Crt = config.Worker, ca.Cert
	put(t, n, configuration.Configs, configuration.ConfigID, worker)
	put(t, n, configuration.Stages, configuration.StageID, configuration.Configured)
	put(t, n, network.Addresses, network.AddressID, network.NodeAddress{Primary: netip.MustParseAddr("10.0.2.15")})
	version, _ := api.Lookup("/garboard.v1.NodeService/Version")
	eventually.That(t, 20*time.Second, "its administrator to be let in", func() error {
		return ask(t.Context(), n.b.client(t, admin(t, ca), true), n.b.url(""), version)
	})
	for who, cert := range map[string]*tls.Certificate{"nobody": nil, "an administrator of something else": admin(t, newCA(t))} {
		if err := ask(t.Context(), n.b.client(t, cert, true), n.b.url(""), version); err == nil {
			t.Errorf("%s was served", who)
		}
	}
	print := api.ShownFingerprint(parse(t, n.b.written(t).Cert).Raw)
	want := "no control plane has signed the certificate of the API yet: API at https://10.0.2.15:50000, certificate SHA-256 " + print +
		"; correct the configuration with: gbctl apply-config --insecure --fingerprint " + print + " -n 10.0.2.15 -f FILE\n"
	eventually.That(t, 20*time.Second, "the console to say it", func() error {
		if text := n.console.String(); strings.Count(text, want) != 1 {
			return fmt.Errorf("%q", text)
		}
		return nil
	})
	if s, _ := n.graph.Status(ID); s.Up {
		t.Error("it is up without a signed certificate")
	}
	put(t, n, secrets.API, secrets.APIID, apiSecrets(t, ca))
	n.wait(t, "apid to be up", func(s dag.Status) bool { return s.Up })
}
