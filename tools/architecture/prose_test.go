package architecture

import (
	"go/scanner"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

const (
	// width is how wide prose is, in pages and in comments: two files fit beside each other on a screen.
	width = 120
	// The README is read in a terminal, and to its end.
	readmeWidth, readmeLines = 100, 200
	// designWords is what a newcomer reads in half an hour.
	designWords = 6_000
)

// columns are those of a line on a screen, where a tab is four wide.
func columns(line string) int { return utf8.RuneCountInString(line) + 3*strings.Count(line, "\t") }

// unbreakable matches a line that can't be wrapped: one word, behind the marks of a list, a comment or a quotation. It
// is a link, as a rule.
var unbreakable = regexp.MustCompile(`^\s*(//|#|[-*>]|\d+\.)*\s*\S+$`)

// proseLines calls f for each line of a page that can be wrapped: no row of a table, and nothing in a fence, which is
// what programs print or read.
func proseLines(page string, f func(number int, line string)) {
	fence := ""
	for i, line := range strings.Split(page, "\n") {
		mark := strings.TrimSpace(line)
		switch {
		case fence != "":
			if mark == fence {
				fence = ""
			}
		case strings.HasPrefix(mark, "```"):
			fence = "```"
		case !strings.HasPrefix(mark, "|") && !unbreakable.MatchString(line):
			f(i+1, line)
		}
	}
}

func TestPagesAreNarrow(t *testing.T) {
	t.Parallel()
	for name, page := range documents(t) {
		proseLines(page, func(number int, line string) {
			if n := columns(line); n > width {
				t.Errorf("%s:%d has %d columns, of at most %d", name, number, n, width)
			}
		})
	}
}

func TestReadmeIsShort(t *testing.T) {
	t.Parallel()
	lines := strings.Split(strings.TrimSuffix(documents(t)["README.md"], "\n"), "\n")
	if len(lines) > readmeLines {
		t.Errorf("README.md has %d lines, of at most %d", len(lines), readmeLines)
	}
	for i, line := range lines { // tables and what programs print, too
		if n := columns(line); n > readmeWidth {
			t.Errorf("README.md:%d has %d columns, of at most %d", i+1, n, readmeWidth)
		}
	}
}

func TestDesignIsShort(t *testing.T) {
	t.Parallel()
	if n := len(strings.Fields(documents(t)["docs/design.md"])); n > designWords {
		t.Errorf("docs/design.md has %d words, of at most %d: what concerns one package is beside its code", n, designWords)
	}
}

// drawn matches a line of a comment that is laid out by hand: an indented one, which gofmt leaves as it is, or a
// directive.
var drawn = regexp.MustCompile(`^//(\t| {2,}|[a-z]+:)`)

// wideComments returns the lines of a Go file on which a comment goes beyond the width.
func wideComments(source []byte) (wide []int) {
	file := token.NewFileSet().AddFile("", -1, len(source))
	var s scanner.Scanner
	s.Init(file, source, nil, scanner.ScanComments)
	lines := strings.Split(string(source), "\n")
	for {
		pos, tok, text := s.Scan()
		switch {
		case tok == token.EOF:
			return wide
		case tok == token.COMMENT && strings.HasPrefix(text, "//") && !drawn.MatchString(text):
			number := file.Line(pos)
			if line := lines[number-1]; columns(line) > width && !unbreakable.MatchString(line) {
				wide = append(wide, number)
			}
		}
	}
}

func TestWideComments(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("word ", 30)
	source := "package p // " + long + "\n\n// " + long + "\n//\t" + long + "\n//go:generate " + long + "\nvar a = `// " + long + "`\n\n// " + strings.ReplaceAll(long, " ", "-") + "\n"
	if wide := wideComments([]byte(source)); !slices.Equal(wide, []int{1, 3}) {
		t.Errorf("%v", wide)
	}
}

// remark matches a line of YAML or of a proto file that is a comment.
var remark = regexp.MustCompile(`^\s*(#|//) `)

// acceptance matches the name of an acceptance row. Their list isn't in the repository, so only tests name them.
var acceptance = regexp.MustCompile(`\bS-\d{3}\b`)

func TestCommentsAreNarrow(t *testing.T) {
	t.Parallel()
	generated := regexp.MustCompile(`(?m)^// Code generated `)
	err := filepath.WalkDir(top, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && slices.Contains([]string{".git", "out", "testdata"}, entry.Name()):
			return fs.SkipDir
		case !slices.Contains([]string{".go", ".yaml", ".proto"}, filepath.Ext(path)):
			return nil
		}
		source, err := os.ReadFile(path)
		if err != nil || generated.Match(source) {
			return err
		}
		name := strings.TrimPrefix(filepath.ToSlash(path), top+"/")
		var wide []int
		if filepath.Ext(path) == ".go" {
			wide = wideComments(source)
		} else {
			for i, line := range strings.Split(string(source), "\n") {
				if remark.MatchString(line) && columns(line) > width && !unbreakable.MatchString(line) {
					wide = append(wide, i+1)
				}
			}
		}
		for _, number := range wide {
			t.Errorf("%s:%d has a comment beyond column %d", name, number, width)
		}
		product := !strings.HasSuffix(name, "_test.go") && !slices.ContainsFunc(onlyForTests, func(folder string) bool { return within(name, folder) })
		if found := acceptance.Find(source); product && found != nil {
			t.Errorf("%s names %s, which nobody finds: say what it is", name, found)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
