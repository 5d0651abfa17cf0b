// Package checkpoint has the decisions of the pod-checkpointer, without input and output.
//
// A parent is a pod with the annotation Wanted. Its checkpoint is a copy as a static pod,
// which is inactive until the parent doesn't run on the node. The ID of both is the parent's
// NAMESPACE/NAME.
package checkpoint

import (
	"maps"
	"slices"
	"time"
)

const (
	// absentLooks is how many looks in a row must find no sandbox of a parent before its
	// checkpoint is activated: a sandbox may be replaced at that moment.
	absentLooks = 2
	// pauseAfterStop is how long a checkpoint stays inactive after it was deactivated.
	pauseAfterStop = time.Minute
)

// A Checkpoint is the state of a checkpoint on the node.
type Checkpoint struct {
	// Own: the parent is a pod of the pod-checkpointer itself.
	Own bool
	// Active: the manifest is in the kubelet's directory.
	Active bool
}

// A Look is what was found at one time.
type Look struct {
	Now time.Time
	// Parents are the IDs of the node's parents in the API; nil: the API server doesn't
	// answer.
	Parents map[string]bool
	// Running are the IDs of the pods with a ready sandbox, true with a container in it; nil: the
	// container runtime doesn't answer.
	Running     map[string]bool
	Checkpoints map[string]Checkpoint
}

// Actions are the IDs of the checkpoints to change, in the order of the IDs.
type Actions struct {
	Activate   []string // also those that are active: their manifest may have changed
	Deactivate []string
	Remove     []string // its own ones are the last
	// End: the pod-checkpointer itself was deleted. Nothing is left to do after the removals,
	// and new checkpoints must not be written.
	End bool
}

// A Decider compares looks that follow each other.
type Decider struct {
	// Grace is how long a parent must be missing in the API before its checkpoint is removed.
	Grace time.Duration

	absent  map[string]int       // looks in a row without a sandbox of the parent
	missing map[string]time.Time // since when the parent isn't in the API
	stopped map[string]time.Time // when the checkpoint was deactivated
}

// Decide returns what to do after a look.
func (d *Decider) Decide(l Look) (a Actions) {
	if d.absent == nil {
		d.absent, d.missing, d.stopped = map[string]int{}, map[string]time.Time{}, map[string]time.Time{}
	}
	d.forget(l)
	gone, end := d.gone(l)
	var own []string
	for _, id := range slices.Sorted(maps.Keys(l.Checkpoints)) {
		started, sandbox := l.Running[id]
		switch c := l.Checkpoints[id]; {
		case gone[id] && c.Own:
			own = append(own, id)
		case gone[id]:
			a.Remove = append(a.Remove, id)
		case c.Own:
			// Only this program can start the others after a reboot.
			a.Activate = append(a.Activate, id)
		case l.Running == nil:
		case sandbox:
			d.absent[id] = 0
			// A kubelet that hasn't read the Services yet makes no container. It can't read them
			// when the checkpoint of the API server has ended.
			if c.Active && started {
				d.stopped[id] = l.Now
				a.Deactivate = append(a.Deactivate, id)
			}
		default:
			d.absent[id]++
			if c.Active || d.due(id, l) {
				a.Activate = append(a.Activate, id)
			}
		}
	}
	a.Remove, a.End = append(a.Remove, own...), end
	return a
}

// due reports whether an inactive checkpoint without a sandbox of its parent is activated.
// A parent that was deleted isn't replaced.
func (d *Decider) due(id string, l Look) bool {
	deleted := l.Parents != nil && !l.Parents[id]
	paused := l.Now.Sub(d.stopped[id]) < pauseAfterStop
	return d.absent[id] >= absentLooks && !deleted && !paused
}

// forget removes the state of checkpoints that don't exist any more.
func (d *Decider) forget(l Look) {
	none := func(id string) bool { _, exists := l.Checkpoints[id]; return !exists }
	maps.DeleteFunc(d.absent, func(id string, _ int) bool { return none(id) })
	maps.DeleteFunc(d.missing, func(id string, _ time.Time) bool { return none(id) })
	maps.DeleteFunc(d.stopped, func(id string, _ time.Time) bool { return none(id) })
}

// gone returns the checkpoints to remove. If the pod-checkpointer itself was deleted (end),
// these are all checkpoints at once, because nothing would keep them up to date: the next look
// would write those of pods that still run again.
func (d *Decider) gone(l Look) (gone map[string]bool, end bool) {
	if l.Parents == nil {
		return nil, false
	}
	gone = map[string]bool{}
	own, ownGone, replaced := 0, 0, false
	for id, c := range l.Checkpoints {
		if l.Parents[id] {
			delete(d.missing, id)
		} else if d.missing[id].IsZero() {
			d.missing[id] = l.Now
		}
		gone[id] = !l.Parents[id] && l.Now.Sub(d.missing[id]) >= d.Grace
		switch {
		case c.Own && gone[id]:
			own, ownGone = own+1, ownGone+1
		case c.Own:
			own++
			replaced = replaced || l.Parents[id]
		}
	}
	if ownGone == 0 || ownGone < own {
		// Without a new pod, each of its own waits for the last one: the instance that runs
		// may end with any of them, and the next one would wait for the whole time again.
		maps.DeleteFunc(gone, func(id string, _ bool) bool { return l.Checkpoints[id].Own && !replaced })
		return gone, false
	}
	for id := range l.Checkpoints {
		gone[id] = true
	}
	return gone, true
}
