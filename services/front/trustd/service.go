package trustd

import (
	"cmp"
	"context"
	"errors"
	"net"
	"strconv"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/process"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/front/sandbox"
	"github.com/garboard-os/garboard/services/front/statefile"
	"github.com/garboard-os/garboard/services/kubernetes/roster"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/configuration"
)

// Options are what PID 1's side stands on.
type Options struct {
	Store     *resource.Store
	Logs      *logs.Logs
	Processes *process.Table
	// Roster is what is known of the cluster's nodes, and Enlist records one.
	Roster func(ctx context.Context) (roster.Facts, error)
	Enlist func(ctx context.Context, name string, r roster.Record) error

	// What tests have in another way.
	dir     string                                         // "": boot.TrustDir, of UID
	uid     int                                            // of dir
	address string                                         // "": trustd's on this node
	process func(ctx context.Context, h *dag.Handle) error // nil: the sandbox
	socket  *sandbox.Socket                                // where trustd asks for signatures; nil: one without a name
}

// Service is trustd in the graph. It waits for the clock: what it signs has dates.
func Service(o Options) dag.Service {
	if o.dir == "" {
		o.dir, o.uid = boot.TrustDir, UID
	}
	o.address = cmp.Or(o.address, net.JoinHostPort("127.0.0.1", strconv.Itoa(api.TrustPort)))
	if o.process == nil {
		o.socket = sandbox.NewSocket(o.uid, "")
		o.process = sandbox.Runner{
			Processes: o.Processes, Logs: o.Logs, ID: ID, UID: o.uid, Dir: o.dir, Socket: o.socket,
		}.Run
	}
	publisher := &statefile.Publisher[facts]{
		Name: ID, Store: o.Store, Dir: o.dir, UID: o.uid,
		Inputs: []string{secrets.API.Type()}, Current: o.current,
	}
	return dag.Service{
		ID:      ID,
		Kind:    dag.Process,
		Needs:   []dag.Condition{configuration.IfControlPlane{Condition: secrets.API.When(o.Store, secrets.APIID, "certificate of trustd to be made", nil), Store: o.Store}},
		Skip:    configuration.OnControlPlanes(o.Store, "trustd runs on control planes only"),
		Prepare: publisher.Prepare,
		Run: func(ctx context.Context, h *dag.Handle) error {
			return publisher.Run(ctx, h, func(ctx context.Context, h *dag.Handle) error { return o.whileSigning(ctx, h) })
		},
		Health: &dag.Health{Check: func(ctx context.Context) error {
			return publisher.ServesCertificate(ctx, o.address, publisher.Written().Cert)
		}},
		Restart:    dag.RestartAlways,
		StopBudget: sandbox.ServiceStop,
	}
}

// whileSigning runs trustd, and answers it. The end of one is that of the other.
func (o Options) whileSigning(ctx context.Context, h *dag.Handle) error {
	listener, err := o.socket.Listen()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	signs := make(chan error, 1)
	go func() {
		defer cancel()
		signs <- signer{o, h.Log}.serve(ctx, listener)
	}()
	err = o.process(ctx, h)
	cancel()
	return errors.Join(err, <-signs)
}

// current returns what trustd is to use now: it serves with the certificate of the machine API.
func (o Options) current() (facts, error) {
	own, err := secrets.API.Get(o.Store, secrets.APIID)
	return facts{Cert: own.Spec.Serving.Crt, Key: own.Spec.Serving.Key}, err
}
