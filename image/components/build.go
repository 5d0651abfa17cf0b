package components

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/image/cache"
	"github.com/garboard-os/garboard/image/program"
	"github.com/garboard-os/garboard/image/progress"
)

// recipe is part of every key: raise it when a change here makes different binaries from the same table.
const recipe = "1"

// Builder builds components out of a checkout.
type Builder struct {
	Root     string // the checkout: the directory with the main go.mod
	Store    *cache.Store
	Progress *progress.Reporter
}

// Build builds one component after the other: the Go compiler uses all cores by itself.
func (b *Builder) Build(ctx context.Context, names ...string) (map[string]string, error) {
	if len(names) == 0 {
		names = Names()
	}
	var wanted []Component
	for _, name := range names {
		c, err := ByName(name)
		if err != nil {
			return nil, err
		}
		wanted = append(wanted, c)
	}
	b.Progress.Plan(names...)
	dirs := map[string]string{}
	for _, c := range wanted {
		dir, err := b.component(ctx, c)
		if err != nil {
			return nil, fmt.Errorf("build %s %s: %w", c.Name, c.Version, err)
		}
		dirs[c.Name] = dir
	}
	b.Progress.Summary("components", names...)
	return dirs, nil
}

func (b *Builder) component(ctx context.Context, c Component) (string, error) {
	module := filepath.Join(b.Root, "image", "components", c.Dir)
	inputs, err := b.inputs(ctx, c, module)
	if err != nil {
		return "", err
	}
	return b.Progress.Build(ctx, b.Store, c.Name, inputs, func(ctx context.Context, dir string) error { return compile(ctx, c, b.Root, module, dir) })
}

// inputs is everything that decides how a component's binaries come out.
func (b *Builder) inputs(ctx context.Context, c Component, module string) ([]string, error) {
	tree, err := cache.HashTree(module)
	if err != nil {
		return nil, err
	}
	inputs := []string{recipe, c.Name, c.Version, tree, strings.Join(c.Fold, " "), c.C}
	grafted, err := graftInputs(ctx, b.Root, c.Graft)
	if err != nil {
		return nil, err
	}
	inputs = append(inputs, grafted...)
	if c.Pins != "" {
		pins, err := cache.HashTree(filepath.Join(b.Root, "image", "components", c.Pins))
		if err != nil {
			return nil, err
		}
		inputs = append(inputs, c.Pins, pins)
	}
	for _, p := range c.Programs {
		inputs = append(inputs, p.File, strings.Join(p.Links, " "), strings.Join(p.arguments(), " "))
	}
	if len(c.Programs) > 0 {
		version, err := program.Output(ctx, module, c.Programs[0].environment(), "go", "env", "GOVERSION", "GOOS", "GOARCH", "GOAMD64", "GOEXPERIMENT")
		if err != nil {
			return nil, err
		}
		inputs = append(inputs, version)
	}
	if c.usesC() {
		toolchain, err := cToolchain(ctx, c)
		if err != nil {
			return nil, err
		}
		inputs = append(inputs, toolchain...)
	}
	return inputs, nil
}

func (c Component) usesC() bool {
	return c.C != "" || slices.ContainsFunc(c.Programs, func(p Program) bool { return p.Static })
}

// cToolchain identifies the C compiler and the libraries that get linked in.
func cToolchain(ctx context.Context, c Component) ([]string, error) {
	version, err := program.Output(ctx, "", nil, "gcc", "--version")
	if err != nil {
		return nil, err
	}
	libraries := []string{"libc.a"}
	if c.C == "" {
		libraries = append(libraries, "libseccomp.a")
	}
	identity := []string{version}
	for _, library := range libraries {
		path, err := program.Output(ctx, "", nil, "gcc", "-print-file-name="+library)
		if err != nil {
			return nil, err
		}
		// gcc echoes the bare name of a library that it doesn't find.
		if path = strings.TrimSpace(path); !filepath.IsAbs(path) {
			return nil, fmt.Errorf("%s is missing: install the Debian packages %s", library, strings.Join(AptPackages, " "))
		}
		hash, err := cache.HashTree(path)
		if err != nil {
			return nil, err
		}
		identity = append(identity, hash)
	}
	return identity, nil
}

// compile puts a component's files into dir.
func compile(ctx context.Context, c Component, root, module, dir string) error {
	if c.C != "" {
		_, err := program.Output(ctx, module, nil, "gcc", "-Os", "-static", "-s", "-Wl,--build-id=none", "-DVERSION=\""+c.Version+"\"", "-o", filepath.Join(dir, c.Name), c.C)
		return err
	}
	// go build doesn't remove its work directory when it is stopped. Here it goes with the whole unfinished result,
	// even after a SIGKILL.
	work := filepath.Join(dir, ".work")
	if err := os.Mkdir(work, 0o755); err != nil {
		return err
	}
	defer os.RemoveAll(work)
	if len(c.Fold) > 0 {
		folded := filepath.Join(work, "folded")
		if err := fold(ctx, module, c.Fold, folded); err != nil {
			return fmt.Errorf("fold programs into one: %w", err)
		}
		module = folded
	}
	if len(c.Graft) > 0 {
		grafted := filepath.Join(work, "grafted")
		if err := graft(ctx, root, module, c.Programs[0].Package, c.Graft, grafted); err != nil {
			return fmt.Errorf("graft programs of ours: %w", err)
		}
		module = grafted
	}
	if _, err := os.Stat(filepath.Join(module, insteadDir)); err == nil {
		trimmed := filepath.Join(work, "trimmed")
		if err := trim(ctx, module, c.Programs[0].Package, trimmed); err != nil {
			return fmt.Errorf("trim the program's module: %w", err)
		}
		module = trimmed
	}
	for _, p := range c.Programs {
		args := []string{"build", "-o", filepath.Join(dir, p.File)}
		if c.Pins != "" {
			args = append(args, "-modfile="+filepath.Join(root, "image", "components", c.Pins, "go.mod"))
		}
		args = append(args, p.arguments()...)
		if _, err := program.Output(ctx, module, append(p.environment(), "GOTMPDIR="+work), "go", args...); err != nil {
			return err
		}
		for _, link := range p.Links {
			if err := os.Symlink(p.File, filepath.Join(dir, link)); err != nil {
				return err
			}
		}
	}
	return nil
}

// arguments are those for go build, but for the output.
func (p Program) arguments() []string {
	linker := "-s -w -buildid="
	for _, variable := range p.Stamp {
		linker += " -X " + variable
	}
	if p.Static {
		linker += " -linkmode external -extldflags '-static -Wl,--build-id=none'"
	}
	return []string{"-trimpath", "-buildvcs=false", "-mod=readonly", "-tags=" + strings.Join(p.Tags, ","), "-ldflags=" + linker, p.Package}
}

// environment overrides what the user's own settings would change about the result.
func (p Program) environment() []string {
	cgo := "CGO_ENABLED=0"
	if p.Static {
		cgo = "CGO_ENABLED=1"
	}
	return []string{cgo, "GOFLAGS=", "GOWORK=off", "GOAMD64=v1", "GOEXPERIMENT=", "GOFIPS140=off", "CC=gcc", "CGO_CFLAGS=-O2", "CGO_LDFLAGS="}
}
