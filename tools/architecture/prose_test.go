package architecture

import (
	"strings"
	"testing"
	"unicode/utf8"
)

const (
	// The README is read in a terminal, and to its end.
	readmeWidth, readmeLines = 100, 200
	// designWords is what a newcomer reads in half an hour.
	designWords = 6_000
)

// columns are those of a line on a screen, where a tab is four wide.
func columns(line string) int { return utf8.RuneCountInString(line) + 3*strings.Count(line, "\t") }

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
