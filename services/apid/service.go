package apid

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/dag"
	"github.com/garboard-os/garboard/services/logs"
	"github.com/garboard-os/garboard/services/machine"
	"github.com/garboard-os/garboard/services/network"
	"github.com/garboard-os/garboard/services/process"
	"github.com/garboard-os/garboard/services/resource"
	"github.com/garboard-os/garboard/services/sandboxed"
	"github.com/garboard-os/garboard/services/secrets"
)

const (
	// processStop is what the gate gets to end its calls, serviceStop what that and
	// removing the sandbox take.
	processStop = 5 * time.Second
	serviceStop = processStop + 2*time.Second
	// rewriteRetry is when writing what the gate is to know is tried again.
	rewriteRetry = 5 * time.Second
	// socketPoll is how often it is looked whether PID 1 listens yet: it does within
	// a second of its start.
	socketPoll = 50 * time.Millisecond
)

// Options are what PID 1's side stands on.
type Options struct {
	Store     *resource.Store
	Logs      *logs.Logs
	Processes *process.Table
	Cmdline   boot.Cmdline

	// What tests have in another way.
	dir     string                                         // "": boot.APIDir
	socket  string                                         // "": boot.MachineSocket
	uid     int                                            // 0: UID
	address string                                         // "": the gate's on this node
	process func(ctx context.Context, h *dag.Handle) error // nil: the sandbox
}

// Service is apid in the graph. It depends on little, so that a node can be asked
// what is wrong, and be given another configuration, whatever else fails.
func Service(o Options) dag.Service {
	s := newKeeper(o)
	return dag.Service{
		ID:         ID,
		Kind:       dag.Process,
		DependsOn:  []string{"udevd"},
		Needs:      []dag.Condition{looked(s.Store), certificate{s.Store}, listening(s.socket)},
		Prepare:    s.prepare,
		Run:        s.run,
		Health:     &dag.Health{Check: s.healthy},
		Restart:    dag.RestartAlways,
		StopBudget: serviceStop,
	}
}

// keeper tells the gate what it goes by.
type keeper struct {
	Options
	// mu guards all following fields.
	mu      sync.Mutex
	written knowledge
	self    self   // once maintenance mode was entered
	said    string // on the console
}

func newKeeper(o Options) *keeper {
	if o.dir == "" {
		o.dir = boot.APIDir
	}
	if o.socket == "" {
		o.socket = boot.MachineSocket
	}
	if o.uid == 0 {
		o.uid = UID
	}
	if o.address == "" {
		o.address = net.JoinHostPort("127.0.0.1", strconv.Itoa(api.Port))
	}
	if o.process == nil {
		o.process = sandboxed.Runner{
			Processes: o.Processes, Logs: o.Logs, ID: ID, UID: o.uid,
			Args:       []string{sandboxed.Program, Command},
			Binds:      []sandboxed.Bind{{Source: o.dir}, {Source: filepath.Dir(o.socket)}},
			StopBudget: processStop,
		}.Run
	}
	return &keeper{Options: o}
}

// looked is the condition that the node knows whether it has a configuration.
func looked(store *resource.Store) dag.Condition {
	return machine.Stages.When(store, machine.StageID, "the configuration to be looked for", nil)
}

// certificate is the condition that there is something to serve with, which in
// maintenance mode there always is.
type certificate struct{ store *resource.Store }

func (certificate) String() string { return "certificate of the machine API to be made" }

// Wait implements dag.Condition.
func (c certificate) Wait(ctx context.Context) error {
	if err := looked(c.store).Wait(ctx); err != nil {
		return err
	}
	stage, err := machine.Stages.Get(c.store, machine.StageID)
	if err != nil || stage.Spec == machine.Maintenance {
		return err
	}
	return secrets.API.When(c.store, secrets.APIID, c.String(), nil).Wait(ctx)
}

// listening is the condition that PID 1 has its end of the API open: the socket is
// shown in the sandbox, which takes that it is there.
type listening string

func (l listening) String() string { return fmt.Sprintf("file %q to exist", string(l)) }

// Wait implements dag.Condition.
func (l listening) Wait(ctx context.Context) error {
	for {
		if _, err := os.Stat(string(l)); err == nil {
			return nil
		}
		select {
		case <-time.After(socketPoll):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// know puts together what the gate is to go by now.
func (k *keeper) know() (knowledge, error) {
	stage, err := machine.Stages.Get(k.Store, machine.StageID)
	if err != nil {
		return knowledge{}, err
	}
	if stage.Spec == machine.Maintenance {
		return k.maintenance()
	}
	o, err := secrets.API.Get(k.Store, secrets.APIID)
	switch {
	case errors.Is(err, resource.ErrNotFound):
		// Maintenance mode is over either way: a configured node must not take a
		// configuration from anybody who comes along.
		return knowledge{mode: modeClosed}, nil
	case err != nil:
		return knowledge{}, err
	}
	return knowledge{mode: api.ModeNormal, bundle: o.Spec.CA, cert: o.Spec.Serving.Crt, key: o.Spec.Serving.Key}, nil
}

func (k *keeper) maintenance() (knowledge, error) {
	pinned := ""
	if text, given := k.Cmdline.Get(paramPinned); given {
		var err error
		if pinned, err = parsePinned(text); err != nil {
			return knowledge{}, err
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.self.cert == nil {
		made, err := newSelf(time.Now())
		if err != nil {
			return knowledge{}, err
		}
		k.self = made
	}
	return knowledge{mode: api.ModeMaintenance, pinnedCA: pinned, cert: k.self.cert, key: k.self.key}, nil
}

// update writes what the gate is to know, if that is new.
func (k *keeper) update(always bool) error {
	next, err := k.know()
	if err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if !always && next.equal(k.written) {
		return nil
	}
	if err := next.write(k.dir, k.uid); err != nil {
		return fmt.Errorf("tell apid its certificate: %w", err)
	}
	k.written = next
	return nil
}

func (k knowledge) equal(other knowledge) bool {
	return k.mode == other.mode && k.pinnedCA == other.pinnedCA && k.digest() == other.digest()
}

func (k *keeper) prepare(context.Context, *dag.Handle) error { return k.update(true) }

// run runs the gate, and tells it what changes meanwhile.
func (k *keeper) run(ctx context.Context, h *dag.Handle) error {
	wctx, stop := context.WithCancel(ctx)
	var follower sync.WaitGroup
	follower.Go(func() { k.follow(wctx, h) })
	err := k.process(ctx, h)
	stop()
	follower.Wait()
	return err
}

func (k *keeper) follow(ctx context.Context, h *dag.Handle) {
	stages := k.Store.Watch(ctx, machine.Stages.Type())
	certs := k.Store.Watch(ctx, secrets.API.Type())
	retry := time.NewTimer(0) // what happened between prepare and here
	defer retry.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-stages:
		case <-certs:
		case <-retry.C:
		}
		if ctx.Err() != nil {
			return
		}
		if err := dag.Guard(h.Log, func() error { return k.update(false) }); err != nil {
			h.Log.Warn(err.Error())
			retry.Reset(rewriteRetry)
		}
	}
}

// healthy is a TLS handshake: the gate is there, and has taken in the certificate
// that it was last given. It goes before it would have to say who it is.
func (k *keeper) healthy(ctx context.Context) error {
	k.mu.Lock()
	want := k.written
	k.mu.Unlock()
	if want.mode == modeClosed {
		return errClosed
	}
	cert, err := pki.ParseCert(want.cert)
	if err != nil {
		return err
	}
	dialer := tls.Dialer{Config: &tls.Config{
		MinVersion:         tls.VersionTLS13,
		InsecureSkipVerify: true, // it is known to the byte
		VerifyConnection: func(c tls.ConnectionState) error {
			if !bytes.Equal(c.PeerCertificates[0].Raw, cert.Raw) {
				return errors.New("apid still shows a former certificate")
			}
			return nil
		},
	}}
	conn, err := dialer.DialContext(ctx, "tcp", k.address)
	if err != nil {
		return err
	}
	_ = conn.Close() // there is nothing to lose
	k.tell(want.mode)
	return nil
}

// tell says at the console how a node without a configuration is reached, once it
// can be.
func (k *keeper) tell(mode string) {
	if mode != api.ModeMaintenance {
		return
	}
	o, err := network.Addresses.Get(k.Store, network.AddressID)
	if err != nil || !o.Spec.Primary.IsValid() {
		return // the next check looks again
	}
	k.mu.Lock()
	text := invitation(o.Spec.Primary, k.self.fingerprint)
	news := text != k.said
	k.said = text
	k.mu.Unlock()
	if news {
		k.Logs.Logger(ID).Info(text, logs.Console)
	}
}

func invitation(addr netip.Addr, fingerprint string) string {
	at := netip.AddrPortFrom(addr, api.Port)
	return fmt.Sprintf("maintenance mode: API at https://%s, certificate SHA-256 %s; apply a configuration with: gbctl apply-config --insecure --fingerprint %s -n %s -f FILE",
		at, fingerprint, fingerprint, addr)
}
