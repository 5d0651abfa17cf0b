// Package release makes the files of a release that others can take. The same commit, key, Go and packages of Debian
// give the same bytes, on each machine and at any time: the one date in the files is the commit's. Its test checks a
// release from the files alone.
package release

import (
	"context"
	"crypto"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/image/program"
	"github.com/garboard-os/garboard/image/version"
)

// Files of each release.
const (
	sumsFile      = "SHA256SUMS"
	signatureFile = sumsFile + ".sig"
	keyFile       = "release.pub"
	licenceFile   = "LICENSE"
)

// A Release is made in a directory, file by file.
type Release struct {
	Root, Dir string
	// Key is nil where somebody else signs; Public is its other half, as PEM.
	Key    crypto.Signer
	Public string
	// Name is the version with its commit, and Version the same without.
	Name, Version string
	Date          time.Time
}

// Begin looks at the checkout at Root, and makes Dir, which must not exist. The release is in version.Variable.
func (r *Release) Begin(ctx context.Context) error {
	changed, err := version.Git(ctx, r.Root, "status", "--porcelain")
	if err == nil && changed != "" {
		err = fmt.Errorf("the checkout has changes that aren't committed, and a release is of a commit:\n%s", changed)
	}
	if err != nil {
		return err
	}
	if r.Name, err = version.Of(ctx, r.Root); err != nil {
		return err
	}
	r.Version = boot.Release(r.Name)
	stamp, err := version.Git(ctx, r.Root, "log", "-1", "--format=%ct")
	if err != nil {
		return err
	}
	seconds, err := strconv.ParseInt(stamp, 10, 64)
	r.Date = time.Unix(seconds, 0).UTC()
	return errors.Join(err, os.MkdirAll(filepath.Dir(r.Dir), 0o755), os.Mkdir(r.Dir, 0o755), r.write(keyFile, []byte(r.Public)))
}

// System is the path of a file of the system, with the release in its name.
func (r *Release) System(end string) string {
	return filepath.Join(r.Dir, "garboard_"+r.Version+"_"+end)
}

func (r *Release) write(name string, content []byte) error {
	return boot.WriteFile(filepath.Join(r.Dir, name), content, 0o644)
}

// Text makes what is for people to read.
func (r *Release) Text(ctx context.Context) error {
	changes, err := r.changelog(ctx)
	if err != nil {
		return err
	}
	site, err := os.MkdirTemp("", "garboard-site-*")
	if err != nil {
		return err
	}
	if _, err := program.Output(ctx, r.Root, nil, "go", "run", "./tools/docs", site); err != nil {
		return err
	}
	pages := files{}
	err = errors.Join(r.take(pages, "garboard-"+r.Version+"/"+licenceFile, filepath.Join(r.Root, licenceFile)), fs.WalkDir(os.DirFS(site), ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || path.Ext(name) == ".1" { // gbctl's archives have its manual
			return err
		}
		return r.take(pages, "garboard-"+r.Version+"/"+name, filepath.Join(site, name))
	}), os.RemoveAll(site))
	packed, failed := tarball(pages)
	return errors.Join(err, failed, r.write("CHANGELOG.md", []byte(changes)), r.write("garboard_"+r.Version+"_docs.tar.gz", packed))
}

// Finish writes the sums of all files, and signs them.
func (r *Release) Finish() error {
	var sums strings.Builder
	err := filepath.WalkDir(r.Dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := os.ReadFile(path)
		fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(content), entry.Name())
		return errors.Join(err, os.Chmod(path, 0o644))
	})
	if err = errors.Join(err, r.write(sumsFile, []byte(sums.String()))); err != nil || r.Key == nil {
		return err
	}
	signature, err := r.Key.Sign(nil, []byte(sums.String()), crypto.Hash(0)) // the same for the same bytes (RFC 8032)
	return errors.Join(err, r.write(signatureFile, signature))
}
