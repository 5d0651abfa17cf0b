package lifecycle

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"google.golang.org/protobuf/types/known/durationpb"
)

// S-180 to S-183: what a graceful reset does, in order; and one that isn't.
func TestS180Reset(t *testing.T) {
	for _, tt := range []struct {
		args *apiv1.ResetRequest
		want []string
		back bool // it joins its cluster again
	}{
		{&apiv1.ResetRequest{}, append(slices.Clone(leaveInOrder), "mark STATE EPHEMERAL", "power off"), false},
		{&apiv1.ResetRequest{Reboot: true, SystemLabelsToWipe: []string{"EPHEMERAL"}}, append(slices.Clone(leaveInOrder), "mark EPHEMERAL", "reboot"), true},
		{&apiv1.ResetRequest{Force: true, SystemLabelsToWipe: []string{"EPHEMERAL", "STATE", "STATE"}}, []string{"mark STATE EPHEMERAL", "power off"}, false},
	} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t)
			r.on()
			defer func() { r.off() }()
			o := r.run(Reset, tt.args)
			if tt.back {
				check(t, r, o, operation.Running, tt.want...)
				r.off()
				r.on()
				o, tt.want = r.end(o.ID), nil
			}
			check(t, r, o, operation.Done, tt.want...)
		})
	}
}

// The control planes delete no worker that has taints of its own. Its Node of before neither stays cordoned nor is
// deleted later.
func TestResetOfANodeThatStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.isWorker()
		if err := secrets.Kubernetes.Delete(r.store.As("test"), secrets.KubernetesID); err != nil {
			t.Fatal(err)
		}
		r.stays = true
		r.on()
		defer func() { r.off() }()
		o := r.run(Reset, &apiv1.ResetRequest{Reboot: true, SystemLabelsToWipe: []string{"EPHEMERAL"}})
		check(t, r, o, operation.Running, "cordon", "look at pods", "stop kubelet", "ask to leave", "stop pods", "mark EPHEMERAL", "reboot")
		r.off()
		r.on()
		check(t, r, r.end(o.ID), operation.Done, "stay", "uncordon")
		if left, _ := r.node["metadata"].(object)["annotations"].(object); len(left) > 0 {
			t.Errorf("its Node has %v", left)
		}
	})
}

// the user's disks go with the system, and are named before. After a restart, one
// without a serial number may be another one.
func TestQ08UserDisks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.on()
		args := &apiv1.ResetRequest{UserDisksToWipe: []string{"/dev/sdb", "/dev/sdc"}}
		if _, err := r.runner.Start(t.Context(), operation.Ask{Name: Reset, Arguments: &apiv1.ResetRequest{UserDisksToWipe: []string{"/dev/sdz"}}}); err == nil || err.Error() != "reset: --user-disks-to-wipe: there is no disk /dev/sdz" {
			t.Errorf("%v", err)
		}
		plan, err := r.runner.Start(t.Context(), operation.Ask{Name: Reset, Arguments: args, DryRun: true})
		if err != nil {
			t.Fatal(err)
		}
		if got, want := strings.Join(plan.Warnings, "\n"), "all that is on /dev/sdb (2 TiB, BIG, serial s1) is lost\nall that is on /dev/sdc (1 TiB, without a serial number) is lost"; got != want {
			t.Errorf("warnings\n%s\nwant\n%s", got, want)
		}
		if what := plan.Steps[len(plan.Steps)-2].What; !strings.HasSuffix(what, ", /dev/sdb, /dev/sdc") {
			t.Errorf("step %q", what)
		}
		r.cut = "leave etcd"
		o := r.run(Reset, args)
		r.off()
		r.done()
		r.on()
		o = r.end(o.ID)
		did := r.done()
		if !slices.Contains(did, "mark STATE EPHEMERAL /dev/sdb") {
			t.Errorf("after a restart it did %v", did)
		}
		r.off()

		r = newRig(t)
		r.on()
		defer r.off()
		o = r.run(Reset, args)
		check(t, r, o, operation.Done, append(slices.Clone(leaveInOrder), "mark STATE EPHEMERAL /dev/sdb /dev/sdc", "power off")...)
	})
}

// A mode that isn't possible is refused before anything is done, and what it means is said.
func TestWipeMode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.on()
		defer func() { r.off() }()
		for mode, why := range map[string]string{
			"fast": `--wipe-mode "fast": there are keys, discard, overwrite`, boot.WipeDiscard: "reset: --wipe-mode discard: /dev/sda can't discard data",
		} {
			if _, err := r.runner.Start(t.Context(), operation.Ask{Name: Reset, Arguments: &apiv1.ResetRequest{WipeMode: mode}}); err == nil || !strings.Contains(err.Error(), why) {
				t.Errorf("%s: %v", mode, err)
			}
		}
		args := &apiv1.ResetRequest{WipeMode: boot.WipeOverwrite}
		plan, err := r.runner.Start(t.Context(), operation.Ask{Name: Reset, Arguments: args, DryRun: true})
		if err != nil {
			t.Fatal(err)
		}
		if what := plan.Steps[len(plan.Steps)-2].What; !strings.HasSuffix(what, ", with --wipe-mode overwrite") || !slices.Contains(plan.Warnings, "it takes hours") {
			t.Errorf("step %q, warnings %q", what, plan.Warnings)
		}
		o := r.run(Reset, args)
		check(t, r, o, operation.Done, append(slices.Clone(leaveInOrder), "mark STATE EPHEMERAL overwrite", "power off")...)
	})
}

// S-185: refused before anything is done, with the reason; --graceful=false isn't.
func TestS185ResetOfTheLastMember(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.may = errors.New("remove etcd member n1: it is the last voting member")
		r.on()
		defer r.off()
		for _, dry := range []bool{true, false} {
			_, err := r.runner.Start(t.Context(), operation.Ask{Name: Reset, Arguments: &apiv1.ResetRequest{}, DryRun: dry})
			var refusal operation.Refusal
			if !errors.As(err, &refusal) || !strings.Contains(err.Error(), "it is the last voting member. Nothing is wiped. `gbctl reset --graceful=false`") {
				t.Errorf("error %v", err)
			}
		}
		if did := r.done(); len(did) > 0 {
			t.Errorf("it did %v", did)
		}
		check(t, r, r.run(Reset, &apiv1.ResetRequest{Force: true}), operation.Done, "mark STATE EPHEMERAL", "power off")
	})
}

// A member that can't leave at the last moment stays, and all is as it was.
func TestResetThatEtcdRefuses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.leave = errors.New("the cluster would lose its quorum")
		r.on()
		defer r.off()
		o := r.run(Reset, &apiv1.ResetRequest{})
		check(t, r, o, operation.Failed, append(slices.Clone(leaveInOrder[:5]), "see etcd settled", "start etcd", "start kubelet")...)
		if !strings.Contains(o.Error, "the cluster would lose its quorum") {
			t.Errorf("error %q", o.Error)
		}
	})
}

// Duty 4: with nobody there, it still ends, and says what it couldn't do.
func TestResetEndsWithoutTheCluster(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.on()
		defer r.off()
		asked, err := r.runner.Start(t.Context(), operation.Ask{Name: Reset, Arguments: &apiv1.ResetRequest{DrainTimeout: durationpb.New(2 * time.Minute)}})
		if err != nil {
			t.Fatal(err)
		}
		r.mu.Lock()
		r.down, r.pods = true, []string{"slow"}
		r.mu.Unlock()
		began := time.Now()
		o := r.end(asked.ID)
		if took := time.Since(began); took > changeTimeout+2*time.Minute+nodeTimeout+time.Minute {
			t.Errorf("it took %s", took)
		}
		for _, step := range []string{"cordon", "drain", "node"} {
			at := slices.IndexFunc(o.Steps, func(s operation.Status) bool { return s.ID == step })
			if o.Steps[at].State != operation.Skipped || o.Steps[at].Reason == "" {
				t.Errorf("step %+v", o.Steps[at])
			}
		}
		did := r.done()
		if want := []string{"stop kubelet", "stop pods", "leave etcd", "mark STATE EPHEMERAL", "power off"}; !slices.Equal(did[max(len(did)-5, 0):], want) {
			t.Errorf("it did %v", did)
		}
	})
}

// Wherever the power goes, it ends reset, and has left the cluster.
func TestResetPowerCuts(t *testing.T) {
	for _, cut := range append(slices.Clone(leaveInOrder), "mark STATE EPHEMERAL") {
		t.Run(cut, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.on()
				r.cut = cut
				o := r.run(Reset, &apiv1.ResetRequest{})
				r.off()
				if did := r.done(); did[len(did)-1] != cut {
					t.Fatalf("it did %v", did)
				}
				if r.node == nil {
					r.node = newNode() // the kubelet registers again
				}
				r.on()
				defer r.off()
				o = r.end(o.ID)
				did := r.done()
				if o.State != operation.Done || !slices.Equal(did[len(did)-2:], []string{"mark STATE EPHEMERAL", "power off"}) {
					t.Errorf("%s (%s): it did %v", o.State, o.Error, did)
				}
				if r.node != nil || !slices.Contains(did, "leave etcd") || !slices.Contains(did, "stop kubelet") {
					t.Errorf("it hasn't left the cluster: it did %v", did)
				}
			})
		})
	}
}
