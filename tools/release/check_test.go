package release

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"

	backend "github.com/diskfs/go-diskfs/backend/file"
	"github.com/diskfs/go-diskfs/filesystem/iso9660"
	"github.com/klauspost/compress/zstd"

	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/boot/signed"
	"github.com/garboard-os/garboard/image/sbom"
	"github.com/garboard-os/garboard/qemu/network/registry"
)

// A checked release is looked at from its files alone.
type checked struct {
	dir  string
	sums map[string]string // by file
	// name is what gbctl calls its version.
	name string
	say  func(...any)
}

// check verifies the release in a directory, and reports all that is wrong at once. keys are the public ones of its
// maker, as PEM; "": those of the release, which prove only that the files belong together.
func check(ctx context.Context, dir, keys string, say func(...any)) error {
	c := &checked{dir: dir, sums: map[string]string{}, say: say}
	var errs []error
	for _, check := range []struct {
		what string
		run  func() error
	}{
		{"the signature", func() error { return c.signature(keys) }},
		{"the sums", c.verifySums},
		{"the files", c.files},
		{"gbctl", func() error { return c.client(ctx) }},
		{"the packages of Debian", func() error { return c.packages(ctx) }},
		{"the formula", c.formula},
	} {
		if err := check.run(); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", check.what, err))
			continue
		}
		say(check.what + ": right")
	}
	return errors.Join(errs...)
}

func (c *checked) path(name string) string { return filepath.Join(c.dir, name) }

func (c *checked) signature(keys string) error {
	if keys == "" {
		text, err := os.ReadFile(c.path(keyFile))
		if err != nil {
			return err
		}
		c.say("no key was given: with the one in the release, the signature doesn't prove who made it")
		keys = string(text)
	}
	trusted, err := signed.Keys([]byte(keys))
	if err != nil {
		return err
	}
	sums, err := os.ReadFile(c.path(sumsFile))
	if err != nil {
		return err
	}
	signature, err := os.ReadFile(c.path(signatureFile))
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(trusted, func(key ed25519.PublicKey) bool { return ed25519.Verify(key, sums, signature) }) {
		return fmt.Errorf("%s isn't signed by one of the %d keys, or was changed since", sumsFile, len(trusted))
	}
	return nil
}

// verifySums compares the files with the sums, and the list of both.
func (c *checked) verifySums() error {
	text, err := os.ReadFile(c.path(sumsFile))
	if err != nil {
		return err
	}
	var errs []error
	for line := range strings.Lines(string(text)) {
		want, name, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "  ")
		if name == "" || filepath.Base(name) != name {
			errs = append(errs, fmt.Errorf("%s: no line of sha256sum: %q", sumsFile, line))
			continue
		}
		c.sums[name] = want
		if got, err := sumOf(c.path(name)); err != nil || got != want {
			errs = append(errs, errors.Join(err, fmt.Errorf("%s differs from its sum", name)))
		}
	}
	found, err := os.ReadDir(c.dir)
	for _, f := range found {
		if c.sums[f.Name()] == "" && f.Name() != sumsFile && f.Name() != signatureFile {
			errs = append(errs, fmt.Errorf("%s has no sum", f.Name()))
		}
	}
	return errors.Join(append(errs, err)...)
}

// opener opens a file of a release, by the end of its name, and reads all of it.
type opener struct {
	end  string
	open func(path string) error
}

var openers = []opener{
	{"_images.tar", layout}, {"_installer.tar", layout}, {".tar", readTar},
	{".tar.gz", func(path string) error { return unpack(path, func(string, io.Reader) error { return nil }) }},
	{".zip", readZip}, {".iso", readISO}, {".raw.zst", readDisk}, {".spdx.json", readList},
	{".deb", nothing}, {".rb", nothing}, {".md", nothing}, {".pub", nothing}, // others look at them, or people
}

func nothing(string) error { return nil }

// missing are the ends of the names of files that a whole release has, and this one doesn't (docs/releasing.md).
func missing(dir string) (missing []string, err error) {
	ends := []string{
		"_amd64.deb", "_arm64.deb", "gbctl.rb", "_amd64.iso", "_amd64.raw.zst", "_amd64_netboot.tar", "_amd64_installer.tar", "_amd64_images.tar",
		"_amd64_system.spdx.json", "_amd64_images.spdx.json", "_docs.tar.gz", "CHANGELOG.md", "release.pub", sumsFile, signatureFile,
	}
	for _, platform := range Platforms {
		ends = append(ends, strings.Join(platform[:], "_")+map[bool]string{true: ".zip", false: ".tar.gz"}[platform[0] == "windows"])
	}
	found, err := os.ReadDir(dir)
	for _, end := range ends {
		if !slices.ContainsFunc(found, func(f fs.DirEntry) bool { return strings.HasSuffix(f.Name(), end) }) {
			missing = append(missing, end)
		}
	}
	return missing, err
}

func (c *checked) files() (err error) {
	for name := range c.sums {
		i := slices.IndexFunc(openers, func(o opener) bool { return strings.HasSuffix(name, o.end) })
		if i < 0 {
			err = errors.Join(err, fmt.Errorf("%s is of no kind that a release has", name))
		} else if bad := openers[i].open(c.path(name)); bad != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", name, bad))
		}
	}
	return err
}

func layout(path string) error {
	archive, err := registry.OpenArchive(path)
	if err != nil {
		return err
	}
	return errors.Join(registry.Check(archive), archive.Close())
}

func readTar(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return eachOf(f, func(string, io.Reader) error { return nil })
}

// unpack calls each for all files of a compressed archive.
func unpack(path string, each func(name string, content io.Reader) error) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	packed, err := gzip.NewReader(f)
	if err != nil {
		return err
	}
	return eachOf(packed, each)
}

func eachOf(archive io.Reader, each func(name string, content io.Reader) error) error {
	for r, n := tar.NewReader(archive), 0; ; n++ {
		h, err := r.Next()
		if errors.Is(err, io.EOF) && n > 0 {
			_, err = io.Copy(io.Discard, archive) // the checksum of gzip is at its end
			return err
		}
		if err == nil {
			err = each(h.Name, r)
		}
		if err != nil {
			return err
		}
	}
}

func readZip(path string) error {
	all, err := zip.OpenReader(path)
	if err != nil {
		return err
	}
	defer all.Close()
	for _, f := range all.File {
		r, err := f.Open()
		if err == nil {
			_, err = io.Copy(io.Discard, r) // it compares the checksum
			err = errors.Join(err, r.Close())
		}
		if err != nil {
			return fmt.Errorf("%s: %w", f.Name, err)
		}
	}
	return nil
}

func readISO(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	image, err := iso9660.Read(backend.New(f, true), 0, 0, 2048)
	if err != nil {
		return err
	}
	text, err := image.ReadFile(esp.MediumFile)
	if err != nil {
		return err
	}
	return json.Unmarshal(text, &esp.Medium{})
}

// readDisk uncompresses the image of a disk, which has a partition table (UEFI 2.10, 5.3.2).
func readDisk(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	disk, err := zstd.NewReader(f)
	if err != nil {
		return err
	}
	defer disk.Close()
	begin := make([]byte, 1024)
	if _, err := io.ReadFull(disk, begin); err != nil {
		return err
	}
	if !bytes.HasPrefix(begin[512:], []byte("EFI PART")) {
		return errors.New("it has no partition table")
	}
	_, err = io.Copy(io.Discard, disk) // the checksum is at the end
	return err
}

func readList(path string) error {
	text, err := os.ReadFile(path)
	if err == nil {
		_, err = sbom.Read(text)
	}
	return err
}

// client runs the gbctl that is for this machine.
func (c *checked) client(ctx context.Context) error {
	own := fmt.Sprintf("_%s_%s.tar.gz", runtime.GOOS, runtime.GOARCH)
	for name := range c.sums {
		release, ok := strings.CutSuffix(strings.TrimPrefix(name, "gbctl_"), own)
		if !ok {
			continue
		}
		return inTemp(func(dir string) error {
			program := filepath.Join(dir, "gbctl")
			err := unpack(c.path(name), func(name string, content io.Reader) error {
				if name != "gbctl" {
					return nil
				}
				f, err := os.OpenFile(program, os.O_WRONLY|os.O_CREATE, 0o700)
				if err != nil {
					return err
				}
				_, err = io.Copy(f, content)
				return errors.Join(err, f.Close())
			})
			if err != nil {
				return err
			}
			c.name, err = versionOf(ctx, program, release)
			c.say("gbctl is " + c.name)
			return err
		})
	}
	return fmt.Errorf("none is for %s/%s", runtime.GOOS, runtime.GOARCH)
}

// versionOf is what a gbctl says that it is, which must be of a release.
func versionOf(ctx context.Context, program, release string) (string, error) {
	out, err := exec.CommandContext(ctx, program, "version", "--client").CombinedOutput()
	name := regexp.MustCompile(regexp.QuoteMeta(release) + `\+\d{8}\.[0-9a-f]+(\S*)`).FindStringSubmatch(string(out))
	if err != nil || name == nil || name[1] != "" {
		return "", errors.Join(err, fmt.Errorf("it says that it is %q, which is no build of %s", out, release))
	}
	return name[0], nil
}

// packages installs those of Debian into a directory, by its own program.
func (c *checked) packages(ctx context.Context) error {
	if _, err := exec.LookPath("dpkg-deb"); err != nil {
		c.say("not checked, without dpkg-deb: the packages of Debian")
		return nil
	}
	found, err := filepath.Glob(c.path("gbctl_*.deb"))
	if err == nil && len(found) == 0 {
		err = fs.ErrNotExist
	}
	for _, path := range found {
		err = errors.Join(err, inTemp(func(dir string) error {
			for _, args := range [][]string{{"-I", path}, {"-c", path}, {"-x", path, dir}} {
				if text, err := exec.CommandContext(ctx, "dpkg-deb", args...).CombinedOutput(); err != nil {
					return fmt.Errorf("dpkg-deb %s: %w: %s", strings.Join(args, " "), err, text)
				}
			}
			if !strings.HasSuffix(path, "_"+runtime.GOARCH+".deb") || c.name == "" {
				return nil
			}
			_, err := versionOf(ctx, filepath.Join(dir, "usr/bin", "gbctl"), strings.SplitN(c.name, "+", 2)[0])
			return err
		}))
	}
	return err
}

var bottled = regexp.MustCompile(`url ".*/([^/"]+)"\n\s*sha256 "([^"]*)"`)

func (c *checked) formula() error {
	text, err := os.ReadFile(c.path("gbctl.rb"))
	if err != nil {
		return err
	}
	files := bottled.FindAllStringSubmatch(string(text), -1)
	if len(files) == 0 {
		return errors.New("it names no file")
	}
	for _, m := range files {
		if m[2] == "" || c.sums[m[1]] != m[2] {
			err = errors.Join(err, fmt.Errorf("it has another sum of %s", m[1]))
		}
	}
	return err
}

func sumOf(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	sum := sha256.New()
	_, err = io.Copy(sum, f)
	return fmt.Sprintf("%x", sum.Sum(nil)), err
}

func inTemp(run func(dir string) error) error {
	dir, err := os.MkdirTemp("", "garboard-release-*")
	if err != nil {
		return err
	}
	return errors.Join(run(dir), os.RemoveAll(dir))
}
