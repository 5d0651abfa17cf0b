package version

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// repository is a checkout with one commit, of a day that the local time has not reached everywhere.
func repository(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	put(t, root, source, "package boot\n\nvar Version = \"v1.2.3-dev\"\n")
	put(t, root, "boot/a_test.go", "package boot\n")
	put(t, root, "docs/a.md", "a\n")
	put(t, root, "boot/old.go", "package boot\n")
	for _, args := range [][]string{{"init", "-q"}, {"add", "."}, {"-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "first"}} {
		if _, err := Git(t.Context(), root, args...); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func put(t *testing.T, root, name, text string) {
	t.Helper()
	path := filepath.Join(root, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func of(t *testing.T, root string) string {
	t.Helper()
	name, err := Of(t.Context(), root)
	if err != nil {
		t.Fatal(err)
	}
	return name
}

// Different code has different names, and the same code has one, whatever else is in the checkout.
func TestOf(t *testing.T) {
	t.Setenv(Variable, "")
	t.Setenv("GIT_COMMITTER_DATE", "2026-11-29T23:30:00-0500") // the 30th in UTC
	root := repository(t)
	clean := of(t, root)
	if !regexp.MustCompile(`^v1\.2\.3-dev\+20261130\.[0-9a-f]{12}$`).MatchString(clean) {
		t.Fatalf("%q", clean)
	}
	put(t, root, "boot/a_test.go", "package boot // edited\n")
	put(t, root, "docs/a.md", "edited\n")
	if name := of(t, root); name != clean {
		t.Errorf("an edit that is in no program: %s", name)
	}
	seen := map[string]string{"nothing": clean}
	differs := func(what string) {
		t.Helper()
		name := of(t, root)
		if !strings.HasPrefix(name, clean+"-dirty.") {
			t.Errorf("%s: %s", what, name)
		}
		for other, is := range seen {
			if is == name {
				t.Errorf("%s and %s are both %s", what, other, name)
			}
		}
		if again := of(t, root); again != name {
			t.Errorf("%s: %s, and then %s", what, name, again)
		}
		seen[what] = name
	}
	put(t, root, "boot/new.go", "package boot\n")
	differs("a new file")
	put(t, root, "boot/new.go", "package boot // b\n")
	differs("another content")
	put(t, root, "boot/old.go", "package boot // c\n")
	differs("an edit")
	if err := os.Remove(filepath.Join(root, "boot/old.go")); err != nil {
		t.Fatal(err)
	}
	differs("a deletion")
	t.Setenv(Variable, "v2.0.0")
	if name := of(t, root); !strings.HasPrefix(name, "v2.0.0+20261130.") {
		t.Error(name)
	}
	t.Setenv(Variable, "2.0")
	if name, err := Of(t.Context(), root); err == nil {
		t.Errorf("2.0 makes %s", name)
	}
}

func TestOfCodeWithoutGit(t *testing.T) {
	t.Setenv(Variable, "")
	root := t.TempDir()
	put(t, root, source, "package boot\n\nvar Version = \"v1.2.3\"\n")
	if name := of(t, root); name != "v1.2.3" {
		t.Error(name)
	}
}
