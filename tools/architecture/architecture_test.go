// Package architecture compares the import table of docs/design.md with the code.
package architecture

import (
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

const module = "github.com/garboard-os/garboard"

// mayImport is the table: a room and the rooms that it may use. A room always
// may use itself.
var mayImport = map[string][]string{
	"config":   {},
	"api":      {},
	"kernel":   {},
	"boot":     {"config"},
	"services": {"config", "api", "boot"},
	"init":     {"services", "boot", "config"},
	"image":    {"boot", "kernel", "config"},
	"qemu":     {"config", "api", "image"},
	"tools":    {"config", "api", "boot", "kernel", "image", "qemu"},
}

// forTests are packages that the tests of every room may use.
var forTests = []string{
	module + "/tools/kms/server",
	module + "/tools/testing/bootloader",
	module + "/tools/testing/cis",
	module + "/tools/testing/eventually",
	module + "/tools/testing/freeport",
	module + "/tools/testing/isolate",
	module + "/tools/testing/loopdisk",
	module + "/tools/testing/module",
	module + "/tools/testing/owner",
	module + "/tools/testing/signer",
	module + "/tools/testing/softtpm",
	module + "/tools/testing/timeserver",
	module + "/tools/testing/uki",
	module + "/tools/testing/uml",
}

// bannedFromPID1 are modules that cost more than they bring in the one program
// that every node runs, by the prefix of their packages.
var bannedFromPID1 = map[string]string{
	"k8s.io/": "20 MB; services/kubernetes/kubeclient is the own client",
	"github.com/opencontainers/runc/libcontainer/": "needs cgo; it lives in services/front/sandbox/cmd/sandbox",
	"github.com/spf13/cobra":                       "client only",
	"github.com/evanphx/json-patch/":               "client only: a node only sees whole documents",
	"github.com/invopop/jsonschema":                "generator only",
	"github.com/evanphx/json-patch":                "client only: a node is given whole documents",
	"charm.land/":                                  "client only",
	"github.com/charmbracelet/":                    "client only",
}

type pkg struct {
	ImportPath   string
	Imports      []string
	TestImports  []string
	XTestImports []string
	Deps         []string
}

// sources are looked at once, so that go test sees what the tests depend on: it
// keeps a result until a file that the test itself has looked at changes, and
// knows nothing of what go list reads.
var sources = sync.OnceValue(func() error {
	return filepath.WalkDir("../..", func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() && entry.Name() == ".git" {
			return filepath.SkipDir
		}
		if filepath.Ext(path) == ".go" {
			_, err = os.Stat(path)
		}
		return err
	})
})

func list(t *testing.T, args ...string) []pkg {
	t.Helper()
	if err := sources(); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("go", append([]string{"list", "-json=ImportPath,Imports,TestImports,XTestImports,Deps"}, args...)...)
	cmd.Dir = "../.."
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			t.Fatalf("go list %v: %v\n%s", args, err, exit.Stderr)
		}
		t.Fatal(err)
	}
	var pkgs []pkg
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return pkgs
		} else if err != nil {
			t.Fatal(err)
		}
		pkgs = append(pkgs, p)
	}
}

// room is the top folder of one of our packages, "" for anybody else's.
func room(importPath string) string {
	rest, ok := strings.CutPrefix(importPath, module+"/")
	if !ok {
		return ""
	}
	top, _, _ := strings.Cut(rest, "/")
	return top
}

func TestRoomsImportOnlyWhatTheDesignAllows(t *testing.T) {
	t.Parallel()
	pkgs := list(t, "-tags=e2e", "./...")
	if len(pkgs) == 0 {
		t.Fatal("go list found no package")
	}
	for _, p := range pkgs {
		from := room(p.ImportPath)
		allowed, known := mayImport[from]
		if !known {
			t.Errorf("%s: the room %q isn't in the design", p.ImportPath, from)
			continue
		}
		for _, imported := range slices.Concat(p.Imports, p.TestImports, p.XTestImports) {
			to := room(imported)
			if to == "" || to == from || slices.Contains(forTests, imported) {
				continue
			}
			if !slices.Contains(allowed, to) {
				t.Errorf("%s imports %s: %s/ may import %v only", p.ImportPath, imported, from, allowed)
			}
		}
	}
}

func TestPID1StaysLight(t *testing.T) {
	t.Parallel()
	for _, dep := range list(t, "./init")[0].Deps {
		for prefix, why := range bannedFromPID1 {
			if strings.HasPrefix(dep+"/", prefix) || dep == path.Clean(prefix) {
				t.Errorf("init depends on %s: %s", dep, why)
			}
		}
	}
}

// The linker keeps all methods of all types beside what calls methods by names, as templates do: 4.5 MB of PID 1.
// Package parse alone doesn't, and containerd's client has a template that nothing reaches.
func TestPID1HasNoTemplates(t *testing.T) {
	t.Parallel()
	for _, p := range list(t, "-deps", "./init") {
		for _, imported := range p.Imports {
			if strings.HasPrefix(p.ImportPath, module) && (imported == "text/template" || imported == "html/template") {
				t.Errorf("%s imports %s: PID 1 would be 4.5 MB larger (package render fills in files)", p.ImportPath, imported)
			}
		}
	}
}

// groups are the folders of services/, from the generic ones to those that are built on them.
// A package imports its own group and those before it.
var groups = []string{"core", "system", "kubernetes", "operations", "front"}

func TestServicesImportOnlyTheGroupsBelow(t *testing.T) {
	t.Parallel()
	place := func(importPath string) int {
		rest, _ := strings.CutPrefix(importPath, module+"/services/")
		group, _, _ := strings.Cut(rest, "/")
		return slices.Index(groups, group)
	}
	for _, p := range list(t, "-tags=e2e", "./services/...") {
		from := place(p.ImportPath)
		if from < 0 {
			if p.ImportPath != module+"/services" {
				t.Errorf("%s is in none of the groups %v", p.ImportPath, groups)
			}
			continue
		}
		for _, imported := range slices.Concat(p.Imports, p.TestImports, p.XTestImports) {
			if room(imported) == "services" && place(imported) > from {
				t.Errorf("%s imports %s: %s is below %s", p.ImportPath, imported, groups[from], groups[place(imported)])
			}
		}
	}
}

// The parts of a development cluster use neither the cluster nor each other.
func TestPartsOfTheClusterAreSeparate(t *testing.T) {
	t.Parallel()
	parts := []string{"vm", "container", "docker", "network"}
	for _, part := range parts {
		for _, p := range list(t, "./qemu/"+part+"/...") {
			for _, imported := range slices.Concat(p.Imports, p.TestImports, p.XTestImports) {
				below, ours := strings.CutPrefix(imported, module+"/qemu")
				other, _, _ := strings.Cut(strings.TrimPrefix(below, "/"), "/")
				if ours && other != part && (other == "" || slices.Contains(parts, other)) {
					t.Errorf("%s imports %s: %s uses neither the cluster nor its other parts", p.ImportPath, imported, part)
				}
			}
		}
	}
}

// The packages in core know no service by name; some use another of them.
func TestCoreImportsNoOther(t *testing.T) {
	t.Parallel()
	for name, others := range map[string][]string{"option": nil, "reason": nil, "sleep": nil, "lists": nil, "dag": {"lists", "option", "reason", "sleep"}, "resource": {"dag", "lists", "reason", "sleep"}, "process": nil, "logs": nil, "operation": {"dag", "lists", "option", "resource", "sleep"}} {
		for _, p := range list(t, "./services/core/"+name) {
			for _, imported := range p.Imports {
				if room(imported) == "services" && imported != p.ImportPath && !slices.Contains(others, path.Base(imported)) {
					t.Errorf("%s imports %s: it must know no service", p.ImportPath, imported)
				}
			}
		}
	}
}

// onlyIn are calls that one package makes for all others on a node.
var onlyIn = map[string]string{
	"clientv3.New(": "services/kubernetes/etcd", // etcd.Dial
}

func TestOneWayToConnect(t *testing.T) {
	t.Parallel()
	for _, p := range list(t, "./services/...", "./init/...") {
		folder := strings.TrimPrefix(p.ImportPath, module+"/")
		files, err := filepath.Glob(filepath.Join("../..", folder, "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for call, owner := range onlyIn {
				if has := strings.Contains(string(text), call); has && folder != owner {
					t.Errorf("%s calls %s: only %s does", file, strings.TrimSuffix(call, "("), owner)
				}
			}
		}
	}
}
