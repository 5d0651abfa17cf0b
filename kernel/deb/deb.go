// Package deb takes files out of Debian packages without installing them.
//
// The packages come from wherever the machine's own apt configuration points, so that apt does what it is good at: choosing the
// mirror, honouring a proxy, and checking each package against the hash in a signed index. Nothing here names a mirror. A package is
// then unpacked with dpkg-deb; its maintainer scripts never run, and the machine's package database isn't touched. Any user can do
// it: neither resolving nor downloading needs root, only the index lists that `apt-get update` leaves.
package deb

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// ErrUnknown says that apt's lists have no such package: they were never fetched, or the distribution lacks it.
var ErrUnknown = errors.New("apt knows no such package (apt-get update fetches its lists)")

// AptPackages are what the build machine must have installed for this package to work.
var AptPackages = []string{"apt", "dpkg"}

// Package is one version of a package as apt's signed index describes it.
type Package struct {
	Name    string
	Version string
	// SHA256 is the hash of the .deb file.
	SHA256 string
	// Depends holds the names in the Depends and Pre-Depends fields, in order, each with its alternatives dropped but the first.
	Depends []string
}

// Key identifies the contents of the package, for a build cache.
func (p Package) Key() string { return p.Name + "=" + p.Version + "@sha256:" + p.SHA256 }

// Resolve asks apt for the version that it would install of each name. It asks once for all: reading apt's lists takes most of a second.
func Resolve(ctx context.Context, names ...string) ([]Package, error) {
	if len(names) == 0 {
		return nil, nil
	}
	// --no-all-versions prints the candidates only. Names that apt doesn't know are no error if it knows one of the others.
	out, err := run(ctx, "", "apt-cache", append([]string{"show", "--no-all-versions"}, names...)...)
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	known := map[string]Package{}
	for paragraph := range bytes.SplitSeq(out, []byte("\n\n")) {
		if p := parse(paragraph); p.Version != "" && p.SHA256 != "" {
			known[p.Name] = p
		}
	}
	packages := make([]Package, 0, len(names))
	for _, name := range names {
		p, ok := known[name]
		if !ok {
			return nil, fmt.Errorf("resolve %s: %w", name, errors.Join(ErrUnknown, err))
		}
		packages = append(packages, p)
	}
	return packages, nil
}

// Closure resolves the names and whatever they depend on that wanted lets pass. One call of apt is made per level of dependencies.
func Closure(ctx context.Context, wanted func(name string) bool, names ...string) ([]Package, error) {
	var packages []Package
	seen := map[string]bool{}
	for level := names; len(level) > 0; {
		for _, name := range level {
			seen[name] = true
		}
		found, err := Resolve(ctx, level...)
		if err != nil {
			return nil, err
		}
		packages = append(packages, found...)
		level = nil
		for _, p := range found {
			for _, name := range p.Depends {
				if !seen[name] && wanted(name) && !slices.Contains(level, name) {
					level = append(level, name)
				}
			}
		}
	}
	return packages, nil
}

// parse reads one paragraph of a Packages index (deb822(5)).
func parse(paragraph []byte) Package {
	var p Package
	for line := range bytes.Lines(paragraph) {
		field, value, _ := strings.Cut(string(line), ":")
		value = strings.TrimSpace(value)
		switch field {
		case "Package":
			p.Name = value
		case "Version":
			p.Version = value
		case "SHA256":
			p.SHA256 = value
		case "Depends", "Pre-Depends":
			p.Depends = append(p.Depends, dependencies(value)...)
		}
	}
	return p
}

// dependencies turns "a (>= 1) | b, c:any" into [a c].
func dependencies(field string) []string {
	var names []string
	for _, one := range strings.Split(field, ",") {
		one, _, _ = strings.Cut(one, "|")
		one, _, _ = strings.Cut(one, "(")
		one, _, _ = strings.Cut(strings.TrimSpace(one), ":")
		if one != "" {
			names = append(names, one)
		}
	}
	return names
}

// Fetch downloads the packages into an empty folder of their own below dir, and unpacks all of them into dir. apt refuses what it
// can't verify; the archives are removed afterwards.
func Fetch(ctx context.Context, dir string, packages ...Package) error {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	archives, err := os.MkdirTemp(dir, ".archives-")
	if err != nil {
		return fmt.Errorf("fetch packages into %s: %w", dir, err)
	}
	defer os.RemoveAll(archives)

	args := []string{"-q", "-o", "APT::Get::AllowUnauthenticated=false"}
	if os.Geteuid() == 0 {
		// apt would otherwise hand the download to the user _apt, who can't write below a private folder.
		args = append(args, "-o", "APT::Sandbox::User=root")
	}
	args = append(args, "download")
	for _, p := range packages {
		args = append(args, p.Name+"="+p.Version)
	}
	if _, err := run(ctx, archives, "apt-get", args...); err != nil {
		return fmt.Errorf("download packages: %w", err)
	}
	files, err := filepath.Glob(filepath.Join(archives, "*.deb"))
	if err != nil {
		return err
	}
	if len(files) != len(packages) {
		return fmt.Errorf("download packages: apt left %d archives for %d packages", len(files), len(packages))
	}
	slices.Sort(files)
	for _, file := range files {
		if _, err := run(ctx, "", "dpkg-deb", "-x", file, dir); err != nil {
			return fmt.Errorf("unpack %s: %w", filepath.Base(file), err)
		}
	}
	return nil
}

// run gives back what a command printed; its error carries what the command complained about.
func run(ctx context.Context, dir, name string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %s", cmd, err, bytes.TrimSpace(stderr.Bytes()))
	}
	return out, nil
}
