package main

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/image"
	"github.com/garboard-os/garboard/image/components"
	"github.com/garboard-os/garboard/tools/devcluster"
)

const (
	// e2eTimeout bounds the tests of one package that boot nodes, on two slow cores.
	e2eTimeout = 20 * time.Minute
	// longTimeout bounds those of one package that are long, and machineTimeout those of one with virtual machines: a
	// test may take 20 minutes.
	longTimeout    = 50 * time.Minute
	machineTimeout = 4 * time.Hour
	// processorsOfAMachine is how many an emulated machine keeps busy.
	processorsOfAMachine = 2
	// machineWord is in the files of tests that boot virtual machines.
	machineWord = "qemu.QEMU"
	// promiseWord is in the functions of tests that measure what the product promises: other tests beside them would be
	// part of that.
	promiseWord = ".Promised("
)

// The build tags of tests that boot something, as the first line of their file has them.
const (
	e2eTag    = "e2e"
	longTag   = "e2e && long"
	kernelTag = "kernel"
)

// A bootTest is a test that boots nodes, real parts of one, or a kernel.
type bootTest struct {
	name, folder, tag string
	machine           bool     // whether its nodes are virtual machines
	alone             bool     // whether it measures a promise
	files             []string // its own, and those of its folder without any test
}

// bootRoots are where such tests are: those of a service run what it needs without a node.
var bootRoots = []string{"qemu/e2e", "services", "init"}

var (
	buildTag     = regexp.MustCompile(`^//go:build ([\w &]+)\n`)
	testFunction = regexp.MustCompile(`(?m)^func (Test\w+)\(t \*testing\.T\)`)
	anyFunction  = regexp.MustCompile(`(?m)^func (?:\([^)]*\) )?(\w+)`)
)

// testFiles calls look for each test file below a folder.
func testFiles(root, below string, look func(file string, text []byte) error) error {
	return filepath.WalkDir(filepath.Join(root, below), func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			// A module of its own has tests that a test in the folder above runs.
			_, err := os.Stat(filepath.Join(path, "go.mod"))
			if d.Name() == ".git" || d.Name() == "out" || err == nil && path != root {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		file, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		return look(file, text)
	})
}

// folderOf is the name of a file's folder, as the go command takes it.
func folderOf(file string) string { return "./" + filepath.Dir(file) }

// bootTests finds them all, in the order of their folders.
func bootTests(root string) ([]bootTest, error) {
	var all []bootTest
	folders := map[string]string{}           // by tag and test: tests are chosen by their names
	bodies := map[string]map[string]string{} // of functions, by folder and name
	shared := map[string][]string{}
	look := func(file string, text []byte) error {
		tag := buildTag.FindSubmatch(text)
		if tag == nil {
			return nil
		}
		folder := folderOf(file)
		tests := testFunction.FindAllSubmatch(text, -1)
		if len(tests) == 0 {
			shared[folder] = append(shared[folder], file)
		}
		if bodies[folder] == nil {
			bodies[folder] = map[string]string{}
		}
		starts := append(anyFunction.FindAllSubmatchIndex(text, -1), []int{len(text)})
		for i, at := range starts[:len(starts)-1] {
			bodies[folder][string(text[at[2]:at[3]])] += string(text[at[3]:starts[i+1][0]])
		}
		for _, m := range tests {
			test := bootTest{string(m[1]), folder, string(tag[1]), strings.Contains(string(text), machineWord), false, []string{file}}
			if other := folders[test.tag+" "+test.name]; other != "" {
				return fmt.Errorf("%s is a test of %s and of %s: give one another name", test.name, other, test.folder)
			}
			folders[test.tag+" "+test.name] = test.folder
			all = append(all, test)
		}
		return nil
	}
	for _, dir := range bootRoots {
		if err := testFiles(root, dir, look); err != nil {
			return nil, err
		}
	}
	for i, t := range all {
		all[i].alone = !t.machine && measures(bodies[t.folder], t.name)
		all[i].files = append(t.files, shared[t.folder]...)
	}
	slices.SortStableFunc(all, func(a, b bootTest) int { return strings.Compare(a.folder, b.folder) })
	return all, nil
}

// measures reports whether a function measures a promise, itself or by others of its folder.
func measures(bodies map[string]string, name string) bool {
	bodies = maps.Clone(bodies)
	body := bodies[name]
	delete(bodies, name)
	for other := range bodies {
		if strings.Contains(body, other+"(") && measures(bodies, other) {
			return true
		}
	}
	return strings.Contains(body, promiseWord)
}

func e2eTests(ctx context.Context, s *suite) (result, error) {
	return booted(ctx, s, e2eTag, e2eTimeout, append(slices.Clone(containerParts), machinePart), image.Cloud)
}

// A bootPart has tests that run together.
type bootPart struct {
	machine, alone bool // those of a bootTest
	atOnce         int  // packages
}

var (
	// containerParts run at native speed. One node waits for half of the time; the clusters of the long tests, of three
	// nodes and more, keep a processor busy. Those of promises follow.
	containerParts     = []bootPart{{false, false, 1 + runtime.NumCPU()}, {false, true, 1}}
	longContainerParts = []bootPart{{false, false, runtime.NumCPU()}, {false, true, 1}}
	machinePart        = bootPart{true, false, machinesAtOnce}
	machinesAtOnce     = max(1, runtime.NumCPU()/processorsOfAMachine)
)

// booted runs the tests with a tag that belong to some parts.
func booted(ctx context.Context, s *suite, tag string, timeout time.Duration, parts []bootPart, flavours ...image.Flavour) (result, error) {
	all, err := bootTests(s.copied)
	if err != nil {
		return result{}, err
	}
	all = slices.DeleteFunc(all, func(t bootTest) bool {
		runs := slices.ContainsFunc(parts, func(p bootPart) bool { return t.machine == p.machine && t.alone == p.alone })
		return t.tag != tag || !runs || !s.chosen.wants(t)
	})
	if len(all) == 0 {
		return result{}, nil
	}
	sets, err := optionalOf(s.copied, all)
	if err == nil {
		err = buildAll(ctx, s.copied, s.out, sets, flavours...)
	}
	if err != nil {
		return result{}, err
	}
	var sum result
	for _, part := range parts {
		names, folders := chosen(all, func(t bootTest) bool {
			return t.machine == part.machine && t.alone == part.alone
		})
		if len(names) == 0 {
			continue
		}
		slices.Reverse(folders) // the real tests of etcd take longest: they begin first
		test := goTest{dir: s.copied, verbose: true, ended: s.chosen.ended, args: []string{
			"-count=1", fmt.Sprintf("-p=%d", part.atOnce), "-timeout=" + timeout.String(), "-tags=" + strings.ReplaceAll(tag, " && ", ","),
		}}
		r, err := test.run(ctx, s.out, names, folders...)
		sum.add(r)
		if err != nil {
			return sum, err
		}
	}
	return sum, nil
}

// optionalWords are in the files of tests that need optional components: each set makes a layout of its own (e2etest).
var optionalWords = map[string][]string{
	"e2etest.OtherKubernetes(":    {components.OtherKubernetesVersion},
	"e2etest.Kubernetes(":         {components.OldestKubernetesVersion},
	"e2etest.SelfHosted(":         {components.PodCheckpointer, components.RelinkedKubernetesVersion},
	"e2etest.RelinkedKubernetes(": {components.PodCheckpointer, components.RelinkedKubernetesVersion},
}

// optionalOf are the sets of optional components that some tests need; the first has none.
func optionalOf(root string, tests []bootTest) ([][]string, error) {
	sets := [][]string{nil}
	for _, t := range tests {
		for _, file := range t.files {
			text, err := os.ReadFile(filepath.Join(root, file))
			if err != nil {
				return nil, err
			}
			for word, names := range optionalWords {
				if strings.Contains(string(text), word) {
					sets = append(sets, names)
				}
			}
		}
	}
	slices.SortFunc(sets, slices.Compare)
	return slices.CompactFunc(sets, slices.Equal), nil
}

// chosen are the names and the folders of some tests.
func chosen(all []bootTest, want func(bootTest) bool) (names, folders []string) {
	for _, t := range all {
		if want(t) {
			names = append(names, t.name)
			folders = append(folders, t.folder)
		}
	}
	return names, slices.Compact(folders)
}

// buildAll builds everything first, with each of some sets of optional components, so that a
// test's time is the test's.
func buildAll(ctx context.Context, root string, out io.Writer, sets [][]string, flavours ...image.Flavour) error {
	for _, flavour := range flavours {
		for _, optional := range sets {
			made, err := devcluster.Build(ctx, root, out, image.Build, flavour, optional...)
			if err != nil {
				return err
			}
			// Tests of a single service start the programs themselves.
			programs := made.Components["etcd"] + string(os.PathListSeparator) + made.Components["kubernetes"]
			if err := os.Setenv("GARBOARD_COMPONENTS", programs); err != nil {
				return err
			}
		}
	}
	return nil
}

// kernelTests runs each package in a guest of its own: this program starts it (go test -exec).
func kernelTests(ctx context.Context, s *suite) (result, error) {
	all, err := bootTests(s.root)
	if err != nil {
		return result{}, err
	}
	program, err := nameProgram(s.copied)
	if err != nil {
		return result{}, fmt.Errorf("name this program: %w", err)
	}
	names, folders := chosen(all, func(t bootTest) bool { return t.tag == kernelTag })
	// The program of a test can be the one of a system, which sees no library.
	test := goTest{dir: s.copied, env: []string{"CGO_ENABLED=0"}, args: []string{
		"-p=2", "-tags=" + kernelTag, "-timeout=" + kernelTimeout.String(), "-exec=" + program + " uml",
	}}
	return test.run(ctx, s.out, names, folders...)
}

// nameProgram gives this program a name that is the same for all checkouts, and another one
// where its content is another: go test compares the name when it reuses a result.
func nameProgram(copied string) (string, error) {
	own, err := os.Executable()
	if err != nil {
		return "", err
	}
	content, err := os.ReadFile(own)
	if err != nil {
		return "", err
	}
	former, err := filepath.Glob(copied + ".program-*")
	if err != nil {
		return "", err
	}
	for _, name := range former {
		if err := os.Remove(name); err != nil {
			return "", err
		}
	}
	name := fmt.Sprintf("%s.program-%x", copied, sha256.Sum256(content))
	return name, os.Symlink(own, name)
}
