package history

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

var start = time.Unix(1_700_000_000, 0)

// The end-to-end tests depend on it that Check notices a lost write.
func TestCheckFindsLostWrites(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		written := rapid.MapOfN(rapid.StringMatching(`[a-z]{1,8}`), rapid.StringMatching(`[0-9]{1,3}`), 1, 20).Draw(t, "written")
		h := New(start)
		for key, value := range written {
			h.Acknowledged(key, value, start)
		}
		found := maps.Clone(written)
		found["of a failed write, perhaps"] = "1"
		if err := h.Check(found); err != nil {
			t.Fatalf("all is there: %v", err)
		}
		key := rapid.SampledFrom(slices.Sorted(maps.Keys(written))).Draw(t, "key")
		found[key] = "another"
		if err := h.Check(found); err == nil || !strings.Contains(err.Error(), "1 are changed") || !strings.Contains(err.Error(), key) {
			t.Fatalf("%s has changed: %v", key, err)
		}
		delete(found, key)
		if err := h.Check(found); err == nil || !strings.Contains(err.Error(), "1 are lost") || !strings.Contains(err.Error(), key) {
			t.Fatalf("%s is lost: %v", key, err)
		}
	})
}

func TestCheckWantsWrites(t *testing.T) {
	t.Parallel()
	h := New(start)
	h.Failed(errors.New("refused"), start)
	if h.Check(nil) == nil {
		t.Error("a test without a write would pass")
	}
}

func TestLongestPause(t *testing.T) {
	t.Parallel()
	h := New(start)
	at := func(s int) time.Time { return start.Add(time.Duration(s) * time.Second) }
	h.Acknowledged("a", "", at(1))
	h.Failed(errors.New("no leader"), at(4))
	h.Failed(errors.New("no leader"), at(6))
	h.Acknowledged("b", "", at(7))
	h.Acknowledged("c", "", at(9))
	if p := h.Longest(); p != (Pause{at(1), 6 * time.Second}) {
		t.Errorf("longest pause: %v", p)
	}
	h.Acknowledged("d", "", at(10))
	if p := h.Longest(); p != (Pause{at(9), time.Second}) {
		t.Errorf("longest pause since: %v", p)
	}
	// One that never ends is one, too.
	h.Failed(errors.New("no leader"), at(15))
	if p := h.Longest(); p != (Pause{at(10), 5 * time.Second}) {
		t.Errorf("longest pause, to the end: %v", p)
	}
	if all := h.Outages(); !slices.Equal(all, []Pause{{at(1), 6 * time.Second}}) {
		t.Errorf("outages that are over: %v", all)
	}
	h.Acknowledged("e", "", at(16))
	if all := h.Outages(); len(all) != 2 || all[1] != (Pause{at(10), 6 * time.Second}) {
		t.Errorf("outages: %v", all)
	}
	if got := h.String(); got != "5 writes acknowledged, 3 not, the last of them: no leader" {
		t.Error(got)
	}
}
