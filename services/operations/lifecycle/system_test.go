package lifecycle

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/slots"
)

// systems are the slots of the rig's machine.
type systems struct {
	r       *rig
	running string
	none    error       // why there is no medium
	images  []string    // with which the medium's system runs pods
	later   atomic.Bool // whether a boot hasn't recorded yet what it says about the slots

	mu  sync.Mutex // guards what follows
	all boot.Slots
}

func (s *systems) Running() string { return s.running }

func (s *systems) Trial() bool {
	all, _ := s.Get()
	return all.Unproven(s.running)
}

func (s *systems) Begun() bool { return !s.later.Load() }

func (s *systems) Where() (string, error) { return "slot B of /dev/sda (EFI 512 MiB)", nil }

func (s *systems) Get() (boot.Slots, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.all, nil
}

func (s *systems) Medium(context.Context, bool) (slots.Source, error) {
	return slots.Source{Medium: esp.Medium{Version: "v2", File: "efi.img", Size: 65_000_000, Images: s.images}, Label: "GARBOARD"}, s.none
}

func (s *systems) Pull(_ context.Context, image string, _ bool, report func(done, of int64)) (slots.Source, error) {
	for _, at := range [][2]int64{{0, 0}, {600, 600}, {20_000_600, 65_000_600}, {20_000_601, 65_000_600}, {65_000_600, 65_000_600}} {
		report(at[0], at[1]) // the size is known once the manifest is there
	}
	return slots.Source{Medium: esp.Medium{Version: "v2", File: "garboard.efi", Size: 65_000_000}, Image: image}, s.r.note("pull " + image)
}

func (s *systems) Verify(context.Context, slots.Source, func(done, of int64)) error {
	return s.r.note("verify")
}

func (s *systems) Write(_ context.Context, name string, src slots.Source, system boot.Slot, report func(done, of int64)) error {
	report(src.Size, src.Size)
	if err := s.r.note(strings.TrimSpace("write " + src.Version + " to " + name + " " + strings.Join(slices.Concat(system.Excused, system.Args), " "))); err != nil {
		return err
	}
	return s.change(func(all *boot.Slots) error {
		if err := all.Write(name, time.Now()); err != nil {
			return err
		}
		system.Version = src.Version
		return all.Written(name, system, time.Now())
	})
}

func (s *systems) Empty(_ context.Context, name string) error {
	if err := s.r.note("empty " + name); err != nil {
		return err
	}
	return s.change(func(all *boot.Slots) error { return all.Write(name, time.Now()) })
}

func (s *systems) Rollback(_ context.Context, reason string, excused []string) error {
	if err := s.r.note(strings.Join(append([]string{"choose"}, excused...), " ")); err != nil {
		return err
	}
	return s.change(func(all *boot.Slots) error { return all.Rollback(s.running, reason, excused, time.Now()) })
}

func (s *systems) Stay(context.Context) error {
	if err := s.r.note("stay"); err != nil {
		return err
	}
	return s.change(func(all *boot.Slots) error { all.Stay(s.running, time.Now()); return nil })
}

func (s *systems) change(change func(all *boot.Slots) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return change(&s.all)
}

// installed is a rig whose machine runs from slot A.
func installed(t *testing.T) (*rig, *systems) {
	t.Helper()
	r := newRig(t)
	r.system = &systems{r: r, running: "A", all: boot.Slots{A: boot.Slot{State: boot.SlotGood, Version: "v1"}, B: boot.Slot{State: boot.SlotEmpty}, Choice: "A"}}
	return r, r.system
}

// reboot starts the machine from a slot, after the change that a boot loader or the new system has made.
func (s *systems) reboot(t *testing.T, slot string, change func(all *boot.Slots) error) {
	t.Helper()
	s.r.off()
	if err := s.change(change); err != nil {
		t.Fatal(err)
	}
	s.running = slot
	s.r.on()
}

func prove(name string) func(*boot.Slots) error {
	return func(all *boot.Slots) error { return all.Prove(name, "healthy", time.Now()) }
}

func TestInstallFromAMedium(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := installed(t)
		s.running, s.all = "", boot.Slots{A: boot.Slot{State: boot.SlotEmpty}, B: boot.Slot{State: boot.SlotEmpty}}
		r.on()
		o := r.run(Install, &apiv1.InstallSystemRequest{Force: true})
		check(t, r, o, operation.Running, "verify", "write v2 to A", "reboot")
		s.reboot(t, "A", prove("A"))
		check(t, r, r.end(o.ID), operation.Done)
		if _, err := r.runner.Start(t.Context(), operation.Ask{Name: Install, Arguments: &apiv1.InstallSystemRequest{Force: true}}); err == nil || !strings.Contains(err.Error(), "it is installed") {
			t.Errorf("%v", err)
		}
		r.off()
	})
}

// A machine that starts from its medium again isn't installed anew, and the operation says what to do.
func TestInstalledMachineThatStartsFromItsMedium(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := installed(t)
		s.running, s.all = "", boot.Slots{A: boot.Slot{State: boot.SlotEmpty}, B: boot.Slot{State: boot.SlotEmpty}}
		r.on()
		o := r.run(Install, &apiv1.InstallSystemRequest{Force: true})
		check(t, r, o, operation.Running, "verify", "write v2 to A", "reboot")
		s.reboot(t, "", func(*boot.Slots) error { return nil })
		o = r.end(o.ID)
		check(t, r, o, operation.Failed)
		if !strings.Contains(o.Error, "the machine wasn't started from slot A of its disk: remove the medium") {
			t.Error(o.Error)
		}
		if _, err := r.runner.Start(t.Context(), operation.Ask{Name: Install, Arguments: &apiv1.InstallSystemRequest{Force: true}}); err == nil || !strings.Contains(err.Error(), "has a system in slot A: remove the medium") {
			t.Errorf("%v", err)
		}
		r.off()
	})
}

// What wasn't healthy before needn't be so afterwards.
func TestUpgrade(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := installed(t)
		r.on()
		o := r.run(Upgrade, &apiv1.UpgradeSystemRequest{})
		check(t, r, o, operation.Running, "verify", "write v2 to B timed", "cordon", "look at pods", "reboot")
		s.reboot(t, "B", prove("B"))
		check(t, r, r.end(o.ID), operation.Done, "uncordon")
		if s.all.Next() != "B" || s.all.B.Version != "v2" {
			t.Errorf("%+v", s.all)
		}
		o = r.run(Rollback, &apiv1.RollbackSystemRequest{})
		check(t, r, o, operation.Running, "cordon", "look at pods", "choose timed", "reboot")
		s.reboot(t, "A", func(all *boot.Slots) error {
			return errors.Join(all.Booted("A", time.Now()), all.Prove("A", "healthy", time.Now()))
		})
		check(t, r, r.end(o.ID), operation.Done, "uncordon")
		r.off()
	})
}

// A former system that isn't healthy any more isn't where a rollback ends.
func TestRollbackThatFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := installed(t)
		s.running, s.all.B, s.all.Choice = "B", boot.Slot{State: boot.SlotGood, Version: "v2"}, "B"
		r.on()
		o := r.run(Rollback, &apiv1.RollbackSystemRequest{Force: true})
		check(t, r, o, operation.Running, "choose timed", "reboot")
		s.reboot(t, "B", func(all *boot.Slots) error {
			return errors.Join(all.Booted("A", time.Now()), all.Fail("A", "the kernel panicked", time.Now()))
		})
		o = r.end(o.ID)
		if check(t, r, o, operation.Failed); !strings.HasSuffix(o.Error, "slot A is bad: the kernel panicked. The machine runs the system in slot B") || s.all.Next() != "B" {
			t.Errorf("%s, %+v", o.Error, s.all)
		}
		if _, err := r.runner.Start(t.Context(), operation.Ask{Name: Rollback, By: "somebody"}); err == nil || !strings.Contains(err.Error(), "slot A: it is bad") {
			t.Error(err)
		}
		r.off()
	})
}

// A machine that was booted over the network runs already when it is installed from an image: its pods move away.
func TestInstallFromAnImage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := installed(t)
		s.running, s.none, s.all = "", slots.ErrNoMedium, boot.Slots{A: boot.Slot{State: boot.SlotEmpty}, B: boot.Slot{State: boot.SlotEmpty}}
		r.on()
		o := r.run(Install, &apiv1.InstallSystemRequest{Image: "registry.example/installer:v2"})
		check(t, r, o, operation.Running, "pull registry.example/installer:v2", "verify", "write v2 to A", "cordon", "look at pods", "reboot")
		s.reboot(t, "A", prove("A"))
		check(t, r, r.end(o.ID), operation.Done, "uncordon")
		o = r.run(Upgrade, &apiv1.UpgradeSystemRequest{Force: true, Image: "registry.example/installer:v2"})
		check(t, r, o, operation.Running, "pull registry.example/installer:v2", "verify", "write v2 to B timed", "reboot")
		s.reboot(t, "B", prove("B"))
		check(t, r, r.end(o.ID), operation.Done)
		r.off()
	})
}

// An upgrade fails before it writes anything if the image of the new system's pods can't be had. A machine that is
// installed pulls it later.
func TestImagesOfTheNewSystem(t *testing.T) {
	const image = "registry.example/pause:9"
	for name, tt := range map[string]struct {
		operation string
		missing   error
		sick      string
		want      operation.State
		did       []string
	}{
		"there":   {Upgrade, nil, "timed", operation.Done, []string{"verify", "pull " + image, "write v2 to B timed"}},
		"missing": {Upgrade, errors.New("pull image " + image + ": no such host"), "timed", operation.Failed, []string{"verify", "pull " + image}},
		"repair":  {Upgrade, nil, "containerd", operation.Done, []string{"verify", "write v2 to B containerd"}},
		"install": {Install, nil, "timed", operation.Done, []string{"verify", "write v2 to A"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r, s := installed(t)
				s.images, r.absent, r.sick = []string{image}, tt.missing, []string{tt.sick}
				if tt.operation == Install {
					s.running, s.all = "", boot.Slots{A: boot.Slot{State: boot.SlotEmpty}, B: boot.Slot{State: boot.SlotEmpty}}
				}
				r.on()
				o := r.run(tt.operation, &apiv1.UpgradeSystemRequest{Stage: true})
				check(t, r, o, tt.want, tt.did...)
				if tt.missing != nil && !strings.Contains(o.Error, "this machine can't get an image that Garboard v2 runs pods with: "+tt.missing.Error()) {
					t.Error(o.Error)
				}
				r.off()
			})
		})
	}
}

// S-191, S-192, Q-07: without its data, a node leaves the cluster before the restart. One that can't leave isn't
// upgraded.
func TestUpgradeThatWipes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := installed(t)
		r.may = errors.New("it is the last member")
		r.on()
		if _, err := r.runner.Start(t.Context(), operation.Ask{Name: Upgrade, Arguments: &apiv1.UpgradeSystemRequest{Wipe: true}}); err == nil || !strings.Contains(err.Error(), "it is the last member") {
			t.Errorf("%v", err)
		}
		r.may = nil
		o := r.run(Upgrade, &apiv1.UpgradeSystemRequest{Wipe: true})
		check(t, r, o, operation.Running, "verify", "write v2 to B timed", "cordon", "look at pods", "stop kubelet", "delete node", "stop pods", "leave etcd", "mark EPHEMERAL", "reboot")
		s.reboot(t, "B", prove("B"))
		check(t, r, r.end(o.ID), operation.Done)
		r.off()
	})
}

// The plan says where the system goes before anything is done.
func TestPlanSaysWhere(t *testing.T) {
	for name, tt := range map[string]struct {
		running string
		args    *apiv1.UpgradeSystemRequest
	}{Install: {"", &apiv1.UpgradeSystemRequest{Force: true}}, Upgrade: {"A", &apiv1.UpgradeSystemRequest{Stage: true}}} {
		synctest.Test(t, func(t *testing.T) {
			r, s := installed(t)
			if s.running = tt.running; s.running == "" {
				s.all = boot.Slots{}
			}
			r.on()
			defer func() { r.off() }()
			o, err := r.runner.Start(t.Context(), operation.Ask{Name: name, DryRun: true, Arguments: tt.args})
			if err != nil {
				t.Fatal(err)
			}
			const want = "write the system to slot B of /dev/sda (EFI 512 MiB)"
			if !slices.ContainsFunc(o.Steps, func(s operation.Status) bool { return s.What == want }) || len(r.did) > 0 {
				t.Errorf("%s: %+v, done: %q", name, o.Steps, r.did)
			}
		})
	}
}

// The system gets the kernel arguments of the configuration.
func TestKernelArgumentsOfTheConfiguration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := installed(t)
		cfg, err := configuration.Config(r.store)
		if err != nil {
			t.Fatal(err)
		}
		changed := *cfg
		changed.Machine.Install.ExtraKernelArgs = []string{"nomodeset", "mine=1"}
		if err := configuration.Configs.Put(r.store.As("test"), configuration.ConfigID, &changed); err != nil {
			t.Fatal(err)
		}
		r.on()
		o := r.run(Upgrade, &apiv1.UpgradeSystemRequest{Stage: true})
		check(t, r, r.end(o.ID), operation.Done, "verify", "write v2 to B timed nomodeset mine=1")
		r.off()
	})
}

// S-193: a staged system waits for the next restart, whatever that is for.
func TestStagedUpgrade(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := installed(t)
		r.on()
		o := r.run(Upgrade, &apiv1.UpgradeSystemRequest{Stage: true})
		check(t, r, r.end(o.ID), operation.Done, "verify", "write v2 to B timed")
		if s.all.Next() != "B" {
			t.Errorf("%+v", s.all)
		}
		r.off()
	})
}

// boots is the first boot of a system in slot B.
func boots(all *boot.Slots) error {
	err := all.Write("B", time.Now())
	if err == nil {
		err = all.Written("B", boot.Slot{Version: "v2"}, time.Now())
	}
	return errors.Join(err, all.Booted("B", time.Now()))
}

// After a reset, the system that boots is the one that ran, not one that was never tried.
func TestResetWithAStagedSystem(t *testing.T) {
	for label, want := range map[string][]string{"": {"empty B", "mark STATE EPHEMERAL"}, boot.LabelEphemeral: {"mark EPHEMERAL"}} {
		synctest.Test(t, func(t *testing.T) {
			r, _ := installed(t)
			r.on()
			o := r.run(Upgrade, &apiv1.UpgradeSystemRequest{Stage: true})
			check(t, r, o, operation.Done, "verify", "write v2 to B timed")
			args := &apiv1.ResetRequest{Force: true, Reboot: true}
			if label != "" {
				args.SystemLabelsToWipe = []string{label}
			}
			check(t, r, r.run(Reset, args), operation.Done, append(want, "reboot")...)
			r.off()
		})
	}
}

// The former system says why it runs again as soon as it knows, and takes pods again.
func TestUpgradeThatFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := installed(t)
		r.on()
		o := r.run(Upgrade, &apiv1.UpgradeSystemRequest{})
		check(t, r, o, operation.Running, "verify", "write v2 to B timed", "cordon", "look at pods", "reboot")
		s.later.Store(true)
		s.reboot(t, "A", func(*boot.Slots) error { return nil })
		time.Sleep(time.Minute)
		if err := s.change(func(all *boot.Slots) error { return all.Fail("B", "no kubelet", time.Now()) }); err != nil {
			t.Fatal(err)
		}
		s.later.Store(false)
		o = r.end(o.ID)
		check(t, r, o, operation.Failed, "uncordon")
		if !strings.Contains(o.Error, "slot B is bad: no kubelet. The machine runs the system in slot A") {
			t.Error(o.Error)
		}
		r.off()
	})
}

// An upgrade that can't begin changes nothing, and one that fails before the restart leaves nothing to boot.
func TestUpgradeThatIsRefused(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(r *rig, s *systems)
		want   string
	}{
		"no medium":         {func(_ *rig, s *systems) { s.none = slots.ErrNoMedium }, slots.ErrNoMedium.Error()},
		"from its medium":   {func(_ *rig, s *systems) { s.running = "" }, "doesn't run from its disk"},
		"on trial":          {func(_ *rig, s *systems) { s.all.A.State = boot.SlotTrying }, "isn't known to be healthy yet"},
		"a container":       {func(r *rig, _ *systems) { r.system = nil }, "this node is a container"},
		"etcd needs a node": {func(r *rig, _ *systems) { r.stop = errStop }, "--force"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r, s := installed(t)
				tt.change(r, s)
				r.on()
				defer func() { r.off() }()
				_, err := r.runner.Start(t.Context(), operation.Ask{Name: Upgrade, Arguments: &apiv1.UpgradeSystemRequest{}})
				if err == nil || !strings.Contains(err.Error(), tt.want) || len(r.did) > 0 {
					t.Errorf("%v, %q", err, r.did)
				}
			})
		})
	}
}

// Before the size of an image is known, its pull has nothing to report.
func TestPercentOfAPull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := installed(t)
		r.on()
		o := r.run(Upgrade, &apiv1.UpgradeSystemRequest{Stage: true, Image: "registry.example/installer:v2"})
		o = r.end(o.ID)
		check(t, r, o, operation.Done, "pull registry.example/installer:v2", "verify", "write v2 to B timed")
		var told []string
		if err := r.runner.Watch(t.Context(), o.ID, 0, func(u operation.Update) error {
			for _, e := range u.Events {
				if strings.HasSuffix(e.Text, " pulled") {
					told = append(told, e.Text)
				}
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if want := []string{"20% of 65 MB pulled", "100% of 65 MB pulled"}; !slices.Equal(told, want) {
			t.Errorf("%q, want %q", told, want)
		}
		r.off()
	})
}

// An upgrade that an earlier release has begun comes to its end in the new one.
func TestUpgradeOfAnEarlierRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := installed(t)
		r.on()
		o := r.run(Upgrade, &apiv1.UpgradeSystemRequest{AllowOlder: true})
		r.done()
		path := filepath.Join(r.dir, o.ID+".json")
		text, err := os.ReadFile(path)
		var record map[string]any
		if err = cmp.Or(err, json.Unmarshal(text, &record)); err != nil {
			t.Fatal(err)
		}
		record["arguments"] = []byte(`{"older":true,"drainTimeout":300000000000}`)
		text, err = json.Marshal(record)
		if err = cmp.Or(err, os.WriteFile(path, text, 0o600)); err != nil {
			t.Fatal(err)
		}
		s.reboot(t, "B", prove("B"))
		check(t, r, r.end(o.ID), operation.Done, "uncordon")
		r.off()
	})
}
