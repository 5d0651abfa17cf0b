package lifecycle

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/services/operation"
)

// S-038: a node comes back as it was; one that a person has cordoned stays so.
func TestS038Reboot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.on()
		o := r.run(Reboot, PowerArguments{}.Encode())
		check(t, r, o, operation.Running, "cordon", "look at pods", "reboot")
		r.off()
		r.on()
		o = r.end(o.ID)
		check(t, r, o, operation.Done, "uncordon")
		r.off()

		r.node["spec"] = object{"unschedulable": true}
		r.on()
		o = r.run(Reboot, PowerArguments{}.Encode())
		check(t, r, o, operation.Running, "look at pods", "reboot")
		r.off()
		r.on()
		check(t, r, r.end(o.ID), operation.Done)
		if r.node["spec"].(object)["unschedulable"] != true {
			t.Error("it was uncordoned")
		}
		r.off()
	})
}

// A node that nobody can stand in for isn't emptied, and one that is forced neither.
func TestRebootAlone(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*rig)
		args   PowerArguments
		why    string
	}{
		"alone":         {func(r *rig) { r.others = 0 }, PowerArguments{}, "no other node is Ready and takes pods"},
		"no Kubernetes": {func(r *rig) { r.down = true }, PowerArguments{}, "Kubernetes can't be asked"},
		"pods are kept": {func(*rig) {}, PowerArguments{KeepPods: true}, ""},
		"forced":        {func(*rig) {}, PowerArguments{Force: true}, "it is forced"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				tt.change(r)
				r.on()
				o := r.run(Reboot, tt.args.Encode())
				check(t, r, o, map[bool]operation.State{false: operation.Running, true: operation.Done}[tt.args.Force], "reboot")
				if got := strings.Join(o.Warnings, "\n"); !strings.Contains(got, tt.why) || tt.why == "" && got != "" {
					t.Errorf("warnings %q, want %q", got, tt.why)
				}
				r.off()
				r.on()
				check(t, r, r.end(o.ID), operation.Done)
				r.off()
			})
		})
	}
}

// lock is one of a cluster with no other node that wants it.
type lock struct {
	mu   sync.Mutex // guards held
	held bool
}

func (k *lock) set(held bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.held = held
}

func (k *lock) Take(context.Context, operation.Holder) (operation.Taken, error) {
	k.set(true)
	return k, nil
}

func (k *lock) Look(context.Context) (*operation.Holder, error) { return nil, nil }

func (k *lock) Release(_ context.Context, after time.Duration) error {
	k.set(after > 0)
	return nil
}

// Others wait for a node that reboots until it is back, whether it was emptied or not.
func TestLockOfAReboot(t *testing.T) {
	for name, args := range map[string]PowerArguments{"emptied": {}, "pods are kept": {KeepPods: true}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r, k := newRig(t), &lock{}
				r.lock = k
				r.on()
				o := r.run(Reboot, args.Encode())
				r.off()
				if !k.held {
					t.Error("others may go while it is away")
				}
				r.on()
				defer r.off()
				r.done()
				r.end(o.ID)
				if k.held {
					t.Error("others wait for a node that is back")
				}
			})
		})
	}
}

// Shutdown stays a shutdown, whatever happens on the way, and doesn't come twice.
func TestShutdownStaysOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.pods = []string{"slow"}
		r.cut = "look at pods"
		r.on()
		o := r.run(Shutdown, PowerArguments{DrainTimeout: time.Minute}.Encode())
		r.off()
		r.done()
		r.on()
		o = r.end(o.ID)
		did := r.done()
		if did[len(did)-1] != "power off" || slices.Contains(did, "reboot") {
			t.Errorf("it did %v", did)
		}
		r.off()
		r.on()
		check(t, r, r.end(o.ID), operation.Done, "uncordon")
		r.off()
	})
}
