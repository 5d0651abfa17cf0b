package apid

import (
	"bytes"
	"cmp"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/option"
	"github.com/garboard-os/garboard/services/core/process"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/front/sandbox"
	"github.com/garboard-os/garboard/services/front/statefile"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/clock"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
)

// signedWithin is when a worker usually has its certificate. After that time it serves
// with one of its own, so that its configuration can be corrected: the reason may be in it.
const signedWithin = 30 * time.Second

// Options are what PID 1's side stands on.
type Options struct {
	Store     *resource.Store
	Logs      *logs.Logs
	Processes *process.Table
	Cmdline   boot.Cmdline
	// Socket is where the machine API listens.
	Socket *sandbox.Socket
	// Fingerprint is set while a person has to compare it.
	Fingerprint *Fingerprint

	// What tests have in another way.
	dir     string                                         // "": boot.APIDir
	socket  dag.Condition                                  // nil: Socket
	uid     int                                            // 0: UID
	address string                                         // "": the gate's on this node
	signed  time.Duration                                  // 0: signedWithin
	process func(ctx context.Context, h *dag.Handle) error // nil: the sandbox
}

// Fingerprint is that of the certificate which the node has made itself. Its methods may be called from any goroutine.
type Fingerprint struct{ shown atomic.Value }

// Text is "" while nobody has to compare it.
func (f *Fingerprint) Text() string {
	text, _ := f.shown.Load().(string)
	return text
}

// Service is apid in the graph. It depends on little, so that the API can show
// problems, and take another configuration, whatever else fails.
func Service(o Options) dag.Service {
	s := newSupervisor(o)
	return dag.Service{
		ID:         ID,
		Kind:       dag.Process,
		Needs:      []dag.Condition{configuration.Decided(s.Store), certificate{s.Store, s.signed}, s.socket},
		Prepare:    s.publisher.Prepare,
		Run:        func(ctx context.Context, h *dag.Handle) error { return s.publisher.Run(ctx, h, s.process) },
		Health:     &dag.Health{Check: s.healthy},
		Restart:    dag.RestartAlways,
		StopBudget: sandbox.ServiceStop,
	}
}

// supervisor is PID 1's side of apid: it writes the state of the gate.
type supervisor struct {
	Options
	publisher statefile.Publisher[facts]
	own       func() (self, error) // the certificate that the node has made itself, when it was first needed
	// mu guards all following fields.
	mu        sync.Mutex
	unsigned  time.Time // since when the gate serves a configured node with it; zero: it doesn't
	announced string    // on the console
	last      time.Time // it was announced
}

func newSupervisor(o Options) *supervisor {
	o.dir = cmp.Or(o.dir, boot.APIDir)
	option.Default[dag.Condition](&o.socket, o.Socket)
	o.uid = cmp.Or(o.uid, UID)
	o.address = cmp.Or(o.address, net.JoinHostPort("127.0.0.1", strconv.Itoa(api.Port)))
	o.signed = cmp.Or(o.signed, signedWithin)
	option.Default(&o.Fingerprint, new(Fingerprint))
	option.Default(&o.process, sandbox.Runner{
		Processes: o.Processes, Logs: o.Logs, ID: ID, UID: o.uid, Dir: o.dir, Socket: o.Socket,
	}.Run)
	s := &supervisor{Options: o, own: sync.OnceValues(func() (self, error) { return newSelf(time.Now()) })}
	s.publisher = statefile.Publisher[facts]{
		Name: ID, Store: o.Store, Dir: o.dir, UID: o.uid, Inputs: []string{configuration.Stages.Type(), secrets.API.Type(), configuration.Configs.Type(), clock.Statuses.Type()},
		Current: func() (facts, error) {
			f, err := s.current()
			f.Floor = clock.Floor(s.Store)
			return f, err
		},
	}
	return s
}

// certificate is the condition that there is something to serve with. In maintenance mode
// there always is, and on a worker there is after some time.
type certificate struct {
	store  *resource.Store
	signed time.Duration
}

func (certificate) String() string { return "certificate of the machine API to be made" }

// Wait implements dag.Condition.
func (c certificate) Wait(ctx context.Context) error {
	if err := configuration.Decided(c.store).Wait(ctx); err != nil {
		return err
	}
	stage, err := configuration.Stages.Get(c.store, configuration.StageID)
	if err != nil || stage.Spec.Anonymous() {
		return err
	}
	made := secrets.API.When(c.store, secrets.APIID, c.String(), nil)
	if _, asks := asksForCertificate(c.store); !asks {
		return made.Wait(ctx)
	}
	within, cancel := context.WithTimeout(ctx, c.signed)
	defer cancel()
	_ = made.Wait(within) // then it serves without
	return ctx.Err()
}

// asksForCertificate reports whether the node gets its certificate from a control plane, and
// returns its configuration.
func asksForCertificate(store *resource.Store) (*config.Config, bool) {
	c, err := configuration.Config(store)
	if err != nil || c.Machine.Type.ControlPlane() {
		return nil, false
	}
	return c, true
}

// current returns what the gate is to use now.
func (s *supervisor) current() (f facts, err error) {
	stage, err := configuration.Stages.Get(s.Store, configuration.StageID)
	if err != nil {
		return f, err
	}
	if stage.Spec.Anonymous() {
		return s.maintenance(stage.Spec)
	}
	o, err := secrets.API.Get(s.Store, secrets.APIID)
	if errors.Is(err, resource.ErrNotFound) {
		return s.withoutCertificate()
	}
	if err != nil {
		return f, err
	}
	var metrics config.Metrics
	if c, err := configuration.Config(s.Store); err == nil {
		metrics = c.Machine.Metrics
	}
	return facts{
		Mode: api.ModeNormal, Authorities: o.Spec.CA, Cert: o.Spec.Serving.Crt, Key: o.Spec.Serving.Key,
		Metrics: metrics.Address, MetricsCA: metrics.ClientCA,
	}, nil
}

// withoutCertificate: maintenance mode is over, because a configured node must not take a
// configuration without credentials. A worker has the authority of its administrators, and
// serves them with a certificate of its own until a control plane signs one. They compare
// its fingerprint.
func (s *supervisor) withoutCertificate() (facts, error) {
	c, asks := asksForCertificate(s.Store)
	if !asks {
		return facts{Mode: modeClosed}, nil
	}
	own, err := s.own()
	return facts{Mode: api.ModeNormal, Authorities: c.Machine.TrustedCAs(), Cert: own.cert, Key: own.key}, err
}

func (s *supervisor) maintenance(stage configuration.Stage) (f facts, err error) {
	if text, given := s.Cmdline.Get(paramPinned); given {
		if f.PinnedCA, err = parsePinned(text); err != nil {
			return f, err
		}
	}
	own, err := s.own()
	f.Mode, f.Cert, f.Key = api.ModeMaintenance, own.cert, own.key
	if stage == configuration.Locked {
		f.Mode = api.ModeLocked
	}
	return f, err
}

// healthy makes a TLS handshake: the gate listens, and serves the certificate that was
// last written for it.
func (s *supervisor) healthy(ctx context.Context) error {
	wanted := s.publisher.Written()
	if wanted.Mode == modeClosed {
		return errClosed
	}
	if err := s.publisher.ServesCertificate(ctx, s.address, wanted.Cert); err != nil {
		return err
	}
	switch {
	case wanted.Mode == api.ModeMaintenance:
		s.announce("maintenance mode", "apply a configuration", "apply-config", "-f FILE")
	case wanted.Mode == api.ModeLocked:
		s.announce("the disk is locked", "unlock it", "unlock", "")
	case s.isUnsigned(wanted.Cert):
		s.announce(errUnsigned.Error(), "correct the configuration", "apply-config", "-f FILE")
		return errUnsigned
	default:
		s.Fingerprint.shown.Store("")
	}
	return nil
}

// isUnsigned reports whether a configured node serves with its own certificate. In the
// first seconds the announcement waits: a control plane is about to sign one.
func (s *supervisor) isUnsigned(cert []byte) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if own, err := s.own(); err != nil || !bytes.Equal(cert, own.cert) {
		s.unsigned = time.Time{}
		return false
	}
	if now := time.Now(); s.unsigned.IsZero() {
		s.unsigned, s.announced, s.last = now, "", now
	}
	return true
}

// announce prints to the console how a node is reached whose certificate nobody has signed,
// as soon as it has an address, and again later.
func (s *supervisor) announce(why, what, command, arguments string) {
	o, err := network.Addresses.Get(s.Store, network.AddressID)
	if err != nil || !o.Spec.Primary.IsValid() {
		return // the next check looks again
	}
	own, _ := s.own() // it is served
	s.mu.Lock()
	s.Fingerprint.shown.Store(own.fingerprint)
	text := announcement(why, what, command, arguments, o.Spec.Primary, own.fingerprint)
	due := text != s.announced || time.Since(s.last) > announceEvery
	if due = due && time.Since(s.unsigned) >= s.signed; due {
		s.announced, s.last = text, time.Now()
	}
	s.mu.Unlock()
	if due {
		s.Logs.Logger(ID).Info(text, logs.Console)
	}
}

// announceEvery is how often the console has the announcement.
const announceEvery = 2 * time.Minute

func announcement(why, what, command, arguments string, addr netip.Addr, fingerprint string) string {
	at := netip.AddrPortFrom(addr, api.Port)
	return strings.TrimSpace(fmt.Sprintf("%s: API at https://%s, certificate SHA-256 %s; %s with: gbctl %s --insecure --fingerprint %s -n %s %s",
		why, at, fingerprint, what, command, fingerprint, addr, arguments))
}

// paramPinned is the kernel parameter that closes maintenance mode to all but the
// owner of a certificate: its SHA-256, or that of its authority.
const paramPinned = "garboard.maintenance.ca"

const (
	selfName = "garboard-maintenance"
	// selfSerial: there is no list of serial numbers.
	selfSerial = 1
)

// self is the certificate of the API while the node has no configuration, or nobody has
// signed another one. It is kept in memory, for one boot; a person compares its fingerprint.
type self struct {
	cert, key   []byte // PEM
	fingerprint string // as people compare them: AB:CD:…
}

// newSelf makes the certificate. It is valid from the oldest to the newest time that a
// wrong clock could show: a client that compares the fingerprint needs no date.
func newSelf(now time.Time) (self, error) {
	public, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return self{}, fmt.Errorf("make a self-signed certificate of the API: %w", err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(selfSerial),
		Subject:      pkix.Name{CommonName: selfName},
		NotBefore:    boot.Built().UTC(),
		NotAfter:     now.Add(pki.CAValidity).UTC(),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames:     []string{selfName, "localhost"},
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, public, key)
	keyPEM, bad := pki.EncodeKey(key)
	if err = cmp.Or(err, bad); err != nil {
		return self{}, fmt.Errorf("make a self-signed certificate of the API: %w", err)
	}
	return self{cert: pki.EncodeCert(der), key: keyPEM, fingerprint: api.ShownFingerprint(der)}, nil
}

// parsePinned reads the kernel parameter. With an error, maintenance mode must stay
// closed, not open to all.
func parsePinned(text string) (string, error) {
	plain, err := api.ParseFingerprint(text)
	if err != nil {
		return "", fmt.Errorf("kernel parameter %s: %w; maintenance mode stays closed", paramPinned, err)
	}
	return plain, nil
}
