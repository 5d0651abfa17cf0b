package release

import (
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/image/version"
)

// stub is a gbctl that does what a release needs of it.
const stub = `package main

import (
	"os"
	"path/filepath"

	"github.com/garboard-os/garboard/boot"
)

func main() {
	switch os.Args[1] {
	case "version":
		println("gbctl", boot.Version)
	case "man":
		for _, name := range []string{"man/gbctl.1", "completions/gbctl", "completions/_gbctl"} {
			path := filepath.Join(os.Args[2], name)
			if os.MkdirAll(filepath.Dir(path), 0o700) != nil || os.WriteFile(path, []byte(os.Getenv("SOURCE_DATE_EPOCH")), 0o600) != nil {
				panic(path)
			}
		}
	}
}
`

// site is the program that makes the site of the documents.
const site = `package main

import (
	"os"
	"path/filepath"
)

func main() {
	for _, name := range []string{"index.html", "man/gbctl.1"} {
		path := filepath.Join(os.Args[1], name)
		if os.MkdirAll(filepath.Dir(path), 0o700) != nil || os.WriteFile(path, []byte("a\n"), 0o600) != nil {
			panic(path)
		}
	}
}
`

// checkout is a repository with a tag, and commits after it.
func checkout(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	git := func(args ...string) {
		t.Helper()
		if _, err := version.Git(t.Context(), root, append([]string{"-c", "user.name=a", "-c", "user.email=a@b", "-c", "tag.gpgsign=false"}, args...)...); err != nil {
			t.Fatal(err)
		}
	}
	put := func(name, text string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(filepath.Join(root, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	git("init", "-q")
	for name, text := range map[string]string{
		"go.mod": "module github.com/garboard-os/garboard\n\ngo 1.26\n", "boot/release.go": "package boot\n\nvar Version = \"v1.2.3-dev\"\n",
		"tools/gbctl/main.go": stub, "tools/docs/main.go": site, "docs/a.md": "a\n", "README.md": "read\n", licenceFile: "free\n",
	} {
		put(name, text)
	}
	for i, subject := range []string{"boot: before", "boot, init: one", "gbctl: two", "Boot in words"} {
		put("docs/a.md", subject)
		git("add", ".")
		git("commit", "-q", "-m", subject)
		if i == 0 {
			git("tag", "v1.2.2")
		}
	}
	return root
}

// made makes the parts of a release that need no image.
func made(t *testing.T, root string, key []byte) *Release {
	t.Helper()
	public, err := pki.EncodePublicKey(key)
	if err != nil {
		t.Fatal(err)
	}
	r := &Release{Root: root, Dir: filepath.Join(t.TempDir(), "release"), Public: string(public)}
	if r.Key, err = pki.ParseKey(key); err != nil {
		t.Fatal(err)
	}
	if err := r.Begin(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := r.Text(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := r.Client(t.Context(), Platforms); err != nil {
		t.Fatal(err)
	}
	if err := r.Finish(); err != nil {
		t.Fatal(err)
	}
	return r
}

func contents(t *testing.T, dir string) map[string][]byte {
	t.Helper()
	all := map[string][]byte{}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if all[e.Name()], err = os.ReadFile(filepath.Join(dir, e.Name())); err != nil {
			t.Fatal(err)
		}
	}
	return all
}

// Two releases of a commit are the same to the byte, in other directories, at other times and by other umasks. The
// check accepts one, says which file has a changed byte, and takes no other key.
func TestRelease(t *testing.T) {
	t.Setenv(version.Variable, "v1.2.3")
	key, err := pki.NewKey(pki.Ed25519)
	if err != nil {
		t.Fatal(err)
	}
	root := checkout(t)
	first := made(t, root, key)
	old := syscall.Umask(0o077)
	second := made(t, root, key)
	syscall.Umask(old)
	one, two := contents(t, first.Dir), contents(t, second.Dir)
	for name := range one {
		if !bytes.Equal(one[name], two[name]) {
			t.Errorf("%s differs from one time to the next", name)
		}
	}
	if len(one) != len(two) || len(one) != 15 {
		t.Errorf("%d files, and then %d: %q", len(one), len(two), slices.Sorted(maps.Keys(one)))
	}
	if err := check(t.Context(), first.Dir, first.Public, t.Log); err != nil {
		t.Errorf("the release as it was made: %v", err)
	}
	ofSystem := []string{"_amd64.iso", "_amd64.raw.zst", "_amd64_netboot.tar", "_amd64_installer.tar", "_amd64_images.tar", "_amd64_system.spdx.json", "_amd64_images.spdx.json"}
	if lacks, err := missing(first.Dir); err != nil || !slices.Equal(lacks, ofSystem) {
		t.Errorf("without a system, it lacks %q, %v", lacks, err)
	}
	for _, want := range []string{"Changes since v1.2.2.", "## boot\n\n- one (", "## gbctl\n\n- two (", "## other\n\n- Boot in words ("} {
		if text := string(one["CHANGELOG.md"]); !strings.Contains(text, want) || strings.Contains(text, "before") {
			t.Errorf("%q isn't in %s", want, text)
		}
	}
	for name, content := range one {
		changed := bytes.Clone(content)
		changed[len(changed)/2] ^= 1
		if err := os.WriteFile(filepath.Join(first.Dir, name), changed, 0o644); err != nil {
			t.Fatal(err)
		}
		if err := check(t.Context(), first.Dir, second.Public, func(...any) {}); err == nil || name != signatureFile && !strings.Contains(err.Error(), name) {
			t.Errorf("a changed byte in %s: %v", name, err)
		}
		if err := os.WriteFile(filepath.Join(first.Dir, name), content, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	other, err := pki.NewKey(pki.Ed25519)
	if err != nil {
		t.Fatal(err)
	}
	public, err := pki.EncodePublicKey(other)
	if err != nil {
		t.Fatal(err)
	}
	if err := check(t.Context(), first.Dir, string(public), func(...any) {}); err == nil || !strings.Contains(err.Error(), "isn't signed by one of the 1 keys") {
		t.Errorf("by another key: %v", err)
	}
	for _, name := range []string{sumsFile, signatureFile} {
		if err := os.Remove(filepath.Join(second.Dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	second.Key = nil // somebody else signs
	if err := second.Finish(); err != nil {
		t.Fatal(err)
	}
	if two = contents(t, second.Dir); !bytes.Equal(two[sumsFile], one[sumsFile]) || two[signatureFile] != nil {
		t.Errorf("with the public key, the sums are\n%s", two[sumsFile])
	}
}

// A formula with a sum that was never filled in, or of a file that isn't there, is wrong.
func TestFormulaOfMissingArchives(t *testing.T) {
	t.Parallel()
	c := &checked{dir: t.TempDir(), sums: map[string]string{"a.tar.gz": "00"}}
	for text, right := range map[string]bool{"url \"x/a.tar.gz\"\n  sha256 \"00\"": true, "url \"x/a.tar.gz\"\n  sha256 \"$linux_amd64\"": false, "url \"x/b.tar.gz\"\n  sha256 \"\"": false, "": false} {
		if err := os.WriteFile(c.path("gbctl.rb"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := c.formula(); (err == nil) != right {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// Nobody can say which code a release with changes is of, and none is added to another one.
func TestReleaseIsOfACommit(t *testing.T) {
	t.Setenv(version.Variable, "v1.2.3")
	root := checkout(t)
	r := &Release{Root: root, Dir: t.TempDir()}
	if err := r.Begin(t.Context()); err == nil || !strings.Contains(err.Error(), "exists") {
		t.Errorf("into a directory that is there: %v", err)
	}
	if err := os.WriteFile(filepath.Join(root, "new"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	r.Dir = filepath.Join(t.TempDir(), "release")
	if err := r.Begin(t.Context()); err == nil || !strings.Contains(err.Error(), "?? new") {
		t.Errorf("with changes: %v", err)
	}
}

// The variables name a release to check, and a file with the public keys of its maker: make release-check.
func TestGivenRelease(t *testing.T) {
	dir, keys := os.Getenv("GARBOARD_RELEASE"), ""
	if dir == "" {
		t.Skip("GARBOARD_RELEASE names no release to check")
	}
	if file := os.Getenv("GARBOARD_RELEASE_KEYS"); file != "" {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		keys = string(text)
	}
	if err := check(t.Context(), dir, keys, t.Log); err != nil {
		t.Error(err)
	}
	if lacks, err := missing(dir); err != nil || lacks != nil {
		t.Errorf("it lacks files that end with %q, %v", lacks, err)
	}
}
