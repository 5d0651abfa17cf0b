// Package deb takes files out of packages of one release of Debian, without installing them.
//
// The release is the same on every build machine, and apt does what it is good at: it uses the mirrors and the proxy of
// the machine's own configuration, checks the release's signature, and checks each package against the hash in the
// signed index. The lists are in a folder of their own. A package is then unpacked with dpkg-deb; its maintainer
// scripts never run, and the machine's package database isn't touched. Any user can do it.
package deb

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// ErrUnknown says that the release has no such package.
var ErrUnknown = errors.New("no such package in Debian " + Release)

// Release is the code name of the release that packages are taken from.
const Release = "trixie"

// AptPackages are what the build machine must have installed for this package to work.
var AptPackages = []string{"apt", "debian-archive-keyring", "dpkg"}

const (
	// keyring has the keys of all supported releases of Debian.
	keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
	// MirrorVar names the environment variable with the URL of a mirror of Debian, for build machines whose own apt
	// configuration has none. The security updates are looked for at the same URL with -security at its end.
	MirrorVar = "GARBOARD_DEBIAN_MIRROR"
)

// Lists are apt's lists of the release, in a folder that Update filled.
type Lists struct{ Dir string }

// Update fetches the lists into an empty folder.
func Update(ctx context.Context, dir string) error {
	main, security, err := mirrors(ctx)
	if err != nil {
		return fmt.Errorf("fetch the lists of Debian %s: %w", Release, err)
	}
	sources := fmt.Sprintf("deb [signed-by=%[1]s] %[2]s %[4]s main\ndeb [signed-by=%[1]s] %[3]s %[4]s-security main\n", keyring, main, security, Release)
	if err := os.MkdirAll(filepath.Join(dir, "state/lists/partial"), 0o755); err != nil {
		return err
	}
	for name, contents := range map[string]string{sourcesFile: sources, statusFile: ""} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(contents), 0o644); err != nil {
			return err
		}
	}
	// Without Error-Mode, apt keeps older lists where a mirror doesn't answer, and has none here.
	if _, err := run(ctx, "", "apt-get", (Lists{dir}).options("-q", "-o", "APT::Update::Error-Mode=any", "update")...); err != nil {
		return fmt.Errorf("fetch the lists of Debian %s: %w", Release, err)
	}
	return nil
}

// Key is the hash of what Debian has signed of the lists.
func (l Lists) Key() (string, error) {
	files, err := filepath.Glob(filepath.Join(l.Dir, "state/lists/*_InRelease"))
	all := sha256.New()
	for _, file := range files {
		signed, e := os.ReadFile(file)
		all.Write(signed)
		err = errors.Join(err, e)
	}
	return fmt.Sprintf("%x", all.Sum(nil)), err
}

const sourcesFile, statusFile = "sources.list", "status"

// options puts apt's own configuration before args: only the release's lists, no preferences, nothing installed, no
// cache.
func (l Lists) options(args ...string) []string {
	options := []string{
		"-o", "Dir::Etc::SourceList=" + filepath.Join(l.Dir, sourcesFile), "-o", "Dir::Etc::SourceParts=/dev/null",
		"-o", "Dir::Etc::Preferences=/dev/null", "-o", "Dir::Etc::PreferencesParts=/dev/null",
		"-o", "Dir::State=" + filepath.Join(l.Dir, "state"), "-o", "Dir::State::status=" + filepath.Join(l.Dir, statusFile),
		"-o", "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache=",
		"-o", "APT::Architecture=amd64", "-o", "APT::Architectures=amd64", "-o", "APT::Get::AllowUnauthenticated=false",
		"-o", "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false", "-o", "Acquire::Languages=none",
	}
	if os.Geteuid() == 0 {
		// apt would otherwise hand the download to the user _apt, who can't write below a private folder.
		options = append(options, "-o", "APT::Sandbox::User=root")
	}
	return append(options, args...)
}

// mirrors finds where the machine's own apt configuration gets Debian's archive and its security updates from.
func mirrors(ctx context.Context) (main, security string, err error) {
	if url := strings.TrimSuffix(os.Getenv(MirrorVar), "/"); url != "" {
		return url, url + "-security", nil
	}
	out, err := run(ctx, "", "apt-get", "indextargets", "--format", "$(ORIGIN)|$(LABEL)|$(REPO_URI)")
	if err != nil {
		return "", "", err
	}
	for line := range strings.Lines(string(out)) {
		switch fields := strings.Split(strings.TrimSpace(line), "|"); {
		case len(fields) != 3 || fields[0] != "Debian":
		case fields[1] == "Debian" && main == "":
			main = fields[2]
		case fields[1] == "Debian-Security" && security == "":
			security = fields[2]
		}
	}
	if main == "" || security == "" {
		return "", "", fmt.Errorf("this machine's apt has no lists of Debian and its security updates: run apt-get update, or set %s to the URL of a mirror", MirrorVar)
	}
	return main, security, nil
}

// Package is one version of a package as apt's signed index describes it.
type Package struct {
	Name    string
	Version string
	// SHA256 is the hash of the .deb file.
	SHA256 string
	// Depends holds the names in the Depends and Pre-Depends fields, in order, each with its alternatives dropped but
	// the first.
	Depends []string
}

// Key identifies the contents of the package, for a build cache.
func (p Package) Key() string { return p.Name + "=" + p.Version + "@sha256:" + p.SHA256 }

// Keys identifies the contents of several packages.
func Keys(packages []Package) []string {
	keys := make([]string, len(packages))
	for i, p := range packages {
		keys[i] = p.Key()
	}
	return keys
}

// Resolve asks apt for the newest version of each name. It asks once for all: reading apt's lists takes most of a
// second.
func (l Lists) Resolve(ctx context.Context, names ...string) ([]Package, error) {
	if len(names) == 0 {
		return nil, nil
	}
	// --no-all-versions prints the candidates only. Names that apt doesn't know are no error if it knows one of the
	// others.
	out, err := run(ctx, "", "apt-cache", l.options(append([]string{"show", "--no-all-versions"}, names...)...)...)
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

// Closure resolves the names and whatever they depend on that wanted lets pass. One call of apt is made per level of
// dependencies.
func (l Lists) Closure(ctx context.Context, wanted func(name string) bool, names ...string) ([]Package, error) {
	var packages []Package
	seen := map[string]bool{}
	for level := names; len(level) > 0; {
		for _, name := range level {
			seen[name] = true
		}
		found, err := l.Resolve(ctx, level...)
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

// Fetch downloads the packages into an empty folder of their own below dir, and unpacks all of them into dir. apt
// refuses what it can't verify; the archives are removed afterwards.
func (l Lists) Fetch(ctx context.Context, dir string, packages ...Package) error {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	archives, err := os.MkdirTemp(dir, ".archives-")
	if err != nil {
		return fmt.Errorf("fetch packages into %s: %w", dir, err)
	}
	defer os.RemoveAll(archives)

	args := l.options("-q", "-o", "Dir::Cache="+archives, "download")
	for _, p := range packages {
		args = append(args, p.Name+"="+p.Version)
	}
	if _, err := run(ctx, archives, "apt-get", args...); err != nil {
		if strings.Contains(err.Error(), " 404 ") { // Debian's archive keeps only the newest version of a package
			err = errors.Join(fmt.Errorf("the lists in %s are out of date, and are removed: try again: %w", l.Dir, err), os.RemoveAll(l.Dir))
		}
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
