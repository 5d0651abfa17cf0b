//go:build e2e && long

package story

import (
	"bytes"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

// releaseBudget is for a release, all of whose parts are built first.
const releaseBudget = 40 * time.Minute

// Two makers of a release get the same bytes: in another directory, with another home, umask, time zone and language,
// and where nothing is built yet.
func TestReleaseIsTheSameTwice(t *testing.T) {
	u := newUser(t)
	key := filepath.Join(u.dir, "maker")
	e2etest.Gbctl(t, "gen", "release-key", "--name", key)
	made := func(dir string) string {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		u.types(nil, releaseBudget, "release.sh", u.repository, dir, key)
		return filepath.Join(dir, "garboard/out/release")
	}
	first := made(filepath.Join(u.dir, "first"))
	for name, value := range map[string]string{
		"HOME": t.TempDir(), "XDG_CACHE_HOME": t.TempDir(), "TMPDIR": t.TempDir(), "TZ": "Asia/Kathmandu", "LC_ALL": "C.UTF-8", "LANG": "de_DE.UTF-8",
	} {
		t.Setenv(name, value)
	}
	defer syscall.Umask(syscall.Umask(0o077))
	second := made(filepath.Join(u.dir, "a/deeper/second"))
	files, err := os.ReadDir(first)
	if err != nil {
		t.Fatal(err)
	}
	others, err := os.ReadDir(second)
	if err != nil || len(others) != len(files) || len(files) < 20 {
		t.Errorf("%d files, and then %d: %v", len(files), len(others), err)
	}
	for _, f := range files {
		one, err := os.ReadFile(filepath.Join(first, f.Name()))
		if err != nil {
			t.Fatal(err)
		}
		two, err := os.ReadFile(filepath.Join(second, f.Name()))
		if err != nil || !bytes.Equal(one, two) {
			t.Errorf("%s isn't the same twice: %v", f.Name(), err)
		}
	}
}
