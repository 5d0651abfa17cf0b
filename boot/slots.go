package boot

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/boot/meta"
	"golang.org/x/mod/semver"
)

// SlotState is the state of the system in a slot.
type SlotState string

const (
	// SlotEmpty has no system, or an unfinished one: it never boots.
	SlotEmpty SlotState = "empty"
	// SlotTrying has a system that may boot once to prove itself: a new one, or one that a rollback goes back to.
	SlotTrying SlotState = "trying"
	// SlotGood has proved itself: the node was healthy with it.
	SlotGood SlotState = "good"
	// SlotBad has failed. It boots only after a user writes to it again.
	SlotBad SlotState = "bad"
)

// SlotTries is how often a system on trial may boot before it becomes bad. Whatever ends its
// first boot, the boot loader starts the system that is known to work: the new one can't
// leave a machine behind that only a person at it can repair.
const SlotTries = 1

// Slot is one of the two places for a system.
type Slot struct {
	State   SlotState `json:"state"`
	Version string    `json:"version,omitempty"`
	Since   time.Time `json:"since,omitzero"` // in this state
	Reason  string    `json:"reason,omitempty"`
	Tries   int       `json:"tries,omitempty"` // that are left, while it is trying
	// Excused are services, static pods, and what Kubernetes looks at (kubelet.Fault), that weren't
	// healthy before: a system on trial needn't be healthier.
	Excused []string `json:"excused,omitempty"`
	// Kubernetes: what chose this system knew what Kubernetes lacked, and has excused it. What an
	// earlier release has chosen isn't judged by that.
	Kubernetes bool `json:"kubernetes,omitempty"`
	// Wiped: its first boot has no data, and pulls all images again.
	Wiped bool `json:"wiped,omitempty"`
	// Back: it was good before, and a rollback goes back to it.
	Back bool `json:"back,omitempty"`
	// Args are the kernel arguments.
	Args []string `json:"args,omitempty"`
}

// Slots are the two systems of a machine, and the choice between them. This is the one place of the rules; META keeps
// the value (ChangeSlots), the boot loaders follow it (boot/esp, with Line), and package services/system/slots does
// what a verb says in that order: META first. Whatever fails between the two is made up for by the next boot, which
// begins with both. The rules:
//
//		empty ── Write ─▶ empty ── Written ─▶ trying ── Prove ─▶ good
//		                    ▲                   │ Fail, or no tries left
//		                    └────── Write ──────┴──────────────▶ bad
//
//		good, not running ── Rollback ─▶ trying
//
//	  - The only good slot is never written to, and never becomes bad.
//	  - A slot that is trying boots first, while it has tries left; else the chosen good one.
//	  - Being good is earned by health, which its caller decides.
type Slots struct {
	A Slot `json:"a"`
	B Slot `json:"b"`
	// Choice is the good slot that boots: A or B; "" if there is none yet.
	Choice string `json:"choice,omitempty"`
}

// SlotNames are the names of both slots.
var SlotNames = [...]string{"A", "B"}

// ParamSlot is the kernel parameter with the slot that a machine boots from; a machine that
// boots from a medium has none.
const ParamSlot = "garboard.slot"

// ParamTrial is the kernel parameter of a system that is trying. It is known without the disk: a new system that
// doesn't find it goes, too. The first system of a disk has the value TrialAlone, because there is no other one; one
// that a rollback goes back to has TrialBack.
const (
	ParamTrial = "garboard.trial"
	TrialAlone = "alone"
	TrialBack  = "back"
)

// Fallback reports whether this boot is the trial of a system, and a machine that restarts runs the one that is known
// to work.
func (c Cmdline) Fallback() bool {
	value, trial := c.Get(ParamTrial)
	return trial && value != TrialAlone
}

// Back reports whether this boot is the trial of a system that was good before.
func (c Cmdline) Back() bool {
	value, _ := c.Get(ParamTrial)
	return value == TrialBack
}

// Set reports whether a parameter is set by a boot loader: it describes one boot, and no system keeps it.
func (p Param) Set() bool {
	return slices.Contains([]string{ParamSlot, ParamTrial, "BOOT_IMAGE", "initrd"}, p.Key)
}

// Line are the kernel arguments with which a boot loader starts the system in a slot.
func (s *Slots) Line(name string) string {
	args := append(slices.Clone(s.Of(name).Args), ParamSlot+"="+name)
	if trial := s.Trial(name); trial != "" {
		args = append(args, trial)
	}
	return strings.Join(args, " ")
}

// Trial is the parameter of the system in a slot; "": it isn't trying.
func (s *Slots) Trial(name string) string {
	switch {
	case !s.Unproven(name):
		return ""
	case s.Alone():
		return ParamTrial + "=" + TrialAlone
	case s.Of(name).Back:
		return ParamTrial + "=" + TrialBack
	}
	return ParamTrial
}

// SlotsKey is the key of the slots in META.
var SlotsKey = meta.Key[Slots]{Name: "slots"}

// FloorKey is the key of the highest release that was healthy on the machine, if any was: a lower one is taken only on
// request. A reset removes it with the rest of META.
var FloorKey = meta.Key[string]{Name: "release-floor"}

// ReadSlots takes a META without slots for two empty ones.
func ReadSlots(c meta.Change) (Slots, error) {
	slots, err := SlotsKey.In(c)
	for _, name := range SlotNames {
		if slot := slots.Of(name); slot.State == "" {
			slot.State = SlotEmpty
		}
	}
	return slots, err
}

// ChangeSlots writes a change of the slots, and makes the floor at least the release of each good system. META has
// both or none: after a power failure, no system is good that the floor doesn't know.
func ChangeSlots(c meta.Change, change func(slots *Slots) error) (Slots, error) {
	slots, err := ReadSlots(c)
	if err == nil {
		err = change(&slots)
	}
	if err != nil {
		return slots, err
	}
	floor, err := FloorKey.In(c)
	for _, name := range SlotNames {
		if slot := slots.Of(name); err == nil && slot.State == SlotGood && semver.Compare(slot.Version, floor) > 0 {
			floor = slot.Version
			err = FloorKey.Put(c, floor)
		}
	}
	return slots, errors.Join(err, SlotsKey.Put(c, slots))
}

// ErrOnlyGood refuses a change after which no slot would have a system that is known to work.
var ErrOnlyGood = errors.New("it is the only slot with a system that is known to work")

// Of is the slot with a name; for another name, it is an empty one that nobody keeps.
func (s *Slots) Of(name string) *Slot {
	switch name {
	case "A":
		return &s.A
	case "B":
		return &s.B
	}
	return &Slot{State: SlotEmpty}
}

// other is the name of the other slot.
func other(name string) string {
	if name == "A" {
		return "B"
	}
	return "A"
}

// Alone reports whether no system is known to work: nothing can be gone back to.
func (s *Slots) Alone() bool { return !s.good("A") && !s.good("B") }

func (s *Slots) good(name string) bool { return s.Of(name).State == SlotGood }

// Next is the slot that boots next; "" if no slot has a system.
func (s *Slots) Next() string {
	for _, name := range SlotNames {
		if slot := s.Of(name); slot.State == SlotTrying && slot.Tries > 0 {
			return name
		}
	}
	if s.good(s.Choice) {
		return s.Choice
	}
	for _, state := range []SlotState{SlotGood, SlotTrying} { // a trying one without a try: there is no other
		for _, name := range SlotNames {
			if slot := s.Of(name); slot.State == state {
				return name
			}
		}
	}
	return ""
}

// Target is the slot for a new system while the machine runs from the other
// one: "" for a machine that runs from a medium.
func (s *Slots) Target(running string) string {
	if running != "" {
		return other(running)
	}
	if s.good("A") && !s.good("B") {
		return "B"
	}
	return "A"
}

// Write records that a slot is being written: until Written, it doesn't boot. If the power fails before the boot
// loaders know it, they start the former system of the slot, if it was on trial (Found); nothing is written before they
// know.
func (s *Slots) Write(name string, now time.Time) error {
	slot := s.Of(name)
	if slot.State == SlotGood && !s.good(other(name)) {
		return fmt.Errorf("write slot %s: %w", name, ErrOnlyGood)
	}
	*slot = Slot{State: SlotEmpty, Since: now, Reason: "a system is being written to it"}
	if s.Choice == name {
		s.Choice = other(name)
	}
	return nil
}

// Written records that a slot has a complete system, which boots next. If the power fails before the boot loaders know
// it, the running system boots again, and makes them follow.
func (s *Slots) Written(name string, system Slot, now time.Time) error {
	slot := s.Of(name)
	if slot.State != SlotEmpty {
		return fmt.Errorf("slot %s is %s: nothing was written to it", name, slot.State)
	}
	system.State, system.Since, system.Tries, system.Reason = SlotTrying, now, SlotTries, "written"
	*slot = system
	return nil
}

// Booted records a boot of a slot: a slot that is trying has one try less. The boot loader has counted it before: where
// this can't be written any more, the other slot boots next all the same. Without tries left, it becomes bad here: a
// boot loader that doesn't count has started it again.
func (s *Slots) Booted(name string, now time.Time) error {
	slot := s.Of(name)
	if slot.State != SlotTrying {
		return nil
	}
	if slot.Tries == 0 {
		return s.Fail(name, "it booted again before it was healthy", now)
	}
	slot.Tries--
	return nil
}

// Prove makes a trying slot good, and the choice. If the power fails before that, the former system boots, and says
// that this one has failed. If it fails before the boot loaders know it, the former one boots, finds this one good, and
// has them follow: the next boot is of this one.
func (s *Slots) Prove(name, reason string, now time.Time) error {
	slot := s.Of(name)
	switch slot.State {
	case SlotGood:
		return nil
	case SlotTrying:
		slot.become(SlotGood, reason, now)
		s.Choice = name
		return nil
	}
	return fmt.Errorf("slot %s is %s, and can't be good", name, slot.State)
}

func (s *Slot) become(state SlotState, reason string, now time.Time) {
	*s = Slot{State: state, Version: s.Version, Args: s.Args, Since: now, Reason: reason}
}

// Found records the system that runs in a slot of which nothing is known: META was wiped, or the power went before the
// boot loader knew that the slot would be written to. In the second case, the boot loader has started it on trial.
func (s *Slots) Found(name string, system Slot, trial bool, now time.Time) error {
	slot := s.Of(name)
	switch {
	case !slices.Contains(SlotNames[:], name):
		return fmt.Errorf("slot %q: there are A and B", name)
	case slot.State != "" && slot.State != SlotEmpty:
		return nil
	}
	system.State, system.Since, system.Reason = SlotGood, now, "it was found running"
	if trial {
		system.State, system.Tries = SlotTrying, SlotTries
	} else {
		s.Choice = name
	}
	*slot = system
	return nil
}

// Fail makes a trying slot bad, and the good one the choice. A good slot stays good: it has worked, and the failure may
// have another cause. Where this can't be written, the boot loader starts the good one all the same, which then records
// the failure. A system that is alone boots again.
func (s *Slots) Fail(name, reason string, now time.Time) error {
	slot := s.Of(name)
	if slot.State != SlotTrying {
		return nil
	}
	if !s.good(other(name)) {
		return fmt.Errorf("slot %s has failed (%s), and boots again: there is no good one", name, reason)
	}
	slot.become(SlotBad, reason, now)
	s.Choice = other(name)
	return nil
}

// Rollback makes the other slot boot next, which must be good. It has to prove itself again, because what it stands on
// may have changed since: otherwise the running system, which stays good and the choice, boots again, also where the
// power fails. A running system on trial fails by it.
func (s *Slots) Rollback(running, reason string, excused []string, now time.Time) error {
	to := other(running)
	switch from, slot := s.Of(running), s.Of(to); {
	case slot.State == SlotTrying && slot.Back && slot.Tries > 0:
		return nil
	case slot.State != SlotGood:
		return fmt.Errorf("roll back to slot %s: it is %s", to, slot.State)
	case from.State == SlotTrying:
		return s.Fail(running, reason, now)
	case from.State != SlotGood:
		return fmt.Errorf("roll back from slot %s: it is %s", running, from.State)
	}
	slot := s.Of(to)
	slot.become(SlotTrying, reason, now)
	slot.Tries, slot.Excused, slot.Kubernetes, slot.Back = SlotTries, excused, true, true
	s.Choice = running
	return nil
}

// Stay takes a rollback back, before the other system has booted: it is as good as it was.
func (s *Slots) Stay(running string, now time.Time) {
	if slot := s.Of(other(running)); slot.State == SlotTrying && slot.Back && slot.Tries > 0 {
		slot.become(SlotGood, "a rollback to it was called off", now)
	}
}

// Unproven reports whether the system in a slot hasn't proved itself yet.
func (s *Slots) Unproven(name string) bool { return s.Of(name).State == SlotTrying }

// Outcome is what has become of a new system, as far as it is known: it is good and runs, or why it doesn't.
func (s *Slots) Outcome(name, running string) (good bool, err error) {
	switch slot := s.Of(name); {
	case name == running && (slot.State == SlotGood || slot.State == SlotTrying):
		return slot.State == SlotGood, nil
	case slot.State == SlotTrying && slot.Tries > 0:
		err = fmt.Errorf("the machine wasn't started from slot %s of its disk: remove the medium, or let the firmware start the disk first", name)
	default:
		err = fmt.Errorf("slot %s is %s: %s. The machine runs the system in slot %s", name, slot.State, slot.Reason, running)
	}
	return false, err
}
