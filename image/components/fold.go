package components

import (
	"context"
	"encoding/json"
	"fmt"
	"go/format"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
)

// fold writes a Go module to dir whose one program is several programs of others, told apart by the name it is called by.
//
// A package main can't be imported, so each is copied under a name of its own, with main renamed to Main. That is sound for programs whose
// init functions and package variables do no more than what a sibling can live with; it holds for the CNI plugins, which only pin the main
// goroutine to its thread there. The module keeps the go.mod and go.sum of module, and therefore the pinned versions.
func fold(ctx context.Context, module string, packages []string, dir string) error {
	for _, name := range []string{"go.mod", "go.sum"} {
		content, err := os.ReadFile(filepath.Join(module, name))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o644); err != nil {
			return err
		}
	}
	self, err := output(ctx, module, goEnvironment, "go", "list", "-m", "-mod=readonly")
	if err != nil {
		return err
	}
	var imports, cases strings.Builder
	for i, pkg := range packages {
		name := path.Base(pkg)
		if err := copyProgram(ctx, module, pkg, filepath.Join(dir, name)); err != nil {
			return fmt.Errorf("%s: %w", pkg, err)
		}
		fmt.Fprintf(&imports, "\tp%d %q\n", i, strings.TrimSpace(self)+"/"+name)
		fmt.Fprintf(&cases, "\tcase %q:\n\t\tp%d.Main()\n", name, i)
	}
	source, err := format.Source(fmt.Appendf(nil, foldedMain, imports.String(), cases.String()))
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "main.go"), source, 0o644)
}

const foldedMain = `package main

import (
	"fmt"
	"os"
	"path/filepath"

%s)

func main() {
	switch name := filepath.Base(os.Args[0]); name {
%s	default:
		fmt.Fprintf(os.Stderr, "%%s: no program of this name is in here\n", name)
		os.Exit(2)
	}
}
`

var (
	packageMain = regexp.MustCompile(`(?m)^package main$`)
	funcMain    = regexp.MustCompile(`(?m)^func main\(\)`)

	goEnvironment = []string{"GOFLAGS=", "GOWORK=off"}
)

// copyProgram copies the Go files of a package main that count on this platform.
func copyProgram(ctx context.Context, module, pkg, dir string) error {
	out, err := output(ctx, module, append([]string{"CGO_ENABLED=0"}, goEnvironment...), "go", "list", "-mod=readonly", "-json=Dir,GoFiles", pkg)
	if err != nil {
		return err
	}
	var found struct {
		Dir     string
		GoFiles []string
	}
	if err := json.Unmarshal([]byte(out), &found); err != nil {
		return fmt.Errorf("read what go list says: %w", err)
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	mains := 0
	for _, file := range found.GoFiles {
		source, err := os.ReadFile(filepath.Join(found.Dir, file))
		if err != nil {
			return err
		}
		if !packageMain.Match(source) {
			return fmt.Errorf("%s is not of package main", file)
		}
		mains += len(funcMain.FindAll(source, -1))
		source = packageMain.ReplaceAll(source, []byte("package folded"))
		source = funcMain.ReplaceAll(source, []byte("func Main()"))
		if err := os.WriteFile(filepath.Join(dir, file), source, 0o644); err != nil {
			return err
		}
	}
	if mains != 1 {
		return fmt.Errorf("has %d functions main, not one", mains)
	}
	return nil
}
