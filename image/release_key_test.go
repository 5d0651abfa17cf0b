package image

import (
	"crypto"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/image/cache"
)

// A user's builds have one key, which nobody else can read. Another one is named, also by its public half.
func TestReleaseKey(t *testing.T) {
	t.Setenv(ReleaseKeyVariable, "")
	b := &builder{store: &cache.Store{Dir: t.TempDir()}}
	own, public, err := b.releaseKey(t.Context())
	if err != nil || own == nil || !strings.HasPrefix(public, "-----BEGIN PUBLIC KEY-----\n") {
		t.Fatalf("%s, %v", public, err)
	}
	if _, again, err := b.releaseKey(t.Context()); err != nil || again != public {
		t.Errorf("the second build has another key: %v", err)
	}
	found, err := filepath.Glob(filepath.Join(b.store.Dir, stepReleaseKey, "*", "release.key"))
	if err != nil || len(found) != 1 {
		t.Fatalf("%q, %v", found, err)
	}
	if info, err := os.Stat(found[0]); err != nil || info.Mode() != fs.FileMode(0o600) {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	dir := t.TempDir()
	named := func(name string, content []byte) (crypto.Signer, string, error) {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		t.Setenv(ReleaseKeyVariable, path)
		return b.releaseKey(t.Context())
	}
	if k, got, err := named("release.pub", []byte(public)); err != nil || k != nil || got != public {
		t.Errorf("%s, %v", got, err)
	}
	private, err := os.ReadFile(found[0])
	if err != nil {
		t.Fatal(err)
	}
	if k, got, err := named("release.key", private); err != nil || k == nil || got != public {
		t.Errorf("%s, %v", got, err)
	}
	ecdsa, err := pki.NewKey(pki.ECDSA)
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{"ecdsa.key": ecdsa, "none": nil, "text": []byte("a key")} {
		if _, _, err := named(name, content); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	t.Setenv(ReleaseKeyVariable, filepath.Join(dir, "absent"))
	if _, _, err := b.releaseKey(t.Context()); err == nil {
		t.Error("a file that isn't there is no key")
	}
}
