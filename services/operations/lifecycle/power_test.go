package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/durationpb"
)

// S-038: a node comes back as it was; one that a person has cordoned stays so.
func TestS038Reboot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.on()
		o := r.run(Reboot, &apiv1.RebootRequest{})
		check(t, r, o, operation.Running, "cordon", "look at pods", "reboot")
		r.off()
		r.on()
		o = r.end(o.ID)
		check(t, r, o, operation.Done, "uncordon")
		r.off()

		r.node["spec"] = object{"unschedulable": true}
		r.on()
		o = r.run(Reboot, &apiv1.RebootRequest{})
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
		args   *apiv1.RebootRequest
		why    string
	}{
		"alone":         {func(r *rig) { r.others = 0 }, &apiv1.RebootRequest{}, "no other node is Ready and takes pods"},
		"no Kubernetes": {func(r *rig) { r.down = true }, &apiv1.RebootRequest{}, "Kubernetes can't be asked"},
		"pods are kept": {func(*rig) {}, &apiv1.RebootRequest{KeepPods: true}, ""},
		"forced":        {func(*rig) {}, &apiv1.RebootRequest{Force: true}, "it is forced"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				tt.change(r)
				r.on()
				o := r.run(Reboot, tt.args)
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

// Kubernetes that doesn't answer for a moment is asked again: the node isn't left full of
// pods for it.
func TestRebootAsksAgain(t *testing.T) {
	for _, silent := range []time.Duration{0, lookTimeout + time.Second, lookBudget + time.Second} {
		t.Run(silent.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.on()
				defer r.off()
				set := func(down bool) {
					r.mu.Lock()
					defer r.mu.Unlock()
					r.down = down
				}
				set(silent > 0)
				time.AfterFunc(silent, func() { set(false) })
				r.run(Reboot, &apiv1.RebootRequest{})
				if drained := slices.Contains(r.done(), "cordon"); drained != (silent < lookBudget) {
					t.Errorf("drained %v, with Kubernetes silent for %s: %v", drained, silent, r.done())
				}
			})
		})
	}
}

// errStop is what etcd says of a node that its cluster can't do without.
var errStop = fmt.Errorf("stop etcd member n1 (1): %w: without this one 1 do (n2 (2)); no answer from n3 (3)", etcd.ErrQuorum)

// A node isn't stopped where that would cost etcd its quorum, and whoever asks hears
// who was counted.
func TestQuorumGuard(t *testing.T) {
	for _, tt := range []struct {
		name   string
		stop   error
		args   *apiv1.RebootRequest
		worker bool
		says   string // "": nothing
		goes   bool
	}{
		{name: "it can go", args: &apiv1.RebootRequest{KeepPods: true}, goes: true},
		{name: "it can't", stop: errStop, says: "no answer from n3 (3). Start those that don't answer"},
		{name: "it can't, with its pods", stop: errStop, args: &apiv1.RebootRequest{KeepPods: true}, says: "no answer from n3 (3)"},
		{name: "it is forced", stop: errStop, args: &apiv1.RebootRequest{Force: true}, says: "the cluster would lose its quorum: without this one 1 do (n2 (2)); no answer from n3 (3)", goes: true},
		{name: "the power button", stop: errStop, args: &apiv1.RebootRequest{Button: true, KeepPods: true}, says: "the cluster would lose its quorum: without this one 1 do (n2 (2)); no answer from n3 (3)", goes: true},
		{name: "nobody can be asked", stop: errors.New("silence"), args: &apiv1.RebootRequest{KeepPods: true}, says: "whether etcd has its quorum without this node isn't known: silence", goes: true},
		{name: "a worker", stop: errStop, args: &apiv1.RebootRequest{KeepPods: true}, worker: true, goes: true},
	} {
		for name, power := range map[string]boot.Power{Reboot: boot.Reboot, Shutdown: boot.PowerOff} {
			t.Run(name+"/"+tt.name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r := newRig(t)
					r.stop = tt.stop
					if tt.worker {
						r.isWorker()
					}
					r.on()
					defer r.off()
					plan, err := r.runner.Start(t.Context(), operation.Ask{Name: name, Arguments: tt.args, DryRun: true})
					var refusal operation.Refusal
					switch {
					case errors.As(err, &refusal) == tt.goes:
						t.Fatalf("error %v", err)
					case !tt.goes:
						if !strings.Contains(err.Error(), tt.says) || !strings.HasSuffix(err.Error(), "`gbctl "+name+" --force` goes all the same") {
							t.Errorf("error %v", err)
						}
						_, err = r.runner.Start(t.Context(), operation.Ask{Name: name, Arguments: tt.args})
						if did := r.done(); err == nil || len(did) > 0 {
							t.Errorf("it did %v, %v", did, err)
						}
						return
					}
					if got := strings.Join(plan.Warnings, "\n"); !strings.Contains(got, tt.says) || tt.says == "" && got != "" {
						t.Errorf("warnings %q, want %q", got, tt.says)
					}
					r.run(name, tt.args)
					if did := r.done(); !slices.Equal(did, []string{string(power)}) {
						t.Errorf("it did %v", did)
					}
				})
			})
		}
	}
}

// Another member may be lost while this node is emptied: it stays, and takes pods again.
func TestQuorumIsLostDuringTheDrain(t *testing.T) {
	for name, tt := range map[string]struct {
		stop error
		did  []string
	}{
		"lost":         {errStop, []string{"uncordon"}},
		"not known":    {errors.New("silence"), []string{"reboot"}},
		"the negative": {nil, []string{"reboot"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.pods = []string{"slow"}
				r.on()
				defer r.off()
				o, err := r.runner.Start(t.Context(), operation.Ask{Name: Reboot, Arguments: &apiv1.RebootRequest{DrainTimeout: durationpb.New(time.Minute)}})
				if err != nil {
					t.Fatal(err)
				}
				r.mu.Lock()
				r.stop = tt.stop
				r.mu.Unlock()
				o = r.end(o.ID)
				did := slices.DeleteFunc(r.done(), func(what string) bool { return what == "cordon" || what == "look at pods" })
				if !slices.Equal(did, tt.did) {
					t.Errorf("it did %v, want %v", did, tt.did)
				}
				if failed := o.State == operation.Failed; failed != errors.Is(tt.stop, etcd.ErrQuorum) || failed && !strings.Contains(o.Error, "no answer from n3 (3)") {
					t.Errorf("it is %s: %s", o.State, o.Error)
				}
			})
		})
	}
}

// isWorker makes the node one without a member of etcd.
func (r *rig) isWorker() {
	r.t.Helper()
	was, err := configuration.Config(r.store)
	if err != nil {
		r.t.Fatal(err)
	}
	c := *was
	c.Machine.Type = config.Worker
	if err := configuration.Configs.Put(r.store.As("test"), configuration.ConfigID, &c); err != nil {
		r.t.Fatal(err)
	}
}

// lock is one of a cluster with no other node that wants it.
type lock struct {
	mu    sync.Mutex // guards what follows
	held  bool
	given []time.Duration
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
	k.mu.Lock()
	defer k.mu.Unlock()
	k.given = append(k.given, after)
	return nil
}

// Others wait for a node that reboots until it is back, whether it was emptied or not.
func TestLockOfAReboot(t *testing.T) {
	for name, args := range map[string]*apiv1.RebootRequest{"emptied": {}, "pods are kept": {KeepPods: true}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r, k := newRig(t), &lock{}
				r.lock = k
				r.on()
				o := r.run(Reboot, args)
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

// Who goes next counts the members that answer: not those of a node that is on its way
// out, and no longer than that takes.
func TestLockOfAShutdown(t *testing.T) {
	for name, test := range map[string]struct {
		args *apiv1.ShutdownRequest
		want []time.Duration
	}{
		"emptied":       {&apiv1.ShutdownRequest{}, []time.Duration{holdShutdown}},
		"pods are kept": {&apiv1.ShutdownRequest{KeepPods: true}, []time.Duration{holdShutdown}},
		"forced":        {&apiv1.ShutdownRequest{Force: true}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r, k := newRig(t), &lock{}
				r.lock = k
				r.on()
				r.run(Shutdown, test.args)
				r.off()
				if !slices.Equal(k.given, test.want) {
					t.Errorf("the lock was given back after %v, want %v", k.given, test.want)
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
		o := r.run(Shutdown, &apiv1.ShutdownRequest{DrainTimeout: durationpb.New(time.Minute)})
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

// What the power button asked for is done once the node has ended, also in the middle of the
// drain: a node that is on again doesn't end once more, and takes pods again.
func TestPressedIsDoneOnceTheNodeHasEnded(t *testing.T) {
	for name, power := range map[string]boot.Power{Shutdown: boot.PowerOff, Reboot: boot.Reboot} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.pods = []string{"slow"}
				r.cut = "look at pods"
				r.on()
				o := r.run(name, Pressed(power, "").Arguments)
				r.off()
				r.done()
				r.on()
				defer r.off()
				o = r.end(o.ID)
				did := r.done()
				if o.State != operation.Done || !slices.Contains(did, "uncordon") || slices.Contains(did, "power off") || slices.Contains(did, "reboot") {
					t.Errorf("it is %s (%s), and did %v", o.State, o.Error, did)
				}
			})
		})
	}
}

// silent is an etcd that never answers.
type silent struct{ member }

func (silent) MayStop(ctx context.Context, _ time.Duration) error { <-ctx.Done(); return ctx.Err() }

// Who changes the configuration of a node whose etcd is silent hears of it before they
// give up; who has gone has agreed to nothing.
func TestRebootForAConfiguration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		did := 0
		do := func() error { did++; return nil }
		began := time.Now()
		if _, err := (Options{Store: r.store, Etcd: silent{}}).Reboot(t.Context(), "apply-config", false, do); err != nil || time.Since(began) > requestTimeout || did != 1 {
			t.Errorf("nobody's quorum counts on it: %v, after %s", err, time.Since(began))
		}
		r.stop = errStop
		if _, err := (Options{Store: r.store, Etcd: member{r}}).Reboot(t.Context(), "apply-config", false, do); !errors.Is(err, etcd.ErrQuorum) || did != 1 {
			t.Errorf("the quorum would be lost: %v", err)
		}
		gone, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := (Options{Store: r.store, Etcd: silent{}}).Reboot(gone, "apply-config", false, do); !errors.Is(err, context.Canceled) || did != 1 {
			t.Errorf("nobody waits for the answer: %v", err)
		}
		// The others wait until the services of this one have stopped. The lock is released before the reboot, which
		// stops etcd.
		r.stop = nil
		k := &lock{}
		last := func() error {
			if len(k.given) != 1 {
				t.Error("the node reboots with the lock")
			}
			return do()
		}
		if _, err := (Options{Store: r.store, Etcd: member{r}, Lock: k}).Reboot(t.Context(), "apply-config", false, last); err != nil || did != 2 || !slices.Equal(k.given, []time.Duration{holdShutdown}) {
			t.Errorf("%v; the lock is held for %v", err, k.given)
		}
		// An operation of this node goes on with its lock.
		busy := &lock{}
		if _, err := (Options{Store: r.store, Etcd: member{r}, Lock: busy, Holds: func() bool { return true }}).Reboot(t.Context(), "apply-config", false, do); err != nil || did != 3 || busy.held || len(busy.given) > 0 {
			t.Errorf("%v; the lock of the operation is given away: %v", err, busy.given)
		}
	})
}

// The power button moves pods away as `gbctl shutdown` does, for less time, and waits for no
// other node.
func TestPressedPowerButton(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.on()
		defer r.off()
		plan, err := r.runner.Start(t.Context(), operation.Ask{Name: Shutdown, Arguments: Pressed(boot.PowerOff, "").Arguments, DryRun: true})
		if err != nil {
			t.Fatal(err)
		}
		var steps []string
		var bound time.Duration
		for _, s := range plan.Steps {
			steps = append(steps, s.ID)
			if s.ID == "drain" {
				bound = s.Deadline
			}
		}
		if diff := cmp.Diff([]string{"cordon", "drain", "end", "uncordon"}, steps); diff != "" {
			t.Errorf("steps (-want +got):\n%s", diff)
		}
		if bound+buttonLook+forcedTimeout > PressBudget {
			t.Errorf("a drain of %s doesn't fit into %s", bound, PressBudget)
		}
	})
}
