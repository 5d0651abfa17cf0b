// Package debian takes programs, with the libraries that they load, out of Debian's packages.
//
// What to take is a table, a Set. The root filesystem of a node has one, and the container images have another. Nothing
// is installed, and nothing comes along that the table doesn't name, or that the ELF headers of what it names don't ask
// for: no scripts, no documentation, none of the packages that exist for the sake of maintainer scripts. The result is
// laid out with one /usr, and is kept in the cache under the packages' versions and hashes.
//
// The packages are of the release that package deb names. Its lists are fetched once (Lists). Reading them takes apt
// seconds, so Stored keeps the answers.
package debian

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/image/cache"
	"github.com/garboard-os/garboard/image/progress"
	"github.com/garboard-os/garboard/kernel"
	"github.com/garboard-os/garboard/kernel/deb"
)

// AptPackages are what the build machine must have installed for this package to work. The tools themselves are only
// unpacked.
var AptPackages = deb.AptPackages

// Tool is a file, or a folder of plug-ins, that comes from a package because writing it anew in Go would be folly.
type Tool struct {
	Package string
	// Name is the base name of a program or library, or the path of any other file or folder in the package.
	Name string
	// Links are further names of a program, in the same folder.
	Links []string
	Why   string
}

// Set is what one kind of image takes from packages: tools, and the bundle of certificate authorities.
type Set struct {
	// Name is the step that people see, and the name of the results in the cache.
	Name  string
	Tools []Tool
	// Tree is the folder of the result in which the tools lie, and Authorities the file with the bundle; "": without
	// it.
	Tree, Authorities string
}

// recipe is how tools are laid out. It is part of the key, so that an edit makes new results without anybody having to
// think of it.
//
//go:embed pick.go
var recipe string

// stepLists fetches the lists of packages.
const stepLists = "packages"

// Lists returns the lists of packages. They are fetched anew where the kernel that this checkout was tested with
// changes: two builds of a checkout take the same packages, and a new one gets the security updates.
func Lists(ctx context.Context, store *cache.Store, r *progress.Reporter) (deb.Lists, error) {
	inputs := []string{deb.Release, os.Getenv(deb.MirrorVar)}
	for _, flavour := range kernel.Flavours {
		inputs = append(inputs, kernel.Tested[flavour])
	}
	dir, err := r.Build(ctx, store, stepLists, inputs, deb.Update)
	return deb.Lists{Dir: dir}, err
}

// Build returns the folder with the set.
func (s Set) Build(ctx context.Context, store *cache.Store, r *progress.Reporter) (string, error) {
	r.Plan(s.Name)
	lists, err := Lists(ctx, store, r)
	if err != nil {
		return "", err
	}
	packages, err := s.resolve(ctx, store, lists)
	if err != nil {
		return "", fmt.Errorf("find the packages of %s: %w", s.Name, err)
	}
	inputs := append([]string{recipe, s.Tree, s.Authorities}, deb.Keys(packages)...)
	for _, t := range s.Tools {
		inputs = append(inputs, t.Package, t.Name, strings.Join(t.Links, " "))
	}
	return r.Build(ctx, store, s.Name, inputs, func(ctx context.Context, dir string) error { return s.fetch(ctx, lists, packages, dir) })
}

// resolve finds the packages of the tools and of the libraries that they depend on.
func (s Set) resolve(ctx context.Context, store *cache.Store, lists deb.Lists) ([]deb.Package, error) {
	var names []string
	if s.Authorities != "" {
		names = append(names, authoritiesPackage)
	}
	for _, t := range s.Tools {
		names = append(names, t.Package)
	}
	slices.Sort(names)
	names = slices.Compact(names)
	return Stored(ctx, store, s.Name+"-packages", lists, names, func(ctx context.Context) ([]deb.Package, error) {
		return lists.Closure(ctx, isLibrary, names...)
	})
}

// isLibrary tells what may hold a shared library from what packages depend on for their scripts.
func isLibrary(name string) bool { return strings.HasPrefix(name, "lib") || name == "zlib1g" }

// fetch leaves the set in dir.
func (s Set) fetch(ctx context.Context, lists deb.Lists, packages []deb.Package, dir string) (err error) {
	unpacked, err := os.MkdirTemp(dir, ".unpacked-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(unpacked)) }()
	if err := lists.Fetch(ctx, unpacked, packages...); err != nil {
		return err
	}
	p := newPicker(unpacked, filepath.Join(dir, s.Tree))
	for _, t := range s.Tools {
		if err := p.take(t); err != nil {
			return fmt.Errorf("take %s out of %s: %w", t.Name, t.Package, err)
		}
	}
	if err := writeKeys(filepath.Join(dir, s.Tree, PackagesFolder, s.Name), packages); err != nil {
		return err
	}
	if s.Authorities == "" {
		return nil
	}
	return bundle(filepath.Join(unpacked, authoritiesFolder), filepath.Join(dir, s.Authorities))
}

// PackagesFolder of an image has a file for each set, and for the kernel, with the packages that it was made from:
// name, version and hash.
const PackagesFolder = "/usr/share/garboard/packages"

func writeKeys(path string, packages []deb.Package) error {
	keys := strings.Join(deb.Keys(packages), "\n") + "\n"
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, []byte(keys), 0o644)
}
