package components

import (
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"go/format"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/garboard-os/garboard/image/program"
)

// fold writes a Go module to dir whose one program is several programs of others, told apart by the name it is called
// by.
//
// A package main can't be imported, so each is copied under a name of its own, with main renamed to Main. That is sound
// for programs whose init functions and package variables do no more than what a sibling can live with; it holds for
// the CNI plugins, which only pin the main goroutine to its thread there. The module keeps the go.mod and go.sum of
// module, and therefore the pinned versions.
func fold(ctx context.Context, module string, packages []string, dir string) error {
	if err := copyModule(module, dir, ""); err != nil {
		return err
	}
	self, err := program.Output(ctx, module, goEnvironment, "go", "list", "-m", "-mod=readonly")
	if err != nil {
		return err
	}
	return copyPrograms(ctx, module, packages, dir, strings.TrimSpace(self), filepath.Join(dir, "main.go"), foldedMain)
}

// copyPrograms copies packages main to folders in dir, which are imported from base, and writes a file with a main that
// calls them by their names.
func copyPrograms(ctx context.Context, module string, packages []string, dir, base, file, main string) error {
	var imports, cases strings.Builder
	for i, pkg := range packages {
		name := path.Base(pkg)
		if err := copyProgram(ctx, module, pkg, filepath.Join(dir, name)); err != nil {
			return fmt.Errorf("%s: %w", pkg, err)
		}
		fmt.Fprintf(&imports, "\tp%d %q\n", i, base+"/"+name)
		fmt.Fprintf(&cases, "\tcase %q:\n\t\tp%d.Main()\n", name, i)
	}
	source, err := format.Source(fmt.Appendf(nil, main, imports.String(), cases.String()))
	if err != nil {
		return err
	}
	return os.WriteFile(file, source, 0o644)
}

//go:embed folded.go.txt
var foldedMain string

var (
	packageMain = regexp.MustCompile(`(?m)^package main$`)
	funcMain    = regexp.MustCompile(`(?m)^func main\(\)`)

	goEnvironment = []string{"GOFLAGS=", "GOWORK=off"}
)

// copyModule copies what pins the versions of a module, with a text at the end of go.mod.
func copyModule(module, dir, more string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for name, end := range map[string]string{"go.mod": more, "go.sum": ""} {
		content, err := os.ReadFile(filepath.Join(module, name))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, name), append(content, end...), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// sources lists the files of a package main that count on this platform.
func sources(ctx context.Context, module, pkg string) ([]string, error) {
	out, err := program.Output(ctx, module, append([]string{"CGO_ENABLED=0"}, goEnvironment...), "go", "list", "-mod=readonly", "-json=Dir,GoFiles,EmbedFiles", pkg)
	if err != nil {
		return nil, err
	}
	var found struct {
		Dir                 string
		GoFiles, EmbedFiles []string
	}
	if err := json.Unmarshal([]byte(out), &found); err != nil {
		return nil, fmt.Errorf("read what go list says: %w", err)
	}
	files := append(found.GoFiles, found.EmbedFiles...)
	for i, file := range files {
		files[i] = filepath.Join(found.Dir, file)
	}
	return files, nil
}

// copyProgram copies a package main, to be imported.
func copyProgram(ctx context.Context, module, pkg, dir string) error {
	files, err := sources(ctx, module, pkg)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	mains := 0
	for _, path := range files {
		source, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if filepath.Ext(path) == ".go" && !packageMain.Match(source) {
			return fmt.Errorf("%s is not of package main", path)
		}
		mains += len(funcMain.FindAll(source, -1))
		source = packageMain.ReplaceAll(source, []byte("package folded"))
		source = funcMain.ReplaceAll(source, []byte("func Main()"))
		if err := os.WriteFile(filepath.Join(dir, filepath.Base(path)), source, 0o644); err != nil {
			return err
		}
	}
	if mains != 1 {
		return fmt.Errorf("has %d functions main, not one", mains)
	}
	return nil
}
