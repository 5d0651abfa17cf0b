package main

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/image"
	"github.com/garboard-os/garboard/tools/devcluster"
)

// stories runs those with containers at native speed, which mostly wait, some at once,
// and then those with machines, where emulation takes all processors.
func stories(ctx context.Context, root string, out io.Writer) error {
	all, err := storyFolders(root)
	if err != nil {
		return err
	}
	var containers, machines, tests []string
	for _, f := range all {
		tests = append(tests, f.short...)
		switch {
		case len(f.short) == 0:
		case f.machines:
			machines = append(machines, f.path)
		default:
			containers = append(containers, f.path)
		}
	}
	slices.Reverse(containers) // the real tests of etcd take longest: they mustn't begin when all else ends
	if err := bootTests(ctx, root, out, containersAtOnce, containers, tests, "-tags=story"); err != nil {
		return err
	}
	return bootTests(ctx, root, out, 1, machines, tests, "-tags=story")
}

// A longStory is a test that only longStories runs.
type longStory struct {
	name, folder string
	// takes is its time on the slowest machine that was measured: two processors, no KVM,
	// nothing beside it. Twice that, at the pace so far, has to be left for it to begin.
	takes time.Duration
}

// fastest bounds what is made of the first stories' pace: the next may be slower.
const fastest = 0.75

// longOnes are in the order in which they are run: where time ends, it is for those that
// are last.
var longOnes = []longStory{
	{"TestPartition", "./qemu/stories/partition", 125 * time.Second},
	{"TestAllNodesAtOnce", "./qemu/stories/reboot", 140 * time.Second},
	{"TestAdoptKubeadm", "./qemu/stories/adopt", 120 * time.Second},
	{"TestTheLeaderIsFrozen", "./services/vip", 140 * time.Second},
	{"TestAYearAhead", "./qemu/stories/clock", 95 * time.Second},
	{"TestAYearBehind", "./qemu/stories/clock", 95 * time.Second},
	{"TestMachines", "./qemu/stories/machines", 17 * time.Minute},
	{"TestOneNodeInQEMU", "./qemu/stories/onenode", 15 * time.Minute},
	{"TestFullEphemeralInQEMU", "./qemu/stories/full", 10 * time.Minute},
}

// longStories are told one by one: most boot machines.
func longStories(ctx context.Context, root string, out io.Writer) error {
	return fitting(ctx, longOnes, out, func(s longStory) error {
		return bootTests(ctx, root, out, 1, []string{s.folder}, []string{s.name}, "-tags=story,long")
	})
}

// fitting runs those that fit into the time of ctx, and returns the others as leftOut. What
// has begun and isn't done at the end of that time fails: it hangs.
func fitting(ctx context.Context, all []longStory, out io.Writer, run func(longStory) error) error {
	var left leftOut
	var took, takes time.Duration
	for _, s := range all {
		pace := 1.0
		if takes > 0 {
			pace = max(float64(took)/float64(takes), fastest)
		}
		needs := time.Duration(2 * pace * float64(s.takes)).Round(time.Second)
		if end, ok := ctx.Deadline(); ok && time.Until(end) < needs {
			fmt.Fprintf(out, "%s is left out: %s may be needed, and there are %s\n", s.name, needs, max(time.Until(end), 0).Round(time.Second))
			left = append(left, s.name)
			continue
		}
		begin := time.Now()
		if err := run(s); err != nil {
			return fmt.Errorf("%s in %s: %w", s.name, s.folder, err)
		}
		took, takes = took+time.Since(begin), takes+s.takes
	}
	if left != nil {
		return left
	}
	return nil
}

const (
	// storyTimeout bounds all tests that boot machines, on two slow cores.
	storyTimeout = 50 * time.Minute
	// storyTag begins the first line of all tests that boot nodes.
	storyTag = "//go:build story"
	// longTag is the first line of the tests that only longStories runs.
	longTag = "//go:build story && long\n"
	// machineWord is in the files of tests that boot machines.
	machineWord = "qemu.QEMU"
	// containersAtOnce is how many stories with containers run at the same time. They mostly wait.
	containersAtOnce = 2
)

// storyRoots are where such tests are: those of a service run what it needs without a node.
var storyRoots = []string{"qemu/stories", "services"}

// A storyFolder is a package with tests that boot nodes, or real parts of one.
type storyFolder struct {
	path        string
	short, long []string // names of its tests
	machines    bool     // whether short ones boot machines
}

var testFunction = regexp.MustCompile(`(?m)^func (Test\w+)\(t \*testing\.T\)`)

// storyFolders finds them all, in order.
func storyFolders(root string) ([]storyFolder, error) {
	folders := map[string]storyFolder{}
	look := func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if _, err := os.Stat(filepath.Join(path, "go.mod")); err == nil {
				return filepath.SkipDir // the story beside it runs it
			}
			return nil
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil || !strings.HasPrefix(string(text), storyTag) {
			return err
		}
		folder, err := filepath.Rel(root, filepath.Dir(path))
		f := folders[folder]
		f.path = "./" + folder
		tests := testFunction.FindAllStringSubmatch(string(text), -1)
		switch long := strings.HasPrefix(string(text), longTag); {
		case long:
			for _, name := range tests {
				f.long = append(f.long, name[1])
			}
		case len(tests) > 0:
			for _, name := range tests {
				f.short = append(f.short, name[1])
			}
			f.machines = f.machines || strings.Contains(string(text), machineWord)
		}
		folders[folder] = f
		return err
	}
	for _, dir := range storyRoots {
		if err := filepath.WalkDir(filepath.Join(root, dir), look); err != nil {
			return nil, err
		}
	}
	return slices.SortedFunc(maps.Values(folders), func(a, b storyFolder) int { return strings.Compare(a.path, b.path) }), nil
}

// bootTests builds everything first, so that a test's time is the test's. It runs tests by
// name: the unit tests beside them have been run.
func bootTests(ctx context.Context, root string, out io.Writer, atOnce int, packages, tests []string, tags string) error {
	if len(packages) == 0 {
		return nil
	}
	made, err := devcluster.Build(ctx, root, out, image.Build)
	if err != nil {
		return err
	}
	// Tests of a single room start the programs themselves.
	programs := made.Components["etcd"] + string(os.PathListSeparator) + made.Components["kubernetes"]
	if err := os.Setenv("GARBOARD_COMPONENTS", programs); err != nil {
		return err
	}
	args := append([]string{"test", "-v", "-count=1", fmt.Sprintf("-p=%d", atOnce), "-timeout=" + storyTimeout.String(), tags, "-run=^(" + strings.Join(tests, "|") + ")$"}, packages...)
	return goRun(ctx, root, &reasons{to: out}, args...)
}
