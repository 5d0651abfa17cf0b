package boot

import (
	"errors"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

var noon = time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)

func TestSlotsOfAnUpgrade(t *testing.T) {
	t.Parallel()
	var s Slots
	step := func(want string, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		if got := string(s.A.State) + " " + string(s.B.State) + " " + s.Next(); got != want {
			t.Fatalf("%s, want %s", got, want)
		}
	}
	s.A, s.B = Slot{State: SlotEmpty}, Slot{State: SlotEmpty}
	if s.Target("") != "A" {
		t.Error("the first system isn't written to A")
	}
	step("empty empty ", s.Write("A", noon))
	step("trying empty A", s.Written("A", Slot{Version: "v1"}, noon))
	step("trying empty A", s.Booted("A", noon))
	step("good empty A", s.Prove("A", "healthy", noon))
	if err := s.Write("A", noon); !errors.Is(err, ErrOnlyGood) {
		t.Errorf("%v", err)
	}
	step("good empty A", s.Write(s.Target("A"), noon))
	step("good trying B", s.Written("B", Slot{Version: "v2"}, noon))
	step("good trying A", s.Booted("B", noon))
	step("good bad A", s.Booted("B", noon)) // a boot loader that doesn't count
	if !strings.Contains(s.B.Reason, "booted again") || s.B.Version != "v2" {
		t.Errorf("%+v", s.B)
	}
	step("good empty A", s.Write("B", noon))
	step("good trying B", s.Written("B", Slot{Version: "v3"}, noon))
	step("good good B", s.Prove("B", "healthy", noon))
	step("trying good A", s.Rollback("B", "asked", []string{"etcd"}, noon))
	if got := s.Trial("A"); got != "garboard.trial=back" || s.A.Excused[0] != "etcd" {
		t.Errorf("%s, %+v", got, s.A)
	}
	step("trying good A", s.Rollback("B", "asked again", nil, noon))
	step("trying good B", s.Booted("A", noon))
	step("good good A", s.Prove("A", "healthy", noon))
	step("good good A", s.Fail("A", "one bad day", noon))
	step("good trying B", s.Rollback("A", "asked", nil, noon))
	step("good bad A", s.Fail("B", "it can't read its data any more", noon))
	if err := s.Rollback("A", "asked", nil, noon); err == nil {
		t.Error("it rolls back to a bad one")
	}
	step("good empty A", s.Write("B", noon))
	step("good trying B", s.Written("B", Slot{Version: "v4"}, noon))
	if got := s.Trial("B"); got != "garboard.trial" {
		t.Error(got)
	}
	step("good bad A", s.Rollback("B", "asked", nil, noon))
	step("good empty A", s.Write("B", noon))
	step("good trying B", s.Written("B", Slot{Version: "v5"}, noon))
	step("good good B", s.Prove("B", "healthy", noon))
	step("empty good B", s.Write("A", noon))
	if err := s.Rollback("B", "asked", nil, noon); err == nil {
		t.Error("it rolls back to nothing")
	}
}

// After any sequence of steps, a machine that once had a good slot still has
// one, and boots a slot that isn't empty or bad.
func TestOneSlotStaysGood(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		s := Slots{A: Slot{State: SlotGood}, B: Slot{State: SlotEmpty}, Choice: "A"}
		for range rapid.IntRange(1, 40).Draw(rt, "steps") {
			name := rapid.SampledFrom(SlotNames[:]).Draw(rt, "slot")
			switch rapid.IntRange(0, 5).Draw(rt, "what") {
			case 0:
				_ = s.Write(name, noon)
			case 1:
				_ = s.Written(name, Slot{Version: "v"}, noon)
			case 2:
				_ = s.Booted(s.Next(), noon)
			case 3:
				_ = s.Prove(name, "healthy", noon)
			case 4:
				_ = s.Fail(name, "failed", noon)
			case 5:
				_ = s.Rollback(name, "asked", nil, noon)
			}
			if !s.good("A") && !s.good("B") {
				rt.Fatalf("no slot is good: %+v", s)
			}
			if next := s.Of(s.Next()); next.State != SlotGood && next.State != SlotTrying {
				rt.Fatalf("%q boots next: %+v", s.Next(), s)
			}
		}
	})
}
