// Package etcd runs this node's member of the Kubernetes etcd cluster, and has
// the functions to operate that cluster.
//
// etcd is an OCI image in containerd's system namespace, on control planes only. With data it continues with that data,
// whatever the type is. Without data, a cluster is begun on a node of type init, or on the one that Bootstrap was
// called on. Every other node joins the members that it finds through Kubernetes, as a learner. A learner doesn't count
// for the quorum until it has all of the cluster's data and is promoted. The state is in a record on STATE:
//
//	(none) ── type init, or Bootstrap ──▶ new ────── healthy ─────▶ member
//	(none) ── added as a learner ───────▶ joining ── promoted ────▶ member
//	member ── Leave ────────────────────▶ waiting ── started ─────▶ joining
//	member ── its data is gone ─────────▶ joining, in place of what it was
//	member ── was removed meanwhile ────▶ joining, without its data
//	(no data) ── a snapshot is restored ▶ new
//
// Bootstrap, recovery and leaving are operations (Definitions). While one restores a
// snapshot, or removes the member, the service waits for it.
package etcd

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/pkg/oci"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sync/semaphore"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/option"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/services/kubernetes/peers"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
)

const (
	// ID of the service and its container.
	ID = "etcd"
	// utilityID is the container of etcdutl.
	utilityID = "etcdutl"

	secretsDir = boot.SecretsDir + "/" + secrets.EtcdID // package secrets writes them
	clientPort = 2379                                   // IANA etcd-client
	peerPort   = 2380                                   // IANA etcd-server
	// healthURL is plain HTTP on loopback: the probe needs no certificate, and
	// this port serves only health and metrics.
	healthURL  = "http://127.0.0.1:2381"
	healthPath = "/readyz"

	healthPeriod  = time.Second
	healthTimeout = 5 * time.Second
	// stopBudget is for the transfer of the leadership and for a sync of the backend.
	stopBudget = 10 * time.Second
	// oomScoreAdj is the value that Kubernetes uses for critical pods: the kernel
	// kills all other processes first.
	oomScoreAdj = -997
	// autoCompaction keeps five minutes of history, like the apiserver's own
	// compaction.
	autoCompaction = "5m"
)

// Options are the inputs of the service. Paths are for tests: "" is a node's.
type Options struct {
	Store      *resource.Store
	Containerd *containerd.Containerd
	Peers      *peers.Client
	Log        *slog.Logger // nil: no log
	// Stop ends the service until it is started again.
	Stop func(ctx context.Context) error
	// Running returns the ID of an operation with one of these names that runs on
	// this node; "" if there is none. nil: there are no operations.
	Running func(names ...string) (id string, err error)
	// LeaveWith are the operations, besides LeaveOperation, with a step that calls Leave.
	LeaveWith []string

	DataDir string // boot.EtcdDataDir
	Journal string // journalFile
}

// Etcd is this node's member. New makes it.
type Etcd struct {
	o      Options
	runner *containerd.Runner
	// utility runs etcdutl, and returns the end of its output. A field for tests.
	utility func(ctx context.Context, args []string) (output string, err error)

	// turn is held while a goroutine decides about this member and writes that
	// into the journal.
	turn      *semaphore.Weighted
	begin     chan struct{} // ends the pause of a wait for a cluster
	uploading sync.Mutex    // held while a snapshot is sent

	id        string       // identifies this node, also under another address
	beginning atomic.Int32 // number of current checks whether it may begin a cluster
	going     atomic.Bool  // the beginning of the member is decided: etcd starts, or runs
	ready     atomic.Bool  // healthy at the last check
	// suspect: the last run ended by itself, without a stop. The cluster may have
	// removed the member.
	suspect atomic.Bool
	// well is when this run was last healthy, or else began.
	well atomic.Pointer[time.Time]
	// unsettled: the journal's phase is new or joining.
	unsettled atomic.Pointer[record]
	// files are the certificates that this run of etcd has read.
	files atomic.Pointer[secrets.StatusSpec]
	// dataID is the identity of the data of this run of etcd; set once data is there.
	dataID atomic.Pointer[identity]
}

// New makes this node's member and doesn't start it.
func New(o Options) *Etcd {
	option.Default(&o.Log, slog.New(slog.DiscardHandler))
	option.Default(&o.DataDir, boot.EtcdDataDir)
	option.Default(&o.Journal, journalFile)
	option.Default(&o.Running, func(...string) (string, error) { return "", nil })
	e := &Etcd{o: o, turn: semaphore.NewWeighted(1), begin: make(chan struct{}, 1), id: newToken()}
	e.runner = &containerd.Runner{
		Containerd:  o.Containerd,
		ID:          ID,
		Image:       image,
		Field:       "cluster.etcd.image",
		Spec:        e.spec,
		StopBudget:  stopBudget,
		OOMScoreAdj: oomScoreAdj,
	}
	e.utility = e.runUtility
	return e
}

// Service is etcd in the graph.
func (e *Etcd) Service() dag.Service {
	return dag.Service{
		ID:    ID,
		Kind:  dag.Container,
		Needs: []dag.Condition{configuration.IfControlPlane{Condition: secrets.Statuses.When(e.o.Store, secrets.EtcdID, "etcd certificates to be made", nil), Store: e.o.Store}},
		Skip:  e.o.skip,
		Lacks: e.runner.Lacks,
		Prepare: func(ctx context.Context, h *dag.Handle) error {
			if err := secrets.Await(ctx, e.o.Store, secrets.EtcdID); err != nil {
				return err
			}
			if err := e.runner.Prepare(ctx, h); err != nil {
				return err
			}
			return e.prepare(ctx, h.EventOf, func(_ reason.Code, m string) { h.Log.Info(m) })
		},
		Run:        e.run,
		Health:     &dag.Health{Check: e.runner.Proves(e.healthy), Period: healthPeriod, Timeout: healthTimeout},
		Restart:    dag.RestartAlways,
		StopBudget: serverBudget + stopBudget + 5*time.Second,
	}
}

// run runs the container. In parallel it promotes a learner to a voting member,
// and examines a member that isn't healthy.
func (e *Etcd) run(outer context.Context, h *dag.Handle) (err error) {
	e.well.Store(new(time.Now()))
	e.dataID.Store(nil)
	me, _ := e.o.self() // without one, there is no command line
	if files, err := secrets.Statuses.Get(e.o.Store, secrets.EtcdID); err == nil {
		e.files.Store(&files.Spec)
	}
	defer func() {
		e.publish(false)
		e.suspect.Store(outer.Err() == nil && !killed(err) && !errors.Is(err, errMoved))
		e.going.Store(false)
	}()
	// It ends a moment after outer.
	ended := func(ctx context.Context) error {
		select {
		case <-outer.Done():
			e.awaitServer(ctx, e.files.Load())
		case <-ctx.Done():
		}
		return context.Cause(outer)
	}
	promoted := func(ctx context.Context) error { return e.promote(ctx, h.EventOf) }
	moved := func(ctx context.Context) error { return e.whileAt(ctx, me.addr) }
	return dag.While(context.WithoutCancel(outer), func(ctx context.Context) error { return e.runner.Run(ctx, h) }, ended, promoted, e.watch, moved)
}

// killed reports whether etcd was killed. A member that its cluster has removed ends by
// itself, so after a kill no other member needs to be asked, which can take examineTimeout.
func killed(err error) bool {
	exit, ok := errors.AsType[*containerd.ExitError](err)
	return ok && exit.Status == 128+uint32(syscall.SIGKILL)
}

// runUtility runs etcdutl from etcd's own image.
func (e *Etcd) runUtility(ctx context.Context, args []string) (string, error) {
	runner := containerd.Runner{
		Containerd: e.o.Containerd, ID: utilityID, Image: image, StopBudget: stopBudget,
		Spec: func(context.Context) ([]oci.SpecOpts, error) {
			return confined(args, bind(e.recoveryDir(), "rw")), nil
		},
	}
	return runner.Once(ctx, ID)
}

func (o Options) skip() string {
	return configuration.OnControlPlanes(o.Store, "etcd runs on control planes only")()
}

func image(c *config.Config) string { return c.Cluster.Etcd.Image }

func (e *Etcd) spec(context.Context) ([]oci.SpecOpts, error) {
	args, err := e.commandLine()
	if err != nil {
		return nil, err
	}
	return append(confined(args, bind(boot.EtcdDataDir, "rw"), bind(secretsDir, "ro")), oci.WithHostNamespace(specs.NetworkNamespace)), nil
}

// confined is what containers of etcd's image have in common.
func confined(args []string, mounts ...specs.Mount) []oci.SpecOpts {
	return []oci.SpecOpts{
		oci.WithProcessArgs(args...), oci.WithCgroup(boot.SystemCgroup + "/etcd"), oci.WithRootFSReadonly(), containerd.Confined(ID), oci.WithMounts(mounts),
	}
}

// self is this member as other nodes see it.
type self struct {
	name string
	addr netip.Addr
}

func (o Options) self() (self, error) {
	addr, err := network.Addresses.Get(o.Store, "default")
	name, none := network.Hostnames.Get(o.Store, "hostname")
	return self{name.Spec, addr.Spec.Primary}, cmp.Or(err, none)
}

// loopbackURL is where this member answers whatever address the node has.
var loopbackURL = clientURL(netip.AddrFrom4([4]byte{127, 0, 0, 1}))

func clientURL(addr netip.Addr) string {
	return "https://" + netip.AddrPortFrom(addr, clientPort).String()
}

func (s self) peerURL() string { return "https://" + netip.AddrPortFrom(s.addr, peerPort).String() }

func (e *Etcd) commandLine() ([]string, error) {
	cfg, err := configuration.Config(e.o.Store)
	me, none := e.o.self()
	r, unread := e.read()
	if err = cmp.Or(err, none, unread); err != nil {
		return nil, err
	}
	return arguments(me, r, cfg.Cluster.Etcd.ExtraArgs), nil
}

func bind(path, access string) specs.Mount {
	return specs.Mount{Type: "bind", Source: path, Destination: path, Options: []string{"rbind", access, "nosuid", "nodev", "noexec"}}
}

// arguments is etcd's command line; extra arguments of the configuration have
// priority. The arguments about the cluster matter only to a member without data.
func arguments(me self, r record, extra config.Args) []string {
	client, peer := clientURL(me.addr), me.peerURL()
	flags := map[string]string{
		"name":                        me.name,
		"data-dir":                    boot.EtcdDataDir,
		"listen-client-urls":          loopbackURL + "," + client,
		"advertise-client-urls":       client,
		"listen-peer-urls":            peer,
		"initial-advertise-peer-urls": peer,
		"initial-cluster":             me.name + "=" + peer,
		"initial-cluster-state":       "new",
		"listen-metrics-urls":         healthURL,
		"auto-compaction-mode":        "periodic",
		"auto-compaction-retention":   autoCompaction,
		"client-cert-auth":            "true",
		"peer-client-cert-auth":       "true",
		"trusted-ca-file":             secretsDir + "/ca.crt",
		"cert-file":                   secretsDir + "/server.crt",
		"key-file":                    secretsDir + "/server.key",
		"peer-trusted-ca-file":        secretsDir + "/ca.crt",
		"peer-cert-file":              secretsDir + "/peer.crt",
		"peer-key-file":               secretsDir + "/peer.key",
	}
	if r.Token != "" {
		flags["initial-cluster-token"] = r.Token
	}
	if r.Phase == joining {
		flags["initial-cluster"], flags["initial-cluster-state"] = r.Initial, "existing"
	}
	return extra.CommandLine("etcd", flags)
}

// healthy asks the member itself, and publishes the result for the control
// plane. A learner isn't healthy: it refuses requests of the API server.
func (e *Etcd) healthy(ctx context.Context) error {
	err := dag.HTTPCheck(healthURL + healthPath)(ctx)
	if r := e.unsettled.Load(); err == nil && r != nil {
		if r.Phase == joining {
			err = reason.With(Learner, errors.New("it is a learner, and gets the cluster's data"))
		} else {
			err = e.settle(ctx, *r)
		}
	}
	if err == nil {
		e.well.Store(new(time.Now()))
		// Nothing depends on it now; the next check tries it again.
		_ = e.recognise()
	}
	e.publish(err == nil)
	return err
}

// recognise determines once per run to which cluster the data belongs, and
// records that beside the data.
func (e *Etcd) recognise() error {
	if e.dataID.Load() != nil {
		return nil
	}
	id, ok, err := e.identity()
	if err != nil || !ok {
		return err
	}
	if err = e.own(id); err == nil {
		e.dataID.Store(&id)
	}
	return err
}

func (e *Etcd) publish(ready bool) {
	e.ready.Store(ready)
	status := StatusSpec{Ready: ready, Endpoint: loopbackURL}
	if id := e.dataID.Load(); id != nil {
		status.MemberID = HexID(id.member)
	}
	if files := e.files.Load(); files != nil {
		status.Files = files.Version
	}
	// The store refuses only an undefined type.
	_ = Statuses.Put(e.o.Store.As(ID), StatusID, status)
}

// StatusID is the ID of the only StatusSpec.
const StatusID = "etcd"

// StatusSpec is the state of this node's member. Only this package publishes it.
type StatusSpec struct {
	Ready    bool   `yaml:"ready"`
	Endpoint string `yaml:"endpoint"`                 // https://127.0.0.1:2379
	MemberID string `yaml:"memberID" column:"MEMBER"` // hexadecimal
	// the version of those that it was started with: secrets.StatusSpec
	Files string `yaml:"files"`
}

// Statuses has the object StatusID, on control planes.
var Statuses = resource.Define[StatusSpec](resource.Definition{
	Type: "EtcdStatuses.v1alpha1.garboard.dev", Kind: "EtcdStatus", Namespace: "runtime",
})

// Ready reports whether this node's member serves.
func Ready(r resource.Reader) (StatusSpec, bool) {
	o, err := Statuses.Get(r, StatusID)
	return o.Spec, err == nil && o.Spec.Ready
}

const (
	// serverBudget is how long etcd waits for the end of the API server. The kubelet, which
	// ends it, may only just restart for the same change.
	serverBudget = 15 * time.Second
	serverPoll   = 250 * time.Millisecond
)

// awaitServer waits until this node's API server takes no more requests, if it restarts for
// the same change as etcd: both read the authorities only at their start. An API server
// that serves without its etcd keeps each request until its client gives up.
func (e *Etcd) awaitServer(ctx context.Context, began *secrets.StatusSpec) {
	cfg, err := configuration.Config(e.o.Store)
	if err != nil || began == nil || began.Current(cfg) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, serverBudget)
	defer cancel()
	address := net.JoinHostPort("127.0.0.1", strconv.Itoa(cfg.Cluster.ControlPlane.LocalAPIServerPort))
	for range sleep.Every(ctx, serverPoll) {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
		if err != nil {
			return
		}
		conn.Close()
	}
}
