// Package program builds the programs of this repository that go into an image: PID 1, and the one of the installer
// image. (The sandbox is grafted on a component: see image/components.)
//
// A result is cached under what decides its bytes: the files of the packages that it imports from here, the versions of
// the modules that it imports from elsewhere, the flags and the toolchain. An edit of a test, or of a package that the
// program doesn't import, builds nothing.
package program

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/image/cache"
	"github.com/garboard-os/garboard/image/progress"
	"github.com/garboard-os/garboard/image/version"
)

const (
	// stopCompiler is what a compiler gets to remove its temporary files after SIGTERM.
	stopCompiler = 5 * time.Second
	// quoted is how much of a failed command's output an error shows: the end, where compilers say what was wrong.
	quoted = 4000
)

// The programs: the names of the files, and of the steps that people see.
const (
	Init      = "init"
	Installer = "installer"
)

var packages = map[string]string{Init: "./init", Installer: "./image/installer"}

// Builder builds programs out of a checkout.
type Builder struct {
	// Root is the folder with go.mod.
	Root string
	// Version is the name to stamp (package version).
	Version  string
	Store    *cache.Store
	Progress *progress.Reporter
}

// Build gives back the path of a built program.
func (b *Builder) Build(ctx context.Context, name string) (string, error) {
	inputs, err := b.inputs(ctx, packages[name])
	if err != nil {
		return "", fmt.Errorf("build %s: %w", name, err)
	}
	dir, err := b.Progress.Build(ctx, b.Store, name, inputs, func(ctx context.Context, dir string) error {
		_, err := b.golang(ctx, append([]string{"build", "-o", filepath.Join(dir, name)}, b.arguments(packages[name])...)...)
		return err
	})
	return filepath.Join(dir, name), err
}

func (b *Builder) arguments(of string) []string {
	linker := "-s -w -buildid= -X " + version.Linker + "=" + b.Version
	return []string{"-trimpath", "-buildvcs=false", "-mod=readonly", tags, "-ldflags=" + linker, of}
}

// tags leave out the pages that grpc has for looking at its calls, with the templates
// for them: nobody can open them on a node, and they are 360 KB.
const tags = "-tags=grpcnotrace"

// environment overrides what the user's own settings would change about the result. Programs are static: without cgo.
var environment = []string{"CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off", "GOOS=linux", "GOARCH=amd64", "GOAMD64=v1", "GOEXPERIMENT=", "GOFIPS140=off"}

// source is what `go list -json` tells of a package.
type source struct {
	Dir, ImportPath string
	Standard        bool
	Module          *struct {
		Path    string
		Version string
		Main    bool
	}
	GoFiles, SFiles, EmbedFiles []string
}

// inputs lists everything that decides the program's bytes.
func (b *Builder) inputs(ctx context.Context, of string) ([]string, error) {
	fields := "-json=Dir,ImportPath,Standard,Module,GoFiles,SFiles,EmbedFiles"
	listed, err := b.golang(ctx, "list", "-deps", tags, fields, of)
	if err != nil {
		return nil, err
	}
	toolchain, err := b.golang(ctx, "env", "GOVERSION", "GOOS", "GOARCH", "GOAMD64", "GOEXPERIMENT")
	if err != nil {
		return nil, err
	}
	inputs := append(b.arguments(of), toolchain)
	var modules []string
	for decoder := json.NewDecoder(strings.NewReader(listed)); ; {
		var s source
		err := decoder.Decode(&s)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("read go list: %w", err)
		}
		switch {
		case s.Standard || s.Module == nil:
		case !s.Module.Main:
			modules = append(modules, s.Module.Path+"@"+s.Module.Version)
		default:
			files, hash, err := s.identify()
			if err != nil {
				return nil, err
			}
			inputs = append(inputs, s.ImportPath, files, hash)
		}
	}
	slices.Sort(modules)
	return append(inputs, slices.Compact(modules)...), nil
}

// identify gives back the names of the files that are compiled in, and their hash.
func (s source) identify() (names, hash string, err error) {
	files := slices.Concat(s.GoFiles, s.SFiles, s.EmbedFiles)
	paths := make([]string, 0, len(files))
	for _, name := range files {
		paths = append(paths, filepath.Join(s.Dir, name))
	}
	hash, err = cache.HashTree(paths...)
	return strings.Join(files, " "), hash, err
}

// golang runs the go command.
func (b *Builder) golang(ctx context.Context, args ...string) (string, error) {
	return Output(ctx, b.Root, environment, "go", args...)
}

// Output runs a command in dir and returns its standard output. A command that ctx ends goes with all of its children.
func Output(ctx context.Context, dir string, env []string, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), env...)
	// An own process group: go build starts compilers, and a signal to it alone would leave them writing into a
	// directory that is gone.
	endWhole(cmd)
	cmd.WaitDelay = stopCompiler
	var complaints strings.Builder
	cmd.Stderr = &complaints
	out, err := cmd.Output()
	if err == nil {
		return string(out), nil
	}
	if ctx.Err() != nil {
		return "", ctx.Err()
	}
	text := strings.TrimSpace(complaints.String())
	if len(text) > quoted {
		text = "…" + text[len(text)-quoted:]
	}
	command := name
	if len(args) > 0 {
		command += " " + args[0]
	}
	if errors.Is(err, exec.ErrNotFound) {
		return "", fmt.Errorf("run %s: %w", command, err)
	}
	return "", fmt.Errorf("%s in %s: %w: %s", command, dir, err, text)
}
