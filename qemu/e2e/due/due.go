// Package due says which end-to-end tests are due: those that haven't passed since something that
// they cover was changed. A table says what each test covers. The result of a test is kept
// with the hashes of what it covered, in a directory that all checkouts of a user share.
package due

import (
	"cmp"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"time"
)

// A Folder is a row of the table. A pattern names a file, or a folder with all below it; its
// elements may have the wildcards of path.Match.
type Folder struct {
	// All is what each test of the folder covers.
	All []string
	// Tests is what single tests cover besides.
	Tests map[string][]string
}

// A Test is an end-to-end test.
type Test struct {
	Folder, Name string
	// Files are those that the test is written in: its own, and those of its folder without
	// any test.
	Files []string
}

func (t Test) String() string { return t.Folder + "." + t.Name }

// covers are the patterns of a test.
func (t Test) covers() []string {
	f, known := Folders[t.Folder]
	if !known {
		return []string{t.Folder} // a package that tests itself with real peers
	}
	return slices.Concat(f.All, f.Tests[t.Name])
}

// matches reports whether a pattern names a file of the product. Neither documents nor unit
// tests are part of the product.
func matches(pattern, file string) bool {
	if strings.HasSuffix(file, ".md") || strings.HasSuffix(file, "_test.go") || strings.Contains("/"+file, "/testdata/") {
		return false
	}
	if file == pattern || strings.HasPrefix(file, pattern+"/") {
		return true
	}
	matched, err := path.Match(pattern, file)
	return err == nil && matched
}

// itself is in the place of a pattern for the files that a test is written in.
const itself = "the test"

// Covered are the hashes of what the test covers, by pattern, and of the test itself.
func (t Test) Covered(files Content) map[string]string {
	hashes := map[string]string{itself: files.hash(func(file string) bool {
		return slices.Contains(t.Files, file) || strings.HasPrefix(file, t.Folder+"/testdata/")
	})}
	for _, pattern := range t.covers() {
		hashes[pattern] = files.hash(func(file string) bool { return matches(pattern, file) })
	}
	return hashes
}

// A Result is how a test ended.
type Result struct {
	Commit  string            // of the checkout; with "+" where files differed from it
	Covered map[string]string // what the test covered
	Passed  bool
	When    time.Time
	Took    time.Duration
	// FirstFailure is the reason of the first failure with this content, also where the test
	// passed when it ran again.
	FirstFailure string `json:",omitempty"`
}

// Why says why a test is due, or "". Without a result, it is due where what it covers was changed since a commit:
// former is the content of then. Without that, it is due.
func Why(t Test, last *Result, now, former Content, base string) string {
	covered := t.Covered(now)
	switch {
	case last == nil && former == nil:
		return "not run here"
	case last == nil:
		if changed := differ(t.Covered(former), covered); changed != "" {
			return fmt.Sprintf("not run here; changed since %s: %s", base, changed)
		}
		return ""
	}
	changed := differ(last.Covered, covered)
	switch {
	case !last.Passed:
		return "failed: " + cmp.Or(last.FirstFailure, "it gave no reason")
	case changed != "":
		return fmt.Sprintf("changed since it passed at %s: %s", last.Commit, changed)
	}
	return ""
}

// mostNamed is how many patterns a reason names.
const mostNamed = 4

// differ names what isn't the same.
func differ(a, b map[string]string) string {
	all := maps.Clone(a)
	maps.Copy(all, b)
	names := slices.DeleteFunc(slices.Sorted(maps.Keys(all)), func(name string) bool { return a[name] == b[name] })
	if more := len(names) - mostNamed; more > 0 {
		names = append(names[:mostNamed], fmt.Sprintf("%d more", more))
	}
	return strings.Join(names, ", ")
}
