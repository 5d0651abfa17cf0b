package components

import (
	"cmp"
	"context"
	"debug/buildinfo"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/image/cache"
	"github.com/garboard-os/garboard/image/progress"
)

// root is the checkout that this test is in.
func root(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// modules are the module paths whose version a component's go.mod has to state as its own.
var modules = map[string][]string{
	"kubernetes":          {"k8s.io/kubernetes"},
	"kubernetes-1.36":     {"k8s.io/kubernetes"},
	"kubernetes-1.35":     {"k8s.io/kubernetes"},
	"kubernetes-relinked": {"k8s.io/kubernetes"},
	"etcd":                {"go.etcd.io/etcd/server/v3", "go.etcd.io/etcd/etcdctl/v3", "go.etcd.io/etcd/etcdutl/v3"},
	"containerd":          {"github.com/containerd/containerd/v2"},
	"runc":                {"github.com/opencontainers/runc"},
	"cni":                 {"github.com/containernetworking/plugins"},
	"coredns":             {"github.com/coredns/coredns"},
	"flannel":             {"github.com/flannel-io/flannel"},
	policies:              {"sigs.k8s.io/kube-network-policies"},
}

// pinned is the version of a component's modules: the relinked Kubernetes is made of another version's.
func pinned(c Component) string { return strings.TrimSuffix(c.Version, "-relinked") }

func TestTableAgreesWithModules(t *testing.T) {
	for _, c := range All {
		t.Run(c.Name, func(t *testing.T) {
			if c.C != "" {
				if _, err := os.Stat(filepath.Join(root(t), "image", "components", c.Dir, c.C)); err != nil {
					t.Error(err)
				}
				return
			}
			pins := cmp.Or(c.Pins, c.Dir)
			content, err := os.ReadFile(filepath.Join(pins, "go.mod"))
			if err != nil {
				t.Fatal(err)
			}
			for _, path := range modules[c.Name] {
				if want := regexp.MustCompile(`(?m)` + regexp.QuoteMeta(path) + ` ` + regexp.QuoteMeta(pinned(c)) + `( // indirect)?$`); !want.Match(content) {
					t.Errorf("go.mod doesn't require %s at %s", path, c.Version)
				}
			}
			if len(modules[c.Name]) == 0 && c.Name != PodCheckpointer { // that one is its own source
				t.Error("no module is known for it")
			}
			if _, err := os.Stat(filepath.Join(pins, "go.sum")); err != nil {
				t.Error(err)
			}
		})
	}
}

// docs/versions.md has the versions that are built.
func TestVersionsAreDocumented(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(root(t), "docs", "versions.md"))
	if err != nil {
		t.Fatal(err)
	}
	for part, version := range map[string]string{
		"Kubernetes": KubernetesVersion, "etcd": EtcdVersion, "containerd": ContainerdVersion, "runc": RuncVersion, "CNI plugins": CNIVersion,
		"CoreDNS": CoreDNSVersion, "flannel": FlannelVersion, "kube-network-policies": PoliciesVersion,
	} {
		if row := "| " + part + " | " + version + " |"; !strings.Contains(string(page), row) {
			t.Errorf("docs/versions.md doesn't have %q", row)
		}
	}
	for _, version := range KubernetesVersions() {
		if !strings.Contains(string(page), version) {
			t.Errorf("docs/versions.md doesn't have %s", version)
		}
	}
}

// The tests of the pod-checkpointer, which is a module of its own.
func TestPodCheckpointer(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "go", "test", "./...")
	cmd.Dir = filepath.Join(root(t), "image", "components", "podcheckpointer")
	cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestStagingModulesFollowKubernetes(t *testing.T) {
	for _, c := range Kubernetes() {
		content, err := os.ReadFile(filepath.Join(cmp.Or(c.Pins, c.Dir), "go.mod"))
		if err != nil {
			t.Fatal(err)
		}
		want := "v0" + strings.TrimPrefix(pinned(c), "v1")
		replaced := regexp.MustCompile(`(?m)^\t(k8s\.io/\S+) => (\S+) (\S+)$`).FindAllStringSubmatch(string(content), -1)
		if len(replaced) == 0 {
			t.Errorf("%s: no replaced modules", c.Name)
		}
		for _, m := range replaced {
			if m[1] != m[2] || m[3] != want {
				t.Errorf("%s: %s is replaced by %s %s, want version %s", c.Name, m[1], m[2], m[3], want)
			}
		}
	}
}

func TestOptionalComponentsAreBuiltOnDemand(t *testing.T) {
	standard := Names()
	if !slices.Contains(standard, "kubernetes") {
		t.Errorf("every cluster is built from %v", standard)
	}
	for optional, name := range map[string]string{
		OtherKubernetesVersion: "kubernetes-1.36", OldestKubernetesVersion: "kubernetes-1.35", RelinkedKubernetesVersion: "kubernetes-relinked", PodCheckpointer: PodCheckpointer,
	} {
		if more := Names(optional); slices.Contains(standard, name) || len(more) != len(standard)+1 || !slices.Contains(more, name) {
			t.Errorf("every cluster is built from %v, and with %s from %v", standard, optional, more)
		}
	}
	for _, version := range KubernetesVersions() {
		if !slices.ContainsFunc(Kubernetes(), func(c Component) bool { return c.Version == version }) {
			t.Errorf("no component is Kubernetes %s", version)
		}
	}
}

func TestTableIsComplete(t *testing.T) {
	seen := map[string]bool{}
	for _, c := range All {
		if c.Name == "" || c.Version == "" || c.Dir == "" {
			t.Errorf("%+v lacks something", c)
		}
		if seen[c.Name] {
			t.Errorf("%s is there twice", c.Name)
		}
		seen[c.Name] = true
		if (c.C == "") == (len(c.Programs) == 0) {
			t.Errorf("%s has to be either C or Go", c.Name)
		}
		var files []string
		for _, p := range c.Programs {
			files = append(files, append([]string{p.File}, p.Links...)...)
		}
		if c.C != "" {
			files = []string{c.Name}
		}
		if !slices.Equal(files, c.Files) {
			t.Errorf("%s: Files are %v, but its programs make %v", c.Name, c.Files, files)
		}
		for _, pkg := range c.Fold {
			if name := filepath.Base(pkg); !slices.Contains(c.Files, name) {
				t.Errorf("%s: nothing calls the folded %s", c.Name, name)
			}
		}
	}
	if _, err := ByName("systemd"); err == nil {
		t.Error("there is a component systemd")
	}
}

func TestUnknownComponent(t *testing.T) {
	b := &Builder{Root: root(t), Store: &cache.Store{Dir: t.TempDir()}, Progress: progress.New(io.Discard)}
	if _, err := b.Build(t.Context(), "kubernets"); err == nil || !strings.Contains(err.Error(), "kubernetes") {
		t.Errorf("error doesn't say which names there are: %v", err)
	}
}

// checkout makes a directory that looks like a checkout with one tiny module, so that the real build path runs in
// seconds.
func checkout(t *testing.T, source string) *Builder {
	t.Helper()
	b := &Builder{Root: t.TempDir(), Store: &cache.Store{Dir: t.TempDir()}, Progress: progress.New(io.Discard)}
	for name, content := range map[string]string{
		"tiny/go.mod":    "module example.com/tiny\n\ngo 1.26.0\n",
		"tiny/go.sum":    "",
		"tiny/main.go":   source,
		"tiny/a/main.go": "package main\n\nimport \"os\"\n\nfunc main() {\n\tprint(name(), len(os.Args))\n}\n",
		"tiny/a/name.go": "package main\n\nfunc name() string { return \"a\" }\n",
		"tiny/b/main.go": "package main\n\nfunc main() { print(\"b\") }\n",
		// Another go.mod for the same source.
		"tiny-1/go.mod": "module example.com/tiny\n\ngo 1.25.0\n",
		"tiny-1/go.sum": "",
		// The checkout's own module.
		"../../go.mod":       "module example.com/ours\n\ngo 1.26.0\n",
		"../../ours/main.go": "package main\n\nfunc main() {}\n",
	} {
		path := filepath.Join(b.Root, "image", "components", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return b
}

var tiny = Component{Name: "tiny", Version: "v1", Dir: "tiny", Programs: []Program{{File: "tiny", Package: ".", Links: []string{"alias"}, Stamp: []string{"main.version=v1"}}}}

const tinyMain = "package main\n\nvar version = \"unknown\"\n\nfunc main() { println(version) }\n"

func TestBuildStampsAndIsReproducible(t *testing.T) {
	var contents []string
	for range 2 {
		b := checkout(t, tinyMain)
		dir, err := b.component(t.Context(), tiny)
		if err != nil {
			t.Fatal(err)
		}
		program := filepath.Join(dir, "alias")
		if out, err := exec.CommandContext(t.Context(), program).CombinedOutput(); err != nil || string(out) != "v1\n" {
			t.Errorf("program says %q, %v", out, err)
		}
		info, err := buildinfo.ReadFile(program)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range info.Settings {
			if s.Key == "CGO_ENABLED" && s.Value != "0" || s.Key == "-trimpath" && s.Value != "true" {
				t.Errorf("built with %s=%s", s.Key, s.Value)
			}
		}
		content, err := os.ReadFile(program)
		if err != nil {
			t.Fatal(err)
		}
		contents = append(contents, string(content))
	}
	if contents[0] != contents[1] {
		t.Error("two checkouts make different programs")
	}
}

func TestEveryInputChangesTheKey(t *testing.T) {
	b := checkout(t, tinyMain)
	module := filepath.Join(b.Root, "image", "components", "tiny")
	key := func(c Component) string {
		t.Helper()
		inputs, err := b.inputs(t.Context(), c, module)
		if err != nil {
			t.Fatal(err)
		}
		return cache.Key(inputs...)
	}
	keys := map[string]string{key(tiny): "the component itself"}
	for what, change := range map[string]func(*Component){
		"version": func(c *Component) { c.Version = "v2" },
		"tag":     func(c *Component) { c.Programs[0].Tags = []string{"x"} },
		"stamp":   func(c *Component) { c.Programs[0].Stamp = nil },
		"cgo":     func(c *Component) { c.Programs[0].Static = true },
		"link":    func(c *Component) { c.Programs[0].Links = nil },
		"fold":    func(c *Component) { c.Fold = []string{"x"} },
		"graft":   func(c *Component) { c.Graft = []string{"ours"} },
		"pins":    func(c *Component) { c.Pins = "tiny-1" },
		"source": func(*Component) {
			if err := os.WriteFile(filepath.Join(module, "main.go"), []byte(tinyMain+"\n"), 0o644); err != nil {
				t.Fatal(err)
			}
		},
	} {
		changed := tiny
		changed.Programs = slices.Clone(tiny.Programs)
		change(&changed)
		if same, known := keys[key(changed)]; known {
			t.Errorf("%s: the same key as %s", what, same)
		}
		keys[key(changed)] = what
	}
	pinned := tiny
	pinned.Pins = "tiny-1"
	before := key(pinned)
	if err := os.WriteFile(filepath.Join(b.Root, "image", "components", pinned.Pins, "go.sum"), []byte("\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if key(pinned) == before {
		t.Error("content of pins: the same key as without it")
	}
}

// The same source with the go.mod of another directory: what is built has its versions, here that of the language.
func TestPinsOfAnotherDirectory(t *testing.T) {
	b := checkout(t, "package main\n\nimport \"runtime/debug\"\n\nfunc main() {\n\tinfo, _ := debug.ReadBuildInfo()\n\tfor _, s := range info.Settings {\n\t\tif s.Key == \"DefaultGODEBUG\" {\n\t\t\tprintln(\"older\")\n\t\t}\n\t}\n}\n")
	for pins, want := range map[string]string{"": "", "tiny-1": "older\n"} {
		c := tiny
		c.Pins = pins
		dir, err := b.component(t.Context(), c)
		if err != nil {
			t.Fatal(err)
		}
		program := filepath.Join(dir, "tiny")
		if out, err := exec.CommandContext(t.Context(), program).CombinedOutput(); err != nil || string(out) != want {
			t.Errorf("with %q it says %q, %v; want %q", pins, out, err, want)
		}
		if content, err := os.ReadFile(program); err != nil || strings.Contains(string(content), b.Root) {
			t.Errorf("with %q the checkout's path is in it: %v", pins, err)
		}
	}
}

func TestFoldedProgramsAnswerToTheirNames(t *testing.T) {
	b := checkout(t, tinyMain)
	folded := Component{Name: "folded", Version: "v1", Dir: "tiny", Fold: []string{"example.com/tiny/a", "example.com/tiny/b"},
		Programs: []Program{{File: "folded", Package: ".", Links: []string{"a", "b"}}}}
	dir, err := b.component(t.Context(), folded)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"a": "a1", "b": "b"} {
		if out, err := exec.CommandContext(t.Context(), filepath.Join(dir, name)).CombinedOutput(); err != nil || string(out) != want {
			t.Errorf("%s says %q, %v; want %q", name, out, err, want)
		}
	}
	if err := exec.CommandContext(t.Context(), filepath.Join(dir, "folded")).Run(); err == nil {
		t.Error("it does something by its own name")
	}
}

// The real ones: what is grafted must do with the modules of its host, and the host must stay what it is.
func TestGraftedProgramsAnswerToTheirNames(t *testing.T) {
	b := &Builder{Root: root(t), Store: &cache.Store{Dir: t.TempDir()}, Progress: progress.New(io.Discard)}
	dirs, err := b.Build(t.Context(), "runc")
	if err != nil {
		t.Fatal(err)
	}
	runc, sandbox := filepath.Join(dirs["runc"], "runc"), filepath.Join(dirs["runc"], "sandbox")
	want := "runc version " + strings.TrimPrefix(RuncVersion, "v") + "\n"
	if out, err := exec.CommandContext(t.Context(), runc, "--version").Output(); err != nil || !strings.HasPrefix(string(out), want) {
		t.Errorf("runc says %q, %v; want %q", out, err, want)
	}
	if out, _ := exec.CommandContext(t.Context(), sandbox).CombinedOutput(); !strings.HasPrefix(string(out), "sandbox: usage: sandbox COMMAND") {
		t.Errorf("sandbox says %q", out)
	}
	info, err := buildinfo.ReadFile(runc)
	if err != nil {
		t.Fatal(err)
	}
	if info.Path != "github.com/opencontainers/runc" {
		t.Errorf("it is built as %s", info.Path)
	}
	content, err := os.ReadFile(runc)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(content), b.Store.Dir) {
		t.Error("where it was built is in it")
	}
}

// The real one: flannel's own main, without what a node never uses.
func TestTrimmedProgramLacksWhatIsReplaced(t *testing.T) {
	b := &Builder{Root: root(t), Store: &cache.Store{Dir: t.TempDir()}, Progress: progress.New(io.Discard)}
	dirs, err := b.Build(t.Context(), "flannel")
	if err != nil {
		t.Fatal(err)
	}
	flanneld := filepath.Join(dirs["flannel"], "flanneld")
	if out, err := exec.CommandContext(t.Context(), flanneld, "--version").CombinedOutput(); err != nil || strings.TrimSpace(string(out)) != FlannelVersion {
		t.Errorf("it says %q, %v", out, err)
	}
	if out, err := exec.CommandContext(t.Context(), flanneld).CombinedOutput(); err == nil || !strings.Contains(string(out), "start it with --kube-subnet-mgr") {
		t.Errorf("without the Kubernetes API it says %q, %v", out, err)
	}
	info, err := buildinfo.ReadFile(flanneld)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range info.Deps {
		if strings.Contains(m.Path, "etcd") || strings.Contains(m.Path, "tencent") {
			t.Errorf("it has %s", m.Path)
		}
	}
}

func TestCompilerErrorsAreShownAndNothingIsKept(t *testing.T) {
	b := checkout(t, "package main\n\nfunc main() { undefinedThing() }\n")
	_, err := b.component(t.Context(), tiny)
	if err == nil || !strings.Contains(err.Error(), "undefinedThing") {
		t.Errorf("error doesn't quote the compiler: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := b.component(ctx, tiny); err == nil {
		t.Error("a cancelled build succeeded")
	}
	if left, _ := filepath.Glob(filepath.Join(b.Store.Dir, "tiny", "*")); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestKubernetesStamp(t *testing.T) {
	stamp := kubernetesStamp("v1.37.2")
	for _, want := range []string{
		"k8s.io/component-base/version.gitVersion=v1.37.2", "k8s.io/component-base/version.gitMajor=1",
		"k8s.io/component-base/version.gitMinor=37", "k8s.io/client-go/pkg/version.gitVersion=v1.37.2",
	} {
		if !slices.Contains(stamp, want) {
			t.Errorf("no %s", want)
		}
	}
}
