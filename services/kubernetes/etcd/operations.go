package etcd

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/core/sleep"
)

// The operations of this package.
const (
	BootstrapOperation = "bootstrap"
	RecoverOperation   = "recover"
	LeaveOperation     = "etcd-leave"

	// BeginStep and RestoreStep are the steps after which the cluster has begun.
	BeginStep   = "begin"
	RestoreStep = "restore"
)

const (
	// beginTimeout limits a search for other clusters, after a join in progress.
	beginTimeout = 2 * time.Minute
	// restoreBudget bounds all attempts to restore: etcd's image may have to be pulled first.
	restoreBudget = 3 * restoreTimeout
	// serveTimeout limits how long an operation waits until etcd serves. After
	// that, the service continues by itself.
	serveTimeout = time.Hour
	// removeTimeout bounds the removal, with SettleTimeout.
	removeTimeout = 2 * time.Minute
)

// BootstrapArguments are those of BootstrapOperation.
type BootstrapArguments struct {
	// ControlPlanes are addresses that the caller knows, to look for other clusters.
	ControlPlanes []string `json:"controlPlanes,omitempty"`
}

// RecoverArguments are those of RecoverOperation. The snapshot is on the node already
// (Receive).
type RecoverArguments struct {
	SHA256        string   `json:"sha256"` // of the snapshot, in hexadecimal
	Raw           bool     `json:"raw,omitempty"`
	ControlPlanes []string `json:"controlPlanes,omitempty"`
}

// Definitions are the operations that begin and end this node's membership.
func (e *Etcd) Definitions() []operation.Definition {
	leave := func(ctx context.Context, _ operation.Request) (operation.Plan, error) {
		return operation.Plan{}, e.MayLeave(ctx, 0)
	}
	return []operation.Definition{
		{Name: BootstrapOperation, Plan: e.planBeginning, Steps: e.bootstrapSteps},
		{Name: RecoverOperation, Plan: e.planBeginning, Steps: e.recoverSteps},
		{Name: LeaveOperation, Exclusive: true, Plan: leave, Steps: e.leaveSteps},
	}
}

// idle refuses a second beginning during the first.
func (e *Etcd) idle() error {
	id, err := e.o.Running(BootstrapOperation, RecoverOperation)
	if err == nil && id != "" {
		err = refuse("this node is beginning a cluster: gbctl operation attach %s", id)
	}
	return err
}

// planBeginning is for an operation that begins a cluster.
func (e *Etcd) planBeginning(context.Context, operation.Request) (operation.Plan, error) {
	return operation.Plan{}, e.idle()
}

func (e *Etcd) bootstrapSteps(r operation.Request) ([]operation.Step, error) {
	a, err := operation.Decode[BootstrapArguments](r, nil)
	return []operation.Step{
		{
			ID: BeginStep, What: "begin an etcd cluster with this node", Deadline: beginTimeout,
			Run: func(ctx context.Context, p *operation.Progress) error {
				begun, err := e.Bootstrap(ctx, a.ControlPlanes)
				if err == nil {
					p.Report("cluster ID %s", begun.Token)
				}
				return err
			},
			Undo: func(ctx context.Context, p *operation.Progress) error { return e.withdraw(ctx, p.Report, "") },
		},
		e.serveStep(),
	}, err
}

// serveStep is optional: if etcd's image can't be pulled for a long time, the
// service still continues to try.
func (e *Etcd) serveStep() operation.Step {
	return operation.Step{
		ID: "serve", What: "wait until etcd serves", Deadline: serveTimeout, Optional: true,
		Run: func(ctx context.Context, _ *operation.Progress) error {
			for range sleep.Every(ctx, healthPeriod) {
				if e.ready.Load() {
					return nil
				}
			}
			return fmt.Errorf("etcd isn't ready yet: gbctl service etcd: %w", context.Cause(ctx))
		},
	}
}

// withdraw undoes a beginning that etcd doesn't know yet. restored is the token
// of data that was restored for it; "" if there is none.
func (e *Etcd) withdraw(ctx context.Context, report func(format string, args ...any), restored string) error {
	return e.inTurn(ctx, func() error {
		r, data, err := e.begun()
		switch {
		case err != nil:
			return err
		case e.going.Load() || r.Phase == member || r.Phase == joining || data && restored == "",
			restored != "" && r.Phase == fresh && r.Token != restored: // begun by an earlier operation
			report("the cluster that has begun on this node stays")
			return nil
		case restored == "" && r.Phase != fresh:
			return nil
		}
		if err := e.clean(); err != nil {
			return err
		}
		return e.write(record{Phase: waiting, Peers: r.Peers})
	})
}

// restoredAs is the token of the cluster that a restore makes. It is in the record before
// the first attempt.
var restoredAs = operation.Data[string]{Key: "token"}

func (e *Etcd) recoverSteps(r operation.Request) ([]operation.Step, error) {
	a, err := operation.Decode[RecoverArguments](r, nil)
	return []operation.Step{
		{
			ID: RestoreStep, What: "restore the snapshot and begin an etcd cluster with it", Deadline: restoreBudget,
			Run: func(ctx context.Context, p *operation.Progress) error {
				token, err := restoredAs.Once(p, func() (string, error) { return newToken(), e.prepareRestore(ctx, *a) })
				if err != nil {
					return err
				}
				event := eventFunc(func(_ reason.Code, text string) { p.Report("%s", text) })
				// It repeats attempts that only have to wait: containerd may not run yet.
				return untilDecided(ctx, nil, event, event, func() error { return e.restore(ctx, *a, token) })
			},
			Undo: func(ctx context.Context, p *operation.Progress) error {
				token, err := restoredAs.Get(p)
				if err == nil {
					err = e.withdraw(ctx, p.Report, token)
				} else if errors.Is(err, operation.ErrNoData) { // nothing was restored
					err = nil
				}
				return errors.Join(err, untrusted.RemoveAll(e.recoveryDir()))
			},
		},
		e.serveStep(),
	}, err
}

// left is the name of the member that was removed. It exists if the node has
// data to discard.
var left = operation.Data[string]{Key: "member"}

func (e *Etcd) leaveSteps(operation.Request) ([]operation.Step, error) {
	return []operation.Step{
		{
			ID: "remove", What: "remove this node's member from the etcd cluster", Deadline: removeTimeout,
			Run: func(ctx context.Context, p *operation.Progress) error {
				name, was, err := e.remove(ctx)
				if err != nil {
					return err
				}
				if !was {
					return operation.Skip("this node has no member of etcd")
				}
				p.Report("member %s is removed", cmp.Or(name, "of this node"))
				return left.Put(p, name)
			},
		},
		{
			ID: "discard", What: "stop service etcd and remove its data", Deadline: leaveTimeout, PointOfNoReturn: true,
			Run: func(ctx context.Context, p *operation.Progress) error {
				_, err := left.Get(p)
				if errors.Is(err, operation.ErrNoData) {
					return operation.Skip("there is nothing to discard")
				}
				if err != nil {
					return err
				}
				return e.discard(ctx)
			},
		},
	}, nil
}

// hexSum is a SHA-256 in the form of the record and the arguments.
func hexSum(s Snapshot) string { return hex.EncodeToString(s.SHA256[:]) }
