package operation

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/sleep"
)

const (
	// sharedTimeout bounds one request for a shared record.
	sharedTimeout = 10 * time.Second
	// sharedEvents is how many events a shared record has: with its data it stays below
	// what etcd takes.
	sharedEvents = 50
	// maxShared in bytes is less than one request to etcd may have, which is 1.5 MiB.
	maxShared = 1 << 20
)

// Shared keeps the records of shared operations where all control planes of the cluster
// read them. One node is the coordinator of an operation: only it runs steps and writes
// the record. Without a quorum nothing is written, and nothing goes on: another node may
// have taken the operation over.
type Shared interface {
	// Claim makes this node the coordinator. The error is *HeldError where another node is.
	Claim(ctx context.Context, h Holder) (Claim, error)
	// List returns all records.
	List(ctx context.Context) ([]SharedRecord, error)
	// Delete removes a record.
	Delete(ctx context.Context, id string) error
}

// Claim is that this node is the coordinator of an operation.
type Claim interface {
	// Node is the name of this node.
	Node() string
	// Read returns the record; nil: there is none.
	Read(ctx context.Context) ([]byte, error)
	// Write replaces the record. It fails where this node isn't the coordinator any more.
	Write(ctx context.Context, record []byte) error
	// Lost is closed when this node may not be the coordinator any more: steps must end
	// before another node can take the operation over.
	Lost() <-chan struct{}
	// Release ends it.
	Release(ctx context.Context) error
}

// SharedRecord is what other nodes see of an operation.
type SharedRecord struct {
	ID          string
	Record      []byte
	Coordinator *Holder // nil: its coordinator is gone
}

// errLost: this node isn't the coordinator of the operation for certain.
var errLost = errors.New("the record of the operation can't be written to etcd")

// claim makes this node the coordinator of an operation that begins here.
func (r *Runner) claim(ctx context.Context, h Holder) (Claim, error) {
	if r.o.Shared == nil {
		return nil, refuse("%s: its record must be in etcd, which this node hasn't", h.Name)
	}
	ctx, cancel := context.WithTimeout(ctx, sharedTimeout)
	defer cancel()
	c, err := r.o.Shared.Claim(ctx, h)
	if err != nil {
		return nil, refuse("%s: its record can't be kept in etcd: %w", h.Name, err)
	}
	return c, nil
}

// share writes the next record to etcd; the caller holds turn.
func (x *execution) share(next *record, events []Event) error {
	if x.claim == nil {
		return errLost
	}
	shared := next.clone()
	shared.Events = x.eventsOf(events)
	shared.Events = shared.Events[max(len(shared.Events)-sharedEvents, 0):]
	data, err := json.Marshal(shared)
	if err != nil {
		return err
	}
	if len(data) > maxShared {
		return fmt.Errorf("the record of operation %s has %d bytes, of at most %d", x.id, len(data), maxShared)
	}
	ctx, cancel := context.WithTimeout(context.Background(), sharedTimeout)
	defer cancel()
	if err := x.claim.Write(ctx, data); err != nil {
		return fmt.Errorf("%w: %w", errLost, err)
	}
	return nil
}

// coordinate makes this node the coordinator again, after a restart or after etcd has not
// answered, and waits for that as long as it takes. It returns false where the operation
// is not to go on here: another node has it, it has ended there, or the node stops.
func (x *execution) coordinate(ctx context.Context) bool {
	x.dropClaim()
	reported := ""
	for range sleep.Every(ctx, lockRetry) {
		err := x.coordinateOnce(ctx)
		switch held, isHeld := errors.AsType[*HeldError](err); {
		case err == nil:
			return !x.record().Finished()
		case isHeld:
			x.moved(held.Holder.Node)
			return false
		}
		if text := err.Error(); text != reported && ctx.Err() == nil {
			reported = text
			x.report("", "", "waits for etcd, where its record is: "+text)
		}
	}
	return false
}

func (x *execution) coordinateOnce(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*sharedTimeout)
	defer cancel()
	rec := x.record()
	if x.r.o.Shared == nil {
		return errors.New("this node has no etcd")
	}
	claim, err := x.r.o.Shared.Claim(ctx, Holder{Name: rec.Name, ID: x.id, Since: rec.Began})
	if err != nil {
		return err
	}
	text, err := claim.Read(ctx)
	if err == nil && text != nil {
		var theirs *record
		if theirs, err = decode(text); err == nil && theirs.after(rec) {
			x.adopt(theirs)
		}
	}
	if err != nil {
		return errors.Join(err, claim.Release(ctx))
	}
	x.turn.Lock()
	x.claim = claim
	x.turn.Unlock()
	if x.record().Finished() {
		return nil
	}
	if err = x.lead(fmt.Sprintf("node %s is its coordinator", claim.Node())); err != nil {
		x.dropClaim()
	}
	return err
}

// lead writes down that this node, which has the claim, is the coordinator.
func (x *execution) lead(text string) error {
	return x.commit(func(next *record) ([]Event, error) {
		next.Term++
		next.Coordinator = x.claim.Node()
		return []Event{{Kind: Said, Text: text}}, nil
	}, nil)
}

// adopt takes the record of another node, which went on with the operation meanwhile.
func (x *execution) adopt(theirs *record) {
	x.turn.Lock()
	defer x.turn.Unlock()
	x.mu.Lock()
	theirs.Boots = max(theirs.Boots, x.rec.Boots)
	x.rec = theirs
	x.history.replace(theirs.Events, theirs.Boots)
	x.publish()
	x.mu.Unlock()
	if err := x.write(theirs, nil); err != nil {
		x.r.o.Log.Warn("write the journal of an operation", "operation", x.id, "err", err)
	}
}

// moved ends the operation on this node: another one is its coordinator.
func (x *execution) moved(node string) {
	x.turn.Lock()
	defer x.turn.Unlock()
	why := fmt.Sprintf("node %s has taken it over: gbctl -n %s operation attach %s", node, node, x.id)
	_ = x.apply(func(next *record) ([]Event, error) {
		next.State, next.Ended, next.Error = Moved, time.Now(), why
		return []Event{{Kind: Changed, State: Moved, Text: why}}, nil
	}, nil, true, false)
}

// dropClaim gives the claim back, if there is one.
func (x *execution) dropClaim() {
	x.turn.Lock()
	claim := x.claim
	x.claim = nil
	x.turn.Unlock()
	if claim == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), releaseTimeout)
	defer cancel()
	if err := claim.Release(ctx); err != nil {
		x.r.o.Log.Warn("the claim on an operation ends by itself only", "operation", x.id, "err", err)
	}
}

// after reports whether r is newer than another record of the same operation.
func (r *record) after(other *record) bool {
	return cmp.Or(cmp.Compare(r.Term, other.Term), cmp.Compare(r.Seq, other.Seq)) > 0
}

// TakeOver continues a shared operation whose coordinator is gone. permit refuses a caller
// without the role for such an operation.
func (r *Runner) TakeOver(ctx context.Context, id, by string, permit func(Operation) error) (Operation, error) {
	if r.o.Shared == nil {
		return Operation{}, refuse("take over %s: this node has no etcd, where its record would be", bounded(id))
	}
	if err := r.beginning.Acquire(ctx, 1); err != nil {
		return Operation{}, err
	}
	defer r.beginning.Release(1)
	if x, err := r.find(id); err == nil && !x.over() {
		return Operation{}, refuse("take over %s: it runs on this node", x.id)
	}
	ctx, cancel := context.WithTimeout(ctx, 2*sharedTimeout)
	defer cancel()
	all, _, err := r.shared(ctx)
	if err != nil {
		return Operation{}, fmt.Errorf("operation %s: %w", bounded(id), err)
	}
	at := slices.IndexFunc(all, func(rec *record) bool { return rec.ID == id })
	if at < 0 {
		return Operation{}, fmt.Errorf("operation %q: %w in etcd", bounded(id), ErrNotFound)
	}
	rec := all[at]
	def, known := r.definitions[rec.Name]
	if !known || !def.Shared {
		return Operation{}, refuse("take over %s: this release knows no such operation %q", rec.ID, rec.Name)
	}
	o := rec.Operation
	o.Role = def.Role
	if err := cmp.Or(permit(o), r.room(def)); err != nil {
		return Operation{}, err
	}
	steps, err := r.steps(def, rec)
	if err != nil {
		return Operation{}, refuse("take over %s: %w", rec.ID, err)
	}
	claim, err := r.o.Shared.Claim(ctx, Holder{Name: rec.Name, ID: rec.ID, Since: rec.Began})
	if held := new(HeldError); errors.As(err, &held) {
		return Operation{}, refuse("take over %s: %w: it is its coordinator; a node that is gone stops being it within a minute", rec.ID, held)
	} else if err != nil {
		return Operation{}, fmt.Errorf("take over %s: %w", rec.ID, err)
	}
	// What the former coordinator wrote last, before it was gone.
	text, err := claim.Read(ctx)
	if err == nil {
		rec, err = decode(text)
	}
	if err != nil {
		return Operation{}, errors.Join(fmt.Errorf("take over %s: read its record: %w", bounded(id), err), claim.Release(ctx))
	}
	if rec.Finished() {
		return Operation{}, errors.Join(refuse("take over %s: it has ended: %s", rec.ID, rec.State), claim.Release(ctx))
	}
	rec.Boots++
	x := newExecution(r, rec)
	x.claim = claim
	err = x.lead(fmt.Sprintf("node %s takes it over from %s, asked by %s", claim.Node(), rec.Coordinator, bounded(by)))
	if err == nil {
		err = r.launch(x, steps)
	}
	if err != nil {
		x.dropClaim()
		return Operation{}, err
	}
	return x.record().clone().Operation, nil
}

// shared returns the records in etcd that can be read, oldest first, each with the holder of its claim.
func (r *Runner) shared(ctx context.Context) ([]*record, map[string]*Holder, error) {
	ctx, cancel := context.WithTimeout(ctx, sharedTimeout)
	defer cancel()
	found, err := r.o.Shared.List(ctx)
	var all []*record
	holders := map[string]*Holder{}
	for _, s := range found {
		rec, err := decode(s.Record)
		if err != nil {
			r.o.Log.Warn("the record of an operation in etcd is left alone", "operation", bounded(s.ID), "err", err)
			continue
		}
		all = append(all, rec)
		holders[rec.ID] = s.Coordinator
	}
	slices.SortFunc(all, func(a, b *record) int { return a.Began.Compare(b.Began) })
	return all, holders, err
}

// Elsewhere lists the shared operations that other control planes began and that haven't
// ended. Those whose coordinator is gone wait for TakeOver.
func (r *Runner) Elsewhere(ctx context.Context) ([]Operation, error) {
	if r.o.Shared == nil {
		return nil, nil
	}
	found, holders, err := r.shared(ctx)
	return lists.Some(found, func(rec *record) (Operation, bool) {
		x, none := r.find(rec.ID)
		here := none == nil && !x.over()
		o := rec.Operation
		o.Elsewhere, o.Orphaned = true, holders[o.ID] == nil
		if !o.Orphaned {
			o.Coordinator = holders[o.ID].Node
		}
		o.Role = r.definitions[o.Name].Role
		return o, !here && !rec.Finished()
	}), err
}

// prune removes the oldest records of shared operations that have ended.
func (r *Runner) prune(ctx context.Context) error {
	all, _, err := r.shared(ctx)
	ended := slices.DeleteFunc(all, func(rec *record) bool { return !rec.Finished() })
	for _, rec := range ended[:max(len(ended)-keptFinished, 0)] {
		if err := r.o.Shared.Delete(ctx, rec.ID); err != nil {
			return err
		}
	}
	return err
}
