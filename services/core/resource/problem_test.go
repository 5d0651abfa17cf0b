package resource

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

type part struct{ Problem string }

type machineSpec struct {
	Count    int
	Problems []string
	Parts    []part
	Last     part
}

var machines = Define[machineSpec](Definition{Type: "TestMachines.test.garboard.dev", Kind: "TestMachine", Namespace: "test"})

// An object is in trouble since its first problem, whatever its problems are afterwards, until it
// has none.
func TestTroubled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewStore()
		w := s.As("test")
		began := time.Now()
		for i, step := range []struct {
			spec  machineSpec
			since time.Duration // of the problems, after the beginning
			want  []string      // nil: it has none
		}{
			{machineSpec{}, 0, nil},
			{machineSpec{Problems: []string{"a"}}, time.Minute, []string{"a"}},
			{machineSpec{Parts: []part{{}, {"b"}}, Last: part{"c"}}, time.Minute, []string{"b", "c"}},
			{machineSpec{Count: 1}, 0, nil},
			{machineSpec{Last: part{"d"}}, 4 * time.Minute, []string{"d"}},
		} {
			must(t, machines.Put(w, "m", step.spec))
			all := s.Troubled()
			if step.want == nil {
				if len(all) > 0 {
					t.Errorf("step %d: %v", i, all)
				}
			} else if len(all) != 1 || all[0].ID != "m" || !all[0].Troubled.Equal(began.Add(step.since)) {
				t.Errorf("step %d: %v", i, all)
			} else if diff := cmp.Diff(step.want, Problems(all[0].Spec)); diff != "" {
				t.Errorf("step %d: %s", i, diff)
			}
			time.Sleep(time.Minute)
		}
	})
}
