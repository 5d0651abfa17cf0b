package lifecycle

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/operation"
	"google.golang.org/protobuf/types/known/durationpb"
)

// Whatever restarts the machine while an upgrade is under way, the new system has its boot: it isn't restarted again,
// and isn't written over itself.
func TestUpgradeIsCutShort(t *testing.T) {
	for cut, before := range map[string][]string{"write v2 to B timed": {"verify", "write v2 to B timed"}, "cordon": {"verify", "write v2 to B timed", "cordon"}} {
		synctest.Test(t, func(t *testing.T) {
			r, s := installed(t)
			r.on()
			r.cut = cut
			o := r.run(Upgrade, &apiv1.UpgradeSystemRequest{})
			check(t, r, o, operation.Running, before...)
			s.reboot(t, "B", boots)
			time.Sleep(time.Minute)
			if err := s.change(prove("B")); err != nil {
				t.Fatal(err)
			}
			var after []string
			if cut == "cordon" {
				after = append(after, "uncordon")
			}
			check(t, r, r.end(o.ID), operation.Done, after...)
			r.off()
		})
	}
}

// After a restart of the former system, an upgrade waits for what the restart has stopped, and the new system isn't
// excused from it.
func TestUpgradeIsCutShortBeforeItWrites(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := installed(t)
		r.on()
		r.cut = "verify"
		o := r.run(Upgrade, &apiv1.UpgradeSystemRequest{Stage: true, Image: "registry.example/installer:v2"})
		check(t, r, o, operation.Running, "pull registry.example/installer:v2", "verify")
		r.mu.Lock()
		r.sick = []string{"containerd", "kubelet", "timed"}
		r.mu.Unlock()
		s.reboot(t, "A", func(*boot.Slots) error { return nil })
		time.Sleep(time.Minute)
		check(t, r, o, operation.Running)
		r.mu.Lock()
		r.sick = []string{"kubelet", "timed"}
		r.mu.Unlock()
		check(t, r, r.end(o.ID), operation.Done, "verify", "write v2 to B timed")
		r.off()
	})
}

// An upgrade that was called off before the restart into the new system doesn't say that it is undone.
func TestUndoneUpgradeThatRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := installed(t)
		r.pods = []string{"slow"}
		r.on()
		o, err := r.runner.Start(t.Context(), operation.Ask{Name: Upgrade, Arguments: &apiv1.UpgradeSystemRequest{DrainTimeout: durationpb.New(time.Hour)}, By: "somebody"})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		r.mu.Lock()
		r.cut = "uncordon"
		r.mu.Unlock()
		if err := r.runner.Abort(o.ID, "somebody"); err != nil {
			t.Fatal(err)
		}
		if o = r.end(o.ID); o.State != operation.Undoing {
			t.Errorf("it is %s", o.State)
		}
		r.done()
		s.reboot(t, "B", boots)
		o = r.end(o.ID)
		if check(t, r, o, operation.Aborted); !strings.Contains(o.Error, "gbctl rollback") {
			t.Error(o.Error)
		}
		r.off()
	})
}

// A machine that restarted before its data was marked for wiping keeps it, and the operation says so.
func TestWipingUpgradeIsCutShort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := installed(t)
		r.on()
		r.cut = "stop kubelet"
		o := r.run(Upgrade, &apiv1.UpgradeSystemRequest{Wipe: true})
		check(t, r, o, operation.Running, "verify", "write v2 to B timed", "cordon", "look at pods", "stop kubelet")
		s.reboot(t, "B", boots)
		if err := s.change(prove("B")); err != nil {
			t.Fatal(err)
		}
		if o = r.end(o.ID); o.State != operation.Failed || !strings.Contains(o.Error, "gbctl -n ADDRESS reset --system-labels-to-wipe EPHEMERAL --reboot") {
			t.Errorf("%s: %s", o.State, o.Error)
		}
		r.off()
	})
}

func TestRollbackIsCutShort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := installed(t)
		s.running, s.all.B, s.all.Choice = "B", boot.Slot{State: boot.SlotGood, Version: "v2"}, "B"
		r.on()
		r.cut = "choose timed"
		o := r.run(Rollback, &apiv1.RollbackSystemRequest{})
		check(t, r, o, operation.Running, "cordon", "look at pods", "choose timed")
		s.reboot(t, "A", func(all *boot.Slots) error {
			return errors.Join(all.Rollback("B", "", nil, time.Now()), all.Booted("A", time.Now()))
		})
		time.Sleep(time.Minute)
		if err := s.change(prove("A")); err != nil {
			t.Fatal(err)
		}
		check(t, r, r.end(o.ID), operation.Done, "uncordon")
		if s.all.Next() != "A" {
			t.Errorf("%+v", s.all)
		}
		r.off()
	})
}
