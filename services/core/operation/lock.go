package operation

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/garboard-os/garboard/services/core/sleep"
)

const (
	// lockTimeout bounds one try: a cluster with a quorum answers within a second. One that
	// elects, or waits for a disk, does a little later: an operation that begins tries again
	// for lockPatience before it goes without.
	lockTimeout  = 10 * time.Second
	lockPatience = 20 * time.Second
	// lockRetry is between two tries. An operation that goes on after a restart
	// gives up on a lock that doesn't answer after lockSilence, which is longer than a
	// control plane takes to start, and on one that another node has after lockHeld.
	lockRetry   = 2 * time.Second
	lockSilence = 3 * time.Minute
	lockHeld    = 15 * time.Minute
	// lockReclaim is how long one that has ended tries to get it again, in order to give
	// it back; it ends by itself else.
	lockReclaim = 30 * time.Second
)

// Lock keeps disruptive operations of several nodes apart.
type Lock interface {
	// Take takes it for an operation of this node, again if it has it already. The
	// error is *HeldError where another has it; any other means that it can't be
	// known. Without an error, nil is for nodes that need no lock.
	Take(ctx context.Context, h Holder) (Taken, error)
	// Look returns the holder of the lock, or nil.
	Look(ctx context.Context) (*Holder, error)
}

// Taken is a lock that this node has.
type Taken interface {
	// Release gives it back: at once, or as long from now, if the node doesn't take
	// it again until then.
	Release(ctx context.Context, after time.Duration) error
}

// Holder is the node and the operation that have a lock.
type Holder struct {
	Node  string    `json:"node"`
	Name  string    `json:"name"` // of the operation
	ID    string    `json:"id"`
	Since time.Time `json:"since"`
	// Stays is how long the lock stays if the node is lost, in whole seconds.
	Stays time.Duration `json:"-"`
}

func (h Holder) String() string {
	return fmt.Sprintf("node %s is running %s (%s) since %s", h.Node, h.Name, h.ID, h.Since.UTC().Format(time.RFC3339))
}

// HeldError is why a lock can't be taken.
type HeldError struct{ Holder Holder }

func (e *HeldError) Error() string { return e.Holder.String() }

// take takes the lock for an operation that begins. without is why it has none.
func (r *Runner) take(ctx context.Context, h Holder) (t Taken, without string, err error) {
	patience, cancel := context.WithTimeout(ctx, lockPatience)
	defer cancel()
	for range sleep.Every(patience, lockRetry) {
		t, err = r.tryLock(patience, h)
		if err == nil {
			return t, "", nil
		}
		if held, isHeld := errors.AsType[*HeldError](err); isHeld {
			return nil, "", refuse("%s: %w: one of them at a time; wait for its end (gbctl -n %s operation attach %s)", h.Name, held, held.Holder.Node, held.Holder.ID)
		}
	}
	if ctx.Err() != nil {
		return nil, "", calledOff(h.Name, ctx.Err())
	}
	return nil, err.Error(), nil
}

func (r *Runner) tryLock(ctx context.Context, h Holder) (Taken, error) {
	ctx, cancel := context.WithTimeout(ctx, lockTimeout)
	defer cancel()
	return r.o.Lock.Take(ctx, h)
}

// unlocked is the warning of an operation that runs without the lock.
func unlocked(why string) string {
	return "it doesn't wait for other nodes, and nothing keeps them from a disruptive operation at the same time: " + why
}

// retake takes the lock for an operation that began before the node restarted. It
// is better brought to its end without than left half done.
func (r *Runner) retake(ctx context.Context, h Holder, report func(string)) Taken {
	began := time.Now()
	told := ""
	for range sleep.Every(ctx, lockRetry) {
		t, err := r.tryLock(ctx, h)
		if err == nil || ctx.Err() != nil {
			return t
		}
		patience := lockSilence
		if held := new(HeldError); errors.As(err, &held) {
			patience = lockHeld
		}
		if time.Since(began) >= patience {
			report(fmt.Sprintf("goes on without the lock of the cluster after %s: %v", patience, err))
			return nil
		}
		if text := err.Error(); text != told {
			told = text
			report(fmt.Sprintf("waits for the lock of the cluster, at most %s: %s", patience, text))
		}
	}
	return nil
}
