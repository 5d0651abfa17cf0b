package components

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"

	"github.com/garboard-os/garboard/image/cache"
	"github.com/garboard-os/garboard/image/program"
)

// graft writes a Go module to dir in which the package host, a component's program, has programs of this repository in
// it, which answer to their own names. It is for programs that are made of the same libraries, as the sandbox is of
// runc's: two of them cost little more than one.
//
// Unlike fold it leaves the host where it is, since runc's main uses packages that only its own module may import: dir
// has a copy of the host's module, with the others as packages below it, and of the component's go.mod, which says to
// use the copy. The versions stay the pinned ones, so what is grafted must do with the modules that the component has.
func graft(ctx context.Context, root, module, host string, packages []string, dir string) error {
	main, err := copyHost(ctx, module, host, dir)
	if err != nil {
		return err
	}
	if err := renameMain(main); err != nil {
		return fmt.Errorf("%s: %w", host, err)
	}
	ours := make([]string, len(packages))
	for i, pkg := range packages {
		ours[i] = "./" + pkg
	}
	return copyPrograms(ctx, root, ours, filepath.Join(main, graftedDir), path.Join(host, graftedDir), filepath.Join(main, "main_"+graftedDir+".go"), graftedMain)
}

// copyHost writes a Go module to dir: the component's go.mod, which says to use the copy of the module that has the
// package host. It returns the folder of that package.
func copyHost(ctx context.Context, module, host, dir string) (main string, err error) {
	out, err := program.Output(ctx, module, goEnvironment, "go", "list", "-mod=readonly", "-json=Dir,Module", host)
	if err != nil {
		return "", err
	}
	var found struct {
		Dir    string
		Module struct{ Path, Dir string }
	}
	if err := json.Unmarshal([]byte(out), &found); err != nil {
		return "", fmt.Errorf("read what go list says: %w", err)
	}
	const copied = "host"
	if err := os.CopyFS(filepath.Join(dir, copied), os.DirFS(found.Module.Dir)); err != nil {
		return "", err
	}
	below, err := filepath.Rel(found.Module.Dir, found.Dir)
	if err != nil {
		return "", err
	}
	return filepath.Join(dir, copied, below), copyModule(module, dir, fmt.Sprintf("\nreplace %s => ./%s\n", found.Module.Path, copied))
}

// trim writes a Go module to dir in which packages of the component, below its folder insteadDir, take the place of
// those of a program's own module, below the program. It is for a program that imports what a node never uses.
func trim(ctx context.Context, module, host, dir string) error {
	main, err := copyHost(ctx, module, host, dir)
	if err != nil {
		return err
	}
	instead := os.DirFS(filepath.Join(module, insteadDir))
	packages, err := fs.Glob(instead, "*/*/*")
	for _, pkg := range packages {
		err = errors.Join(err, os.RemoveAll(filepath.Join(main, pkg)))
	}
	return errors.Join(err, os.CopyFS(main, instead))
}

const insteadDir = "instead"

// graftedDir is the folder in the host's package for what is grafted.
const graftedDir = "grafted"

//go:embed grafted.go.txt
var graftedMain string

// renameMain makes room for another main in a package.
func renameMain(dir string) error {
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		return err
	}
	mains := 0
	for _, file := range files {
		source, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if !packageMain.Match(source) || !funcMain.Match(source) {
			continue
		}
		mains += len(funcMain.FindAll(source, -1))
		if err := os.WriteFile(file, funcMain.ReplaceAll(source, []byte("func hostMain()")), 0o644); err != nil {
			return err
		}
	}
	if mains != 1 {
		return fmt.Errorf("has %d functions main, not one", mains)
	}
	return nil
}

// graftInputs identify what is grafted: tests aren't part of it.
func graftInputs(ctx context.Context, root string, packages []string) ([]string, error) {
	var inputs []string
	for _, pkg := range packages {
		files, err := sources(ctx, root, "./"+pkg)
		if err != nil {
			return nil, err
		}
		hash, err := cache.HashTree(files...)
		if err != nil {
			return nil, err
		}
		inputs = append(inputs, pkg, hash)
	}
	return inputs, nil
}
