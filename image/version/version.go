// Package version names the code of a checkout, so that two builds of different code differ for whoever looks at them:
//
//	v0.1.0-dev+20261129.d89e7a7fa1b2                      the release, and the day (UTC) and the hash of the commit
//	v0.1.0-dev+20261129.d89e7a7fa1b2-dirty.5f3c09d1e2a4   the same with changes that aren't committed, and a hash of them
//
// What follows the + doesn't count where releases are compared (https://semver.org). The same code has the same name on
// each machine and at any time.
package version

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/mod/semver"
)

const (
	// Variable of the environment names the release that is made. Without it, the source has it.
	Variable = "GARBOARD_VERSION"
	// Linker is the variable of programs that has their version.
	Linker = "github.com/garboard-os/garboard/boot.Version"
	// source has the release of a checkout.
	source = "boot/release.go"
	// digits are what a hash is cut to.
	digits = 12
)

// unbuilt are in no program: an edit of them makes no other version, and so builds nothing.
var unbuilt = []string{"--", ":/", ":(exclude)docs", ":(exclude)qemu/e2e", ":(exclude)tools/testing", ":(exclude,glob)**/*_test.go", ":(exclude,glob)**/testdata/**", ":(exclude,glob)**/*.md"}

// Of names the code of the checkout at root. Code without git has the name of its release only.
func Of(ctx context.Context, root string) (string, error) {
	text, err := os.ReadFile(filepath.Join(root, source))
	if err != nil {
		return "", err
	}
	_, stated, _ := strings.Cut(string(text), "\nvar Version = \"")
	stated, _, _ = strings.Cut(stated, "\"\n")
	release := cmp.Or(os.Getenv(Variable), stated)
	if !semver.IsValid(release) || semver.Build(release) != "" {
		return "", fmt.Errorf("release %q (%s, or %s): must be like v1.2.3 or v1.2.3-rc.1", release, Variable, source)
	}
	if _, err := os.Stat(filepath.Join(root, ".git")); errors.Is(err, fs.ErrNotExist) {
		return release, nil
	}
	commit, err := Git(ctx, root, "log", "-1", "--format=%cd %H", "--date=format-local:%Y%m%d")
	if err != nil {
		return "", err
	}
	day, hash, _ := strings.Cut(commit, " ")
	changes, err := dirt(ctx, root)
	return release + "+" + day + "." + hash[:digits] + changes, err
}

// dirt tells of what isn't committed; "": nothing.
func dirt(ctx context.Context, root string) (string, error) {
	changed, err := Git(ctx, root, slices.Concat([]string{"diff", "--name-only", "--no-renames", "-z", "HEAD"}, unbuilt)...)
	if err != nil {
		return "", err
	}
	added, err := Git(ctx, root, slices.Concat([]string{"ls-files", "--others", "--exclude-standard", "-z"}, unbuilt)...)
	if err != nil || changed+added == "" {
		return "", err
	}
	names := strings.FieldsFunc(changed+added, func(r rune) bool { return r == 0 })
	slices.Sort(names)
	sum := sha256.New()
	for _, name := range names {
		content, err := os.ReadFile(filepath.Join(root, name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", err
		}
		fmt.Fprintf(sum, "%q %t %x\n", name, err == nil, sha256.Sum256(content)) // never fails (hash.Hash)
	}
	return fmt.Sprintf("-dirty.%x", sum.Sum(nil))[:len("-dirty.")+digits], nil
}

// Git runs git in a checkout, and returns what it prints.
func Git(ctx context.Context, root string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "git", args...)
	cmd.Dir, cmd.Env = root, append(os.Environ(), "TZ=UTC", "LC_ALL=C")
	var complaints strings.Builder
	cmd.Stderr = &complaints
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("git %s: %w: %s", args[0], err, complaints.String())
	}
	return strings.TrimSpace(string(out)), nil
}
