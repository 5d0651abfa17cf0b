package uml

import (
	"cmp"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// temporary are the directories that programs write to without being told.
var temporary = []string{"/tmp", "/var/tmp", "/run", "/dev/shm"}

// written are the flags of a test program that name a file or a directory to write
// (go help testflag); go test names them by absolute paths.
var written = map[string]bool{
	"testlogfile": true, "outputdir": false, "gocoverdir": false, "fuzzcachedir": false,
	"coverprofile": true, "blockprofile": true, "cpuprofile": true, "memprofile": true, "mutexprofile": true, "trace": true,
}

// share lists what the guest has of the host besides its root: directories to write to, and
// what the guest's own temporary directories would hide.
func (a *assignment) share() {
	a.Temporary = slices.Clone(temporary)
	if dir := filepath.Clean(os.TempDir()); !a.hides(dir) {
		a.Temporary = append(a.Temporary, dir)
	}
	writable := map[string]bool{}
	for _, dir := range a.outputs() {
		writable[dir] = true
	}
	for _, dir := range []string{filepath.Dir(a.Program), filepath.Dir(a.Self), module(a.Dir)} {
		if a.hides(dir) && !writable[dir] {
			a.Shared = append(a.Shared, shared{Path: dir})
		}
	}
	for dir := range writable {
		a.Shared = append(a.Shared, shared{Path: dir, Writable: true})
	}
	// What is below another one is mounted after it.
	slices.SortFunc(a.Shared, func(x, y shared) int { return cmp.Compare(x.Path, y.Path) })
	a.Shared = slices.Compact(a.Shared)
}

// outputs are the directories of the files that the arguments name for writing. A relative
// one is in the output directory.
func (a *assignment) outputs() []string {
	base, named := a.Dir, []string(nil)
	for _, arg := range a.Args[1:] {
		name, value, has := strings.Cut(arg, "=")
		flag, is := strings.CutPrefix(name, "-test.")
		isFile, known := written[flag]
		if !has || !is || !known || value == "" {
			continue
		}
		if flag == "outputdir" {
			base = value // go test names it always, and mostly nothing is written there
			continue
		}
		if isFile {
			value = filepath.Dir(value)
		}
		named = append(named, value)
	}
	for i, dir := range named {
		if !filepath.IsAbs(dir) {
			named[i] = filepath.Join(base, dir)
		}
	}
	return named
}

// linked is where the go command links a test program.
var linked = regexp.MustCompile(`/go-build\d+/b\d+$`)

// cacheable is the flag that go test lacks with -exec: it looks for the test's log, beside
// the program, all the same, and keeps no result without it (runTestActor and saveOutput in
// cmd/go/internal/test).
func cacheable(test string, args []string) []string {
	const flag = "-test.testlogfile="
	if dir := filepath.Dir(test); linked.MatchString(dir) && !slices.ContainsFunc(args, func(a string) bool { return strings.HasPrefix(a, flag) }) {
		return []string{flag + filepath.Join(dir, "testlog.txt")}
	}
	return nil
}

// hides reports whether a directory is below a temporary one.
func (a *assignment) hides(dir string) bool {
	return slices.ContainsFunc(a.Temporary, func(t string) bool { return dir == t || strings.HasPrefix(dir, t+"/") })
}

// module is the directory of the module that a directory is in, or the directory itself:
// tests read files of other packages too.
func module(dir string) string {
	for at := dir; at != "/"; at = filepath.Dir(at) {
		if _, err := os.Stat(filepath.Join(at, "go.mod")); err == nil {
			return at
		}
	}
	return dir
}
