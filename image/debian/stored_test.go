package debian

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/garboard-os/garboard/image/cache"
	"github.com/garboard-os/garboard/kernel/deb"
	"github.com/google/go-cmp/cmp"
)

func TestStoredAsksOnce(t *testing.T) {
	store := &cache.Store{Dir: t.TempDir()}
	asked := 0
	answer := []deb.Package{{Name: "a", Version: "1", SHA256: "00", Depends: []string{"b"}}}
	ask := func(question string, err error) ([]deb.Package, error) {
		return Stored(t.Context(), store, "answers", []string{question}, func(context.Context) ([]deb.Package, error) {
			asked++
			return answer, err
		})
	}
	if _, err := ask("a", deb.ErrUnknown); !errors.Is(err, deb.ErrUnknown) {
		t.Fatalf("error: %v", err)
	}
	for range 2 {
		got, err := ask("a", nil)
		if diff := cmp.Diff(answer, got); diff != "" || err != nil {
			t.Errorf("%v %s", err, diff)
		}
	}
	if asked != 2 {
		t.Errorf("asked %d times, want once without and once with an answer", asked)
	}
	if _, err := ask("b", nil); err != nil || asked != 3 {
		t.Errorf("another question: asked %d times, %v", asked, err)
	}
}

func TestStateFollowsUpdates(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "..", filepath.Base(dir)+".list")
	state := func() string {
		s, err := stateOf(dir, file)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	before := state()
	if err := os.Mkdir(filepath.Join(dir, "partial"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name    string
		changes bool
	}{
		{filepath.Join(dir, "lock"), false},
		{filepath.Join(dir, "partial", "mirror_Packages"), false},
		{filepath.Join(dir, "mirror_Packages"), true},
		{file, true},
	} {
		if err := os.WriteFile(c.name, []byte("x"), 0o644); err != nil {
			t.Fatal(err)
		}
		after := state()
		if (after != before) != c.changes {
			t.Errorf("%s changes the state: %v", c.name, !c.changes)
		}
		before = after
	}
}
