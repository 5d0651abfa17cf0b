package architecture

import (
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const top = "../.."

// documents returns all pages: the README, those of docs/, and those beside the code, by their path from the top.
func documents(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	err := filepath.WalkDir(top, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && slices.Contains([]string{".git", "out", "testdata"}, entry.Name()):
			return fs.SkipDir
		case filepath.Ext(path) != ".md" || strings.HasPrefix(path, top+"/tools/testing/"): // a part of another page
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(top, path)
		all[filepath.ToSlash(name)] = string(text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

var (
	literal = regexp.MustCompile("`([a-z]+)(/[^` ]*?)(?:\\.Test\\w+)?`")
	link    = regexp.MustCompile(`\]\(([^)\s#]*)(?:#([^)\s]+))?\)`)
	heading = regexp.MustCompile(`(?m)^#+ (.*)$`)
	unsaid  = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
)

// anchors are the fragments by which links reach the headings of a page, as GitHub makes them.
func anchors(page string) (all []string) {
	for _, m := range heading.FindAllStringSubmatch(page, -1) {
		all = append(all, strings.ReplaceAll(unsaid.ReplaceAllString(strings.ToLower(m[1]), ""), " ", "-"))
	}
	return all
}

func TestDocumentsNameWhatExists(t *testing.T) {
	t.Parallel()
	pages := documents(t)
	for name, page := range pages {
		for _, m := range literal.FindAllStringSubmatch(page, -1) {
			if _, room := mayImport[m[1]]; !room {
				continue
			}
			if _, err := os.Stat(filepath.Join(top, m[1]+m[2])); err != nil {
				t.Errorf("%s names %s%s: %v", name, m[1], m[2], err)
			}
		}
		for _, m := range link.FindAllStringSubmatch(page, -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			target := name
			if m[1] != "" {
				target = filepath.Join(filepath.Dir(name), m[1])
			}
			if _, err := os.Stat(filepath.Join(top, target)); err != nil {
				t.Errorf("%s has a link to %s: %v", name, m[1], err)
			}
			if m[2] != "" && !slices.Contains(anchors(pages[target]), m[2]) {
				t.Errorf("%s has a link to %s, which has no heading #%s", name, target, m[2])
			}
		}
	}
}

// A page that no other one has a link to is found by nobody.
func TestEachPageHasALink(t *testing.T) {
	t.Parallel()
	pages := documents(t)
	linked := map[string]bool{"README.md": true}
	for name, page := range pages {
		for _, m := range link.FindAllStringSubmatch(page, -1) {
			if target := filepath.Join(filepath.Dir(name), m[1]); target != name {
				linked[target] = true
			}
		}
	}
	for name := range pages {
		if !linked[name] {
			t.Errorf("no page has a link to %s", name)
		}
	}
}

// row returns the cells of the row of docs/design.md that begins with this folder.
func row(t *testing.T, folder string) []string {
	t.Helper()
	for line := range strings.Lines(documents(t)["docs/design.md"]) {
		if rest, found := strings.CutPrefix(line, "| `"+folder+"/` | "); found {
			return strings.Split(rest, " | ")
		}
	}
	t.Fatalf("docs/design.md has no row for %s/", folder)
	return nil
}

// code matches what a cell has in backticks.
var code = regexp.MustCompile("`([^`]+)`")

func TestDesignHasTheRooms(t *testing.T) {
	t.Parallel()
	folders, err := filepath.Glob(top + "/[a-z]*/*.go")
	if err != nil || len(folders) == 0 {
		t.Fatal(folders, err)
	}
	for _, file := range folders {
		if room := filepath.Base(filepath.Dir(file)); mayImport[room] == nil {
			t.Errorf("%s/ is no room", room)
		}
	}
	for room, allowed := range mayImport {
		cells := row(t, room)
		var listed []string
		for _, m := range code.FindAllStringSubmatch(cells[1], -1) {
			listed = append(listed, m[1])
		}
		if room == "tools" { // its row has the exceptions, and itself is none
			exceptions := append(listed, room)
			listed = slices.Collect(maps.Keys(mayImport))
			listed = slices.DeleteFunc(listed, func(other string) bool { return slices.Contains(exceptions, other) })
		}
		if !slices.Equal(slices.Sorted(slices.Values(listed)), slices.Sorted(slices.Values(allowed))) {
			t.Errorf("%s/ may import %v by docs/design.md, and %v by this test", room, listed, allowed)
		}
	}
}

func TestDesignHasTheGroups(t *testing.T) {
	t.Parallel()
	for _, group := range groups {
		packages, err := os.ReadDir(filepath.Join(top, "services", group))
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range packages {
			if !strings.Contains(row(t, group)[0], "`"+p.Name()+"`") {
				t.Errorf("docs/design.md doesn't list %s in the group %s/", p.Name(), group)
			}
		}
	}
}

// lookups match a file in the table of docs/design.md, and the declarations in it.
var lookups = regexp.MustCompile("`([a-z]+/[^` ]*\\.go)`(?: \\((`[^)]*`)\\))?")

func TestWhereToLook(t *testing.T) {
	t.Parallel()
	_, rest, found := strings.Cut(documents(t)["docs/design.md"], "\n## Where to look\n")
	table, _, ended := strings.Cut(rest, "\n## ")
	rows := lookups.FindAllStringSubmatch(table, -1)
	if !found || !ended || len(rows) == 0 {
		t.Fatal("docs/design.md has no table in a section \"Where to look\"")
	}
	for _, row := range rows {
		source, err := os.ReadFile(filepath.Join(top, row[1]))
		if err != nil {
			t.Error(err)
			continue
		}
		for name := range strings.FieldsFuncSeq(row[2], func(r rune) bool { return strings.ContainsRune("`, ", r) }) {
			if !regexp.MustCompile(`(?m)^(func (\(.*?\) )?|type |var |const |\t)` + name + `\b`).Match(source) {
				t.Errorf("%s doesn't declare %s", row[1], name)
			}
		}
	}
}
