package apid

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/process"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/front/sandbox"
	"github.com/garboard-os/garboard/services/front/statefile"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/machine"
	"github.com/garboard-os/garboard/services/system/network"
)

const (
	// processStop is what the gate gets to end its calls, serviceStop what that and
	// removing the sandbox take.
	processStop = 5 * time.Second
	serviceStop = processStop + 2*time.Second
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

// Service is apid in the graph. It depends on little, so that the API can show
// problems, and take another configuration, whatever else fails.
func Service(o Options) dag.Service {
	s := newSupervisor(o)
	return dag.Service{
		ID:         ID,
		Kind:       dag.Process,
		Needs:      []dag.Condition{stageKnown(s.Store), certificate{s.Store}, dag.File(s.socket)},
		Prepare:    s.publisher.Prepare,
		Run:        func(ctx context.Context, h *dag.Handle) error { return s.publisher.Run(ctx, h, s.process) },
		Health:     &dag.Health{Check: s.healthy},
		Restart:    dag.RestartAlways,
		StopBudget: serviceStop,
	}
}

// supervisor is PID 1's side of apid: it writes the state of the gate.
type supervisor struct {
	Options
	publisher statefile.Publisher[facts]
	// mu guards all following fields.
	mu        sync.Mutex
	self      self      // set when maintenance mode was entered
	announced string    // on the console
	last      time.Time // it was announced
}

func newSupervisor(o Options) *supervisor {
	o.dir = cmp.Or(o.dir, boot.APIDir)
	o.socket = cmp.Or(o.socket, boot.MachineSocket)
	o.uid = cmp.Or(o.uid, UID)
	o.address = cmp.Or(o.address, net.JoinHostPort("127.0.0.1", strconv.Itoa(api.Port)))
	if o.process == nil {
		o.process = sandbox.Runner{
			Processes: o.Processes, Logs: o.Logs, ID: ID, UID: o.uid,
			Args:       []string{sandbox.Program, Command},
			Binds:      []sandbox.Bind{{Source: o.dir}, {Source: filepath.Dir(o.socket)}},
			StopBudget: processStop,
		}.Run
	}
	s := &supervisor{Options: o}
	s.publisher = statefile.Publisher[facts]{
		Name: ID, Store: o.Store, Dir: o.dir, UID: o.uid, Inputs: []string{machine.Stages.Type(), secrets.API.Type(), machine.Configs.Type()},
		Current: s.current,
	}
	return s
}

// stageKnown is the condition that the node has looked for a configuration.
func stageKnown(store *resource.Store) dag.Condition {
	return machine.Stages.When(store, machine.StageID, "the configuration to be looked for", nil)
}

// certificate is the condition that there is something to serve with, which in
// maintenance mode there always is.
type certificate struct{ store *resource.Store }

func (certificate) String() string { return "certificate of the machine API to be made" }

// Wait implements dag.Condition.
func (c certificate) Wait(ctx context.Context) error {
	if err := stageKnown(c.store).Wait(ctx); err != nil {
		return err
	}
	stage, err := machine.Stages.Get(c.store, machine.StageID)
	if err != nil || stage.Spec == machine.Maintenance {
		return err
	}
	return secrets.API.When(c.store, secrets.APIID, c.String(), nil).Wait(ctx)
}

// current returns the settings that the gate is to use now.
func (s *supervisor) current() (b statefile.State[facts], err error) {
	stage, err := machine.Stages.Get(s.Store, machine.StageID)
	if err != nil {
		return b, err
	}
	if stage.Spec == machine.Maintenance {
		return s.maintenance()
	}
	o, err := secrets.API.Get(s.Store, secrets.APIID)
	switch {
	case errors.Is(err, resource.ErrNotFound):
		// Maintenance mode is over either way: a configured node must not take a
		// configuration without credentials.
		return stateOf(facts{Mode: modeClosed}, nil, nil, nil, nil), nil
	case err != nil:
		return b, err
	}
	var metrics config.Metrics
	if c, err := machine.Config(s.Store); err == nil {
		metrics = c.Machine.Metrics
	}
	return stateOf(facts{Mode: api.ModeNormal, Metrics: metrics.Address}, o.Spec.CA, o.Spec.Serving.Crt, o.Spec.Serving.Key, metrics.ClientCA), nil
}

func (s *supervisor) maintenance() (b statefile.State[facts], err error) {
	pinned := ""
	if text, given := s.Cmdline.Get(paramPinned); given {
		if pinned, err = parsePinned(text); err != nil {
			return b, err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.self.cert == nil {
		made, err := newSelf(time.Now())
		if err != nil {
			return b, err
		}
		s.self = made
	}
	return stateOf(facts{Mode: api.ModeMaintenance, PinnedCA: pinned}, nil, s.self.cert, s.self.key, nil), nil
}

// healthy makes a TLS handshake: the gate listens, and serves the certificate that was
// last written for it.
func (s *supervisor) healthy(ctx context.Context) error {
	wanted := s.publisher.Written()
	if wanted.Facts.Mode == modeClosed {
		return errClosed
	}
	if err := s.publisher.ServesCertificate(ctx, s.address, wanted.Files[certName]); err != nil {
		return err
	}
	s.announce(wanted.Facts.Mode)
	return nil
}

// announce prints to the console how a node without a configuration is reached, as
// soon as it has an address, and again later.
func (s *supervisor) announce(mode string) {
	if mode != api.ModeMaintenance {
		return
	}
	o, err := network.Addresses.Get(s.Store, network.AddressID)
	if err != nil || !o.Spec.Primary.IsValid() {
		return // the next check looks again
	}
	s.mu.Lock()
	text := announcement(o.Spec.Primary, s.self.fingerprint)
	due := text != s.announced || time.Since(s.last) > announceEvery
	if due {
		s.announced, s.last = text, time.Now()
	}
	s.mu.Unlock()
	if due {
		s.Logs.Logger(ID).Info(text, logs.Console)
	}
}

// announceEvery is how often the console has the announcement.
const announceEvery = 2 * time.Minute

func announcement(addr netip.Addr, fingerprint string) string {
	at := netip.AddrPortFrom(addr, api.Port)
	return fmt.Sprintf("maintenance mode: API at https://%s, certificate SHA-256 %s; apply a configuration with: gbctl apply-config --insecure --fingerprint %s -n %s -f FILE",
		at, fingerprint, fingerprint, addr)
}
