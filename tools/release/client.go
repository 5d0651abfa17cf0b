package release

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/garboard-os/garboard/image/program"
	"github.com/garboard-os/garboard/image/sbom"
	"github.com/garboard-os/garboard/image/version"
)

// Platforms are those that gbctl runs on: GOOS and GOARCH.
var Platforms = [][2]string{{"linux", "amd64"}, {"linux", "arm64"}, {"darwin", "amd64"}, {"darwin", "arm64"}, {"windows", "amd64"}, {"windows", "arm64"}}

// The texts of packages, with words for the version, the architecture and the sums of archives.
var (
	//go:embed control
	control string
	//go:embed gbctl.rb
	formula string
)

// inDebian is where the files of an archive are in a package of Debian, by the end of their names. Others aren't in it.
var inDebian = []struct{ end, dir, name string }{
	{".1", "usr/share/man/man1", ""}, {"/_gbctl", "usr/share/zsh/vendor-completions", ""}, {".fish", "usr/share/fish/vendor_completions.d", ""},
	{"completions/gbctl", "usr/share/bash-completion/completions", ""}, {licenceFile, "usr/share/doc/gbctl", "copyright"}, {"gbctl", "usr/bin", ""},
}

// Client makes gbctl for these platforms: archives, packages of Debian, a formula of Homebrew and the list of its
// software.
func (r *Release) Client(ctx context.Context, platforms [][2]string) (err error) {
	work, err := os.MkdirTemp("", "garboard-release-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	around, err := r.around(ctx, work)
	if err != nil {
		return err
	}
	list, words := sbom.New(r.Name), []string{"$VERSION", r.Version[1:]}
	for _, p := range platforms {
		content, err := r.build(ctx, p[0], p[1], filepath.Join(work, "gbctl"))
		if err != nil {
			return err
		}
		list.Program(bytes.NewReader(content))
		pack, end, name := tarball, "tar.gz", "gbctl"
		if p[0] == "windows" {
			pack, end, name = zipped, "zip", "gbctl.exe"
		}
		r.add(around, name, 0o755, content)
		packed, err := pack(around)
		if err = errors.Join(err, r.write(fmt.Sprintf("gbctl_%s_%s_%s.%s", r.Version, p[0], p[1], end), packed)); err != nil {
			return err
		}
		if p[0] == "linux" {
			if err := r.debian(p[1], around); err != nil {
				return err
			}
		}
		delete(around, name)
		words = append(words, "$"+p[0]+"_"+p[1], fmt.Sprintf("%x", sha256.Sum256(packed)))
	}
	text, err := list.Text()
	return errors.Join(err, r.write("gbctl_"+r.Version+".spdx.json", text), r.write("gbctl.rb", []byte(strings.NewReplacer(words...).Replace(formula))))
}

// build compiles gbctl.
func (r *Release) build(ctx context.Context, system, arch, to string) ([]byte, error) {
	env := []string{"CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off", "GOOS=" + system, "GOARCH=" + arch, "GOAMD64=v1", "GOARM64=v8.0", "GOEXPERIMENT=", "GOFIPS140=off"}
	linker := "-ldflags=-s -w -buildid= -X " + version.Linker + "=" + r.Name
	if _, err := program.Output(ctx, r.Root, env, "go", "build", "-trimpath", "-buildvcs=false", "-mod=readonly", linker, "-o", to, "./tools/gbctl"); err != nil {
		return nil, fmt.Errorf("gbctl for %s/%s: %w", system, arch, err)
	}
	return os.ReadFile(to)
}

// around are the files beside gbctl in archives: the licence, and what gbctl itself writes.
func (r *Release) around(ctx context.Context, work string) (files, error) {
	dir, own := filepath.Join(work, "around"), filepath.Join(work, "own")
	if _, err := r.build(ctx, runtime.GOOS, runtime.GOARCH, own); err != nil {
		return nil, err
	}
	if _, err := program.Output(ctx, "", []string{fmt.Sprint("SOURCE_DATE_EPOCH=", r.Date.Unix())}, own, "man", dir); err != nil {
		return nil, err
	}
	all := files{}
	if err := r.take(all, licenceFile, filepath.Join(r.Root, licenceFile)); err != nil {
		return nil, err
	}
	return all, fs.WalkDir(os.DirFS(dir), ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || path.Ext(name) == ".md" { // that is in the site
			return err
		}
		return r.take(all, name, filepath.Join(dir, name))
	})
}

// debian writes the package of an architecture (deb(5)): an archive in the format of ar with two others in it. In its
// version, ~ is before all else, as - is in a release (deb-version(7)).
func (r *Release) debian(arch string, all files) error {
	about, data, of := files{}, files{}, strings.Replace(r.Version[1:], "-", "~", 1)
	r.add(about, "control", 0o644, []byte(strings.NewReplacer("$DEBIAN", of, "$ARCH", arch).Replace(control)))
	for name, file := range all {
		for _, to := range inDebian {
			if strings.HasSuffix(name, to.end) && !file.Mode.IsDir() {
				r.add(data, path.Join(to.dir, cmp.Or(to.name, path.Base(name))), file.Mode, file.Data)
				break
			}
		}
	}
	meta, err := tarball(about)
	content, failed := tarball(data)
	out := bytes.NewBufferString("!<arch>\n")
	for i, part := range [][]byte{[]byte("2.0\n"), meta, content} {
		fmt.Fprintf(out, "%-16s%-12d%-6d%-6d%-8s%-10d`\n%s", []string{"debian-binary", "control.tar.gz", "data.tar.gz"}[i], r.Date.Unix(), 0, 0, "100644", len(part), part)
		if len(part)%2 == 1 {
			out.WriteByte('\n')
		}
	}
	return errors.Join(err, failed, r.write("gbctl_"+r.Version[1:]+"_"+arch+".deb", out.Bytes()))
}
