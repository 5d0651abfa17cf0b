package containerd

import (
	"testing"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/plugins/content/local"
	digest "github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// The bytes of an image are counted in containerd's own store: of a part that is being
// fetched, and of one that is there.
func TestFetched(t *testing.T) {
	t.Parallel()
	store, err := local.NewStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	f := &fetched{store: store}
	want := func(done, total int64) {
		t.Helper()
		if d, n := f.count(t.Context()); d != done || n != total {
			t.Errorf("%d of %d bytes, want %d of %d", d, n, done, total)
		}
	}
	want(0, 0)
	text := []byte("a layer of an image")
	half, all := int64(len(text)/2), int64(len(text))
	layer := ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayer, Digest: digest.FromBytes(text), Size: all}
	for _, part := range []ocispec.Descriptor{layer, {MediaType: ocispec.MediaTypeImageConfig, Digest: digest.FromString("{}"), Size: 2}} {
		if more, err := f.handle(t.Context(), part); len(more) > 0 || err != nil {
			t.Fatal(more, err)
		}
	}
	want(0, all+2)
	w, err := store.Writer(t.Context(), content.WithRef(remotes.MakeRefKey(t.Context(), layer)), content.WithDescriptor(layer))
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if _, err := w.Write(text[:half]); err != nil {
		t.Fatal(err)
	}
	want(half, all+2)
	if _, err := w.Write(text[half:]); err != nil {
		t.Fatal(err)
	}
	if err := w.Commit(t.Context(), all, layer.Digest); err != nil {
		t.Fatal(err)
	}
	want(all, all+2)
}
