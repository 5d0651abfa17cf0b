package due

import (
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const root = "../../.."

func TestMatches(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		pattern, file string
		want          bool
	}{
		{"boot", "boot/esp/esp.go", true},
		{"boot", "bootable/a.go", false},
		{"boot/*.go", "boot/slots.go", true},
		{"boot/*.go", "boot/esp/esp.go", false},
		{"boot/slots.go", "boot/slots.go", true},
		{"boot", "boot/slots_test.go", false},
		{"config", "config/testdata/examples/a.yaml", false},
		{"config", "config/README.md", false},
		{"image/components/kubernetes*", "image/components/kubernetes-1.35/go.mod", false},
		{"image/components/kubernetes*/*", "image/components/kubernetes-1.35/go.mod", true},
	} {
		if got := matches(test.pattern, test.file); got != test.want {
			t.Errorf("%s, %s: %v", test.pattern, test.file, got)
		}
	}
}

// Each folder with end-to-end tests is in the table, and no pattern or test that is gone.
// Each file of the product is covered by some folder.
func TestTableIsComplete(t *testing.T) {
	t.Parallel()
	files := checkout(t)
	patterns := map[string]bool{} // and whether a file was found
	tests := functions(t, files)
	for folder, row := range Folders {
		if len(tests[folder]) == 0 {
			t.Errorf("%s has no end-to-end tests", folder)
		}
		for name := range row.Tests {
			if !tests[folder][name] {
				t.Errorf("%s has no end-to-end test %s", folder, name)
			}
		}
		for name := range tests[folder] {
			if len(Test{Folder: folder, Name: name}.covers()) == 0 {
				t.Errorf("%s.%s covers nothing", folder, name)
			}
		}
		for _, all := range append(slices.Collect(maps.Values(row.Tests)), row.All) {
			for _, pattern := range all {
				patterns[pattern] = false
			}
		}
	}
	for folder := range tests {
		if _, there := Folders[folder]; !there {
			t.Errorf("%s isn't in the table", folder)
		}
	}
	for _, file := range files {
		covered := false
		for pattern := range patterns {
			if matches(pattern, file) {
				patterns[pattern], covered = true, true
			}
		}
		product := strings.HasSuffix(file, ".go") && matches(file, file)
		if product && !covered && !slices.ContainsFunc(Without, func(p string) bool { return matches(p, file) }) {
			t.Errorf("%s: no end-to-end test covers it", file)
		}
	}
	for pattern, found := range patterns {
		if !found {
			t.Errorf("%q names no file", pattern)
		}
	}
}

// checkout are the files of the checkout.
func checkout(t *testing.T) (files []string) {
	t.Helper()
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			_, module := os.Stat(filepath.Join(path, "go.mod"))
			ofTest := module == nil && strings.HasPrefix(path, root+"/qemu/e2e/") // a test in the folder above runs it
			if path != root && (d.Name() == "out" || strings.HasPrefix(d.Name(), ".")) || ofTest {
				return filepath.SkipDir
			}
			return nil
		}
		file, err := filepath.Rel(root, path)
		files = append(files, filepath.ToSlash(file))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

var (
	tagged   = regexp.MustCompile(`^//go:build e2e( && long)?\n`)
	function = regexp.MustCompile(`(?m)^func (Test\w+)\(t \*testing\.T\)`)
)

// functions are the end-to-end tests by folder: all of qemu/e2e, and the long ones of services.
func functions(t *testing.T, files []string) map[string]map[string]bool {
	t.Helper()
	all := map[string]map[string]bool{}
	for _, file := range files {
		if !strings.HasSuffix(file, "_test.go") {
			continue
		}
		text, err := os.ReadFile(filepath.Join(root, file))
		if err != nil {
			t.Fatal(err)
		}
		tag := tagged.FindSubmatch(text)
		folder := filepath.ToSlash(filepath.Dir(file))
		if tag == nil || !strings.HasPrefix(folder, "qemu/e2e/") && len(tag[1]) == 0 {
			continue
		}
		for _, m := range function.FindAllSubmatch(text, -1) {
			if all[folder] == nil {
				all[folder] = map[string]bool{}
			}
			all[folder][string(m[1])] = true
		}
	}
	return all
}
