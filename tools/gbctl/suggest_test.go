package main

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	gotoken "go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// saying are the rooms whose texts suggest commands.
var saying = []string{"api/client", "boot", "config", "image", "init", "kernel", "qemu", "services", "tools/devcluster", "tools/gbctl"}

// A said text is one of a source.
type said struct{ at, text string }

// saidIn are the texts in a file of Go, with X for what isn't known before the program runs.
func saidIn(t *testing.T, file string) (all []said) {
	t.Helper()
	set := gotoken.NewFileSet()
	source, err := parser.ParseFile(set, file, nil, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	var textOf func(ast.Expr) (string, bool)
	textOf = func(e ast.Expr) (string, bool) {
		switch e := e.(type) {
		case *ast.BasicLit:
			text, err := strconv.Unquote(e.Value)
			return text, err == nil && e.Kind == gotoken.STRING
		case *ast.BinaryExpr:
			left, isLeft := textOf(e.X)
			right, isRight := textOf(e.Y)
			return left + right, e.Op == gotoken.ADD && (isLeft || isRight)
		}
		return "X", false
	}
	ast.Inspect(source, func(n ast.Node) bool {
		if _, tag := n.(*ast.Field); tag {
			return false
		}
		e, is := n.(ast.Expr)
		if !is {
			return true
		}
		text, is := textOf(e)
		if is {
			all = append(all, said{set.Position(e.Pos()).String(), verb.ReplaceAllString(text, "X")})
		}
		return !is
	})
	return all
}

var (
	verb = regexp.MustCompile(`%(\[\d\])?[sqdvw]`)
	// aLine is a command line between quotes. Several are separated there.
	aLine     = regexp.MustCompile("['`](gbctl [^'`\n]+)['`]")
	separator = regexp.MustCompile(`[,;] `)
	// aMention is a command in a sentence.
	aMention = regexp.MustCompile(`\bgbctl(?: [\w@/:.…{}=,<>-]*[\w}>…-])+`)
)

// notCommands are what follows the name of gbctl in sentences about gbctl.
var notCommands = []string{"X", "and", "can", "couldn", "does", "ends", "has", "reads", "recognised", "waits", "with"}

// Each command that gbctl or a node suggests can be typed as it is there, for the doctor's remedies, too: the command
// is known, and so are its flags and its arguments. One that stops something on a node names the node.
func TestSuggestionsCanBeTyped(t *testing.T) {
	t.Parallel()
	found := map[string]int{}
	for _, s := range textsOf(t) {
		text, room := s.text, strings.Join(strings.Split(s.at, "/")[2:4], "/")
		if room != "tools/gbctl" {
			text = here("10.5.0.2", text) // as it is shown
		}
		suggested := func(line string, whole bool) {
			found[room]++
			if err := typed(strings.Fields(line)[1:], whole); err != nil {
				t.Errorf("%s: %s: %v", strings.TrimPrefix(s.at, "../../"), line, err)
			}
		}
		for _, m := range aLine.FindAllStringSubmatch(text, -1) {
			lines := separator.Split(m[1], -1)
			suggested(lines[0], len(lines) == 1)
			for _, line := range lines[1:] {
				if strings.HasPrefix(line, "gbctl ") {
					suggested(line, false)
				}
			}
		}
		for _, line := range aMention.FindAllString(aLine.ReplaceAllString(text, ""), -1) {
			suggested(line, false)
		}
	}
	for room, least := range map[string]int{"tools/gbctl": 100, "services/front": 10, "services/kubernetes": 20, "services/operations": 110, "services/core": 5} {
		if found[room] < least {
			t.Errorf("%s: only %d suggestions found", room, found[room])
		}
	}
}

// A line that can't be typed is found, by all that can be wrong with it.
func TestWrongSuggestionsAreFound(t *testing.T) {
	t.Parallel()
	for _, bad := range []string{
		"gbctl helth", "gbctl etcd membrs", "gbctl health --wiat 1m", "gbctl reset --graceful=false", "gbctl service kubelet restart", "gbctl reboot",
		"gbctl -n ADDRESS gen config home", "gbctl version now", "gbctl etcd remove-member 1 2", "gbctl apply-config --insecure -f FILE",
	} {
		if typed(strings.Fields(bad)[1:], true) == nil {
			t.Errorf("%s is found right", bad)
		}
	}
	text := here("[fd00::2]", "Run gbctl -n NODE images -k, `gbctl reset --graceful=false` and gbctl -n 10.5.0.3 reboot.")
	if want := "Run gbctl -n '[fd00::2]' images -k, `gbctl -n '[fd00::2]' reset --graceful=false` and gbctl -n 10.5.0.3 reboot."; text != want {
		t.Errorf("%s\nwant %s", text, want)
	}
}

// textsOf are all texts that may suggest a command.
func textsOf(t *testing.T) (all []said) {
	t.Helper()
	for _, room := range saying {
		err := filepath.WalkDir("../../"+room, func(path string, entry fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case entry.IsDir() && (entry.Name() == "testdata" || entry.Name() == "e2e"):
				return fs.SkipDir
			case filepath.Ext(path) == ".go" && !strings.HasSuffix(path, "_test.go") && !strings.HasSuffix(path, ".pb.go"):
				all = append(all, saidIn(t, path)...)
			case strings.HasSuffix(path, "doctor/conditions.yaml"), filepath.Base(path) == "habits.yaml":
				all = append(all, saidInYAML(t, path)...)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return all
}

// saidInYAML are the texts in a file of YAML.
func saidInYAML(t *testing.T, file string) (all []said) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(text, &doc); err != nil {
		t.Fatal(err)
	}
	var walk func(*yaml.Node)
	walk = func(n *yaml.Node) {
		if n.Kind == yaml.ScalarNode {
			all = append(all, said{fmt.Sprintf("%s:%d", file, n.Line), n.Value})
		}
		for _, inner := range n.Content {
			walk(inner)
		}
	}
	walk(&doc)
	return all
}

// typed is why a command can't be typed. A whole line has no other words. A command may be named without its arguments,
// and a flag at the end without its value.
func typed(args []string, whole bool) error {
	root := (&app{}).rootCommand()
	named := len(args) > 1 && args[0] == "-n"
	at := 0
	if named {
		at = 2
	}
	if first := append(slices.Clone(args), "X")[at]; first == "X" || !whole && slices.Contains(notCommands, first) {
		return nil
	}
	cmd, rest, err := root.Find(args)
	switch {
	case err != nil:
		return err
	case cmd == root:
		return fmt.Errorf("there is no command")
	case slices.Contains(withoutFormats["nothing: they are groups"], pathOf(cmd)) && len(rest) > 0:
		return fmt.Errorf("there is no command %s", rest[0])
	}
	named = named || slices.Contains(rest, "-n")
	for err = tried(cmd, rest); err != nil && !whole && !strings.HasPrefix(rest[len(rest)-1], "-"); err = tried(cmd, rest) {
		rest = rest[:len(rest)-1] // of the sentence
	}
	f := cmd.Flags()
	acts := f.Lookup("all") != nil && (cmd.Name() != "service" || f.NArg() > 1)
	switch insecure := f.Lookup("insecure"); {
	case err != nil:
		return err
	case (acts || insecure != nil && insecure.Changed) && !named:
		return fmt.Errorf("it names no node")
	}
	return nil
}

// tried parses the arguments of a command.
func tried(cmd *cobra.Command, args []string) error {
	err := cmd.ParseFlags(args)
	if _, lacking := errors.AsType[*pflag.ValueRequiredError](err); lacking || errors.Is(err, pflag.ErrHelp) {
		return nil
	}
	if err != nil || cmd.Flags().NArg() == 0 {
		return err
	}
	return cmd.ValidateArgs(cmd.Flags().Args())
}
