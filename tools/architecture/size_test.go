package architecture

import (
	"bytes"
	"debug/elf"
	"go/scanner"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/dustin/go-humanize"
)

// A budget is how many lines of code some rooms may have together: lines with a token of Go
// that is no comment, of files that are no tests, aren't generated, and aren't only for
// tests. docs/design.md has the same figures.
type budget struct {
	what  string
	rooms []string
	most  int
}

var budgets = []budget{
	{"a node", []string{"config", "boot", "init", "services", "api"}, 62_000},
	// What others use of the node's rooms, and PID 1 doesn't, is counted there.
	{"gbctl", []string{"tools/gbctl", "config/patch", "api/attest"}, 11_500},
	{"what builds and boots it", []string{"image", "kernel", "qemu", "tools", "api/client", "config/fields.go", "config/generate.go", "config/kubeconfig.go", "config/secrets.go", "config/secrets_kubernetes.go"}, 19_000},
}

// ofNetwork is the part of a node's code that exists only for its network, without its form in the configuration and
// without what the machine API and doctor make of it.
var ofNetwork = budget{"a node's network", []string{
	"services/system/network", "services/system/neighbor", "services/system/netcheck", "services/system/resolver", "services/kubernetes/firewall",
}, 5_000}

// onlyForTests are folders with code that only tests use. Like tests, they are in no budget.
var onlyForTests = []string{
	"qemu/e2e", "tools/testing",
	// Tests of several packages share these, which import types of their room.
	"api/client/faultyserver", "config/fuzzdata", "services/operations/operationtest",
	// It takes a testing.TB, and only tests of qemu compare machines.
	"qemu/container/snapshot",
}

// within reports whether a folder is another one, or is in it.
func within(folder, room string) bool { return folder == room || strings.HasPrefix(folder, room+"/") }

// codeLines counts the lines of a file that have code.
func codeLines(source []byte) int {
	file := token.NewFileSet().AddFile("", -1, len(source))
	var s scanner.Scanner
	s.Init(file, source, nil, 0)
	lines := map[int]bool{}
	for {
		pos, tok, text := s.Scan()
		if tok == token.EOF {
			return len(lines)
		}
		first := file.Line(pos)
		if tok == token.SEMICOLON && text == "\n" {
			continue // the scanner's own
		}
		for i := range strings.Count(text, "\n") + 1 { // of a string in several lines
			lines[first+i] = true
		}
	}
}

// sizes are the lines of code by file.
func sizes(t *testing.T) map[string]int {
	t.Helper()
	all := map[string]int{}
	err := filepath.WalkDir("../..", func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := entry.Name()
		if entry.IsDir() && (name == ".git" || name == "testdata" || name == "out") {
			return filepath.SkipDir
		}
		if entry.IsDir() || filepath.Ext(name) != ".go" || strings.HasSuffix(name, "_test.go") {
			return nil
		}
		source, err := os.ReadFile(path)
		if err != nil || bytes.Contains(source, []byte("\n// Code generated ")) || bytes.HasPrefix(source, []byte("// Code generated ")) {
			return err
		}
		file, err := filepath.Rel("../..", path)
		all[filepath.ToSlash(file)] = codeLines(source)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestCodeIsWithinItsBudgets(t *testing.T) {
	t.Parallel()
	total := map[string]int{}
	for folder, lines := range sizes(t) {
		if slices.ContainsFunc(onlyForTests, func(room string) bool { return within(folder, room) }) {
			continue
		}
		// The longest room that has the folder: gbctl is one within tools.
		best, what := "", ""
		for _, b := range budgets {
			for _, room := range b.rooms {
				if within(folder, room) && len(room) > len(best) {
					best, what = room, b.what
				}
			}
		}
		if what == "" {
			t.Errorf("%s is in no budget", folder)
		}
		total[what] += lines
		if slices.ContainsFunc(ofNetwork.rooms, func(room string) bool { return within(folder, room) }) {
			total[ofNetwork.what] += lines
		}
	}
	design := documents(t)["docs/design.md"]
	for _, b := range append(budgets, ofNetwork) {
		if figure := "| ≤ " + humanize.Comma(int64(b.most)); !strings.Contains(design, figure) {
			t.Errorf("docs/design.md has no budget %q for %s", figure, b.what)
		}
		t.Logf("%s: %d lines of code, of at most %d (%s)", b.what, total[b.what], b.most, strings.Join(b.rooms, ", "))
		if total[b.what] > b.most {
			t.Errorf("%s has %d lines of code, of at most %d: simplify before you add", b.what, total[b.what], b.most)
		}
		if total[b.what] < b.most/10 {
			t.Errorf("%s has %d lines of code only: what counts them is broken", b.what, total[b.what])
		}
	}
}

// A program that somebody compiled into the checkout isn't a source.
func TestNoProgramIsAmongTheSources(t *testing.T) {
	t.Parallel()
	err := filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == "out" || d.Name() == ".git"):
			return filepath.SkipDir
		case !d.Type().IsRegular():
			return nil
		}
		f, err := elf.Open(path)
		if err != nil {
			return nil // it is none
		}
		t.Errorf("%s is a compiled program", path)
		return f.Close()
	})
	if err != nil {
		t.Fatal(err)
	}
}

// What PID 1 has in it is in its own budget.
func TestNodeIsCountedAsOne(t *testing.T) {
	t.Parallel()
	for _, p := range list(t, "-deps", "./init") {
		folder, ours := strings.CutPrefix(p.ImportPath, module+"/")
		if ours && (within(folder, "config/patch") || within(folder, "api/client") || slices.Contains([]string{"image", "kernel", "qemu", "tools"}, room(p.ImportPath))) {
			t.Errorf("PID 1 has %s, which is in another budget", folder)
		}
	}
}

func TestCodeLines(t *testing.T) {
	t.Parallel()
	source := "// comment\npackage p\n\n/* two\nlines */\nvar a = `one\ntwo` // x\n\nfunc f() {\n}\n"
	if n := codeLines([]byte(source)); n != 5 {
		t.Errorf("%d lines, want 5", n)
	}
}
