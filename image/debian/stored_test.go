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
	lists := deb.Lists{Dir: t.TempDir()}
	ask := func(question string, err error) ([]deb.Package, error) {
		return Stored(t.Context(), store, "answers", lists, []string{question}, func(context.Context) ([]deb.Package, error) {
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
	// Lists that came anew, at the same place.
	signed := filepath.Join(lists.Dir, "state/lists/mirror_InRelease")
	if err := errors.Join(os.MkdirAll(filepath.Dir(signed), 0o700), os.WriteFile(signed, []byte("new"), 0o600)); err != nil {
		t.Fatal(err)
	}
	if _, err := ask("b", nil); err != nil || asked != 4 {
		t.Errorf("other lists: asked %d times, %v", asked, err)
	}
}
