package architecture

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/printer"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the calls that there are into testdata, with the reasons that it has")

// opens are the calls that reach a file by its path and would follow a link or wait for a FIFO, or bind to it.
var opens = regexp.MustCompile(`^(os\.(Open|OpenFile|OpenRoot|OpenInRoot|DirFS|ReadFile|ReadDir|Stat|Lstat|Readlink|Create|CreateTemp|WriteFile|` +
	`Mkdir|MkdirAll|MkdirTemp|Remove|RemoveAll|Rename|Chmod|Chown|Lchown|Truncate|Symlink|Link|Chtimes|CopyFS)|` +
	`filepath\.(Walk|WalkDir|Glob|EvalSymlinks)|net\.Listen(Unix|Unixgram|Packet)?|` +
	`(unix|syscall)\.(Open|Openat|Stat|Lstat|Statfs|Unlink|Rename|Mknod|Mkfifo|Chmod|Chown|Mkdir|Rmdir|Mount|Link|Symlink|Truncate|Access|OpenTree|MoveMount)|` +
	// Methods of os.Root: they leave it by no link, but follow links in it, and wait.
	`(\w+\.)*[rR]oot\.(Open|OpenFile|OpenRoot|ReadFile|Create|WriteFile|Stat|Lstat|Readlink|Mkdir|MkdirAll|Remove|RemoveAll|Rename|Chmod|Chown|Symlink|Link|FS)|` +
	`tls\.LoadX509KeyPair|ioutil\.\w+|boot\.(WriteFile|WriteFileFor|SyncDir))$`)

// ownFile has the calls of PID 1 that are on its own paths, below the file that they are in and what these paths are. A
// path that a pod with a hostPath below /var, a volume or a directory of pods could have prepared
// isn't PID 1's own: boot/untrusted opens it. Nor is a path in /etc and /run that a pod with the root directory has.
const ownFile = "testdata/own_files.txt"

// callsIn are the calls of a file, each with its first two arguments: a path, and what it is renamed or linked to.
func callsIn(file string) (calls []string, err error) {
	set := token.NewFileSet()
	tree, err := parser.ParseFile(set, file, nil, 0)
	if err != nil {
		return nil, err
	}
	text := func(n ast.Node) string {
		var b strings.Builder
		_ = printer.Fprint(&b, set, n) // to memory
		return strings.Join(strings.Fields(b.String()), " ")
	}
	ast.Inspect(tree, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok || len(call.Args) == 0 {
			return true
		}
		name, args := text(call.Fun), []string{}
		for _, a := range call.Args[:min(2, len(call.Args))] {
			args = append(args, text(a))
		}
		if opens.MatchString(name) && (!strings.HasPrefix(name, "net.") || !strings.HasPrefix(args[0], `"tcp`) && !strings.HasPrefix(args[0], `"udp`)) {
			calls = append(calls, name+"("+strings.Join(args, ", ")+")")
		}
		return true
	})
	slices.Sort(calls)
	return slices.Compact(calls), nil
}

// readOwn reads ownFile: "FILE: REASON", and a line with a tab for each call.
func readOwn(t *testing.T) (reasons map[string]string, calls map[string][]string) {
	t.Helper()
	text, err := os.ReadFile(ownFile)
	if err != nil {
		t.Fatal(err)
	}
	reasons, calls = map[string]string{}, map[string][]string{}
	name := ""
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSuffix(line, "\n")
		if call, is := strings.CutPrefix(line, "\t"); is {
			calls[name] = append(calls[name], call)
		} else if line != "" {
			var reason string
			name, reason, _ = strings.Cut(line, ": ")
			reasons[name] = reason
		}
	}
	return reasons, calls
}

// A call that reaches a file by its path is either on a path of PID 1's own, or somebody decides.
func TestFilesOfOthersAreOpenedInOneWay(t *testing.T) {
	t.Parallel()
	found := map[string][]string{}
	for _, room := range []string{"init", "boot", "services"} {
		err := filepath.WalkDir(filepath.Join("../..", room), func(file string, entry fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case entry.IsDir() && entry.Name() == "testdata":
				return fs.SkipDir
			case entry.IsDir() || !strings.HasSuffix(file, ".go") || strings.HasSuffix(file, "_test.go"):
				return nil
			}
			calls, err := callsIn(file)
			if len(calls) > 0 {
				found[filepath.ToSlash(strings.TrimPrefix(file, filepath.Join("../..")+"/"))] = calls
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	reasons, own := readOwn(t)
	for name, calls := range found {
		for _, call := range calls {
			if !slices.Contains(own[name], call) {
				t.Errorf("%s calls %s: a pod may have put a link, a FIFO or a device there; use boot/untrusted, or say in %s why the path is PID 1's own", name, call, ownFile)
			}
		}
		if reasons[name] == "" {
			t.Errorf("%s has no line with what the paths of %s are", ownFile, name)
		}
	}
	for name, calls := range own {
		for _, call := range calls {
			if !slices.Contains(found[name], call) {
				t.Errorf("%s doesn't call %s any more: remove it from %s", name, call, ownFile)
			}
		}
	}
	if !*update {
		return
	}
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(found)) {
		fmt.Fprintf(&b, "%s: %s\n", name, reasons[name])
		for _, call := range found[name] {
			fmt.Fprintf(&b, "\t%s\n", call)
		}
	}
	if err := os.WriteFile(ownFile, []byte(b.String()), 0o644); err != nil {
		t.Fatal(err)
	}
}
