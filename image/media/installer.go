package media

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"debug/pe"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/boot/signed"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/image/loader"
	"github.com/garboard-os/garboard/image/oci"
	"github.com/garboard-os/garboard/image/release"
)

// An installer directory has all that a system of Garboard is made of. It is /usr/install of an installer image:
//
//	garboard.efi, garboard.json   the system, and what it is: what a machine installs
//	release.json, release.sig     what its maker has signed of that (package boot/signed), if anybody has
//	vmlinuz                       the kernel in it, or another one that is to replace it
//	loader/                       boot loaders, for media
//	installer                     the program that customizes the image when another one is built from it
const (
	loaderDir   = "loader"
	ProgramFile = "installer"
)

// Directory writes an installer directory, which exists.
func (o Options) Directory(dir string) error {
	uki, err := o.uki()
	if err != nil {
		return err
	}
	linux, err := os.ReadFile(o.Kernel)
	if err != nil {
		return err
	}
	files, err := o.beside(uki, UKIFile, 0)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(dir, loaderDir), 0o755); err != nil {
		return err
	}
	if to := filepath.Join(dir, loaderDir); to != o.Loader.Disk {
		if err := o.Loader.Save(to); err != nil {
			return err
		}
	}
	if o.Secure != nil {
		loader, err := o.systemdBoot()
		if err != nil {
			return err
		}
		if err := put(filepath.Join(dir, loaderDir, esp.SystemdBoot), loader); err != nil {
			return err
		}
	}
	// of another system
	was := []error{os.Remove(filepath.Join(dir, signed.StatementFile)), os.Remove(filepath.Join(dir, signed.SignatureFile))}
	if err := errors.Join(boot.IgnoreMissing(was[0]), boot.IgnoreMissing(was[1])); err != nil {
		return err
	}
	files[UKIFile], files[KernelFile] = uki, linux
	for name, content := range files {
		if err := put(filepath.Join(dir, name), content); err != nil {
			return err
		}
	}
	return nil
}

// put writes a file, unless it has this content: in an image, what isn't written costs nothing.
func put(file string, content []byte) error {
	if old, err := os.ReadFile(file); err == nil && bytes.Equal(old, content) {
		return nil
	}
	return boot.WriteFile(file, content, 0o644)
}

// System is what a unified kernel image has.
type System struct {
	Version, Release, Cmdline string
	Kernel, Initramfs         []byte
	Secure                    bool // it is signed for Secure Boot
}

// ReadSystem takes a unified kernel image apart.
func ReadSystem(uki []byte) (s System, err error) {
	image, err := esp.ReadImage(bytes.NewReader(uki), int64(len(uki)))
	if err != nil {
		return s, err
	}
	file, err := pe.NewFile(bytes.NewReader(uki))
	if err != nil {
		return s, err
	}
	part := func(name string) []byte {
		if section := file.Section(name); section != nil && err == nil && section.VirtualSize <= section.Size {
			return uki[section.Offset:][:section.VirtualSize]
		}
		err = errors.Join(err, fmt.Errorf("unified kernel image: it has no whole section %s", name))
		return nil
	}
	s = System{Version: image.Version, Release: string(part(esp.SectionUname)), Cmdline: image.Cmdline, Kernel: part(esp.SectionKernel), Initramfs: part(esp.SectionInitramfs), Secure: image.Signed}
	return s, err
}

// Installer is an installer directory that was read.
type Installer struct {
	System
	esp.Medium
	Signed signed.Files
	// Replacement is the kernel that is to be the system's; nil: the one that it has.
	Replacement []byte
}

// ReadInstaller reads an installer directory, and refuses one that is damaged.
func ReadInstaller(dir string) (i Installer, err error) {
	if i.Signed, err = signed.Read(os.DirFS(dir)); err == nil {
		err = json.Unmarshal(i.Signed.Described, &i.Medium)
	}
	if err != nil {
		return i, fmt.Errorf("%w: it is no installer image of Garboard", err)
	}
	uki, err := os.ReadFile(filepath.Join(dir, UKIFile))
	if err != nil {
		return i, err
	}
	if sum := hash(uki); sum != i.SHA256 {
		return i, fmt.Errorf("%s has the SHA-256 %.16s…, and should have %.16s…", UKIFile, sum, i.SHA256)
	}
	if i.System, err = ReadSystem(uki); err != nil {
		return i, err
	}
	linux, err := os.ReadFile(filepath.Join(dir, KernelFile))
	if err != nil || hash(linux) == i.Medium.Kernel {
		return i, err
	}
	i.Replacement = linux
	return i, nil
}

// Options are those of media with the system. Kernel and initramfs are written to a directory, work.
func (i Installer) Options(dir, work string) (o Options, err error) {
	if i.Replacement != nil {
		return o, errors.New("the kernel in it is to be replaced first")
	}
	o = Options{
		Version: i.System.Version, Release: i.Release, Cmdline: i.Cmdline, Modules: i.Modules, From: i.From, PodImages: i.Images, Signed: i.Signed, Program: filepath.Join(dir, ProgramFile),
		Kernel: filepath.Join(work, KernelFile), Initramfs: filepath.Join(work, InitramfsFile),
	}
	if o.Loader, err = loader.Open(filepath.Join(dir, loaderDir)); err != nil {
		return o, err
	}
	return o, errors.Join(os.WriteFile(o.Kernel, i.System.Kernel, 0o644), os.WriteFile(o.Initramfs, i.Initramfs, 0o644))
}

func hash(content []byte) string {
	sum := sha256.Sum256(content)
	return hex.EncodeToString(sum[:])
}

// beside are the files that lie beside a system: what it is and where, and whose.
func (o Options) beside(uki []byte, file string, at int) (map[string][]byte, error) {
	m, err := o.description(uki, file, at)
	if err != nil {
		return nil, err
	}
	described, err := json.Marshal(m)
	if err != nil {
		return nil, err
	}
	files, s, was := map[string][]byte{esp.MediumFile: described}, o.Signed, esp.Medium{}
	if o.Key != nil {
		if s, err = release.Sign(o.Key, m, bytes.NewReader(uki)); err != nil {
			return nil, fmt.Errorf("sign the system: %w", err)
		}
	}
	if json.Unmarshal(s.Statement, &was) == nil && was.SHA256 == m.SHA256 && s.Signature != nil {
		files[signed.StatementFile], files[signed.SignatureFile] = s.Statement, s.Signature
	}
	return files, nil
}

func (o Options) description(uki []byte, file string, at int) (m esp.Medium, err error) {
	linux, err := os.ReadFile(o.Kernel)
	if err != nil {
		return m, err
	}
	archive, err := o.initramfs()
	if err != nil {
		return m, err
	}
	images := o.PodImages
	if o.From == "" {
		images = []string{config.DefaultPauseImage}
	}
	return esp.Medium{
		Version: o.Version, File: file, Offset: int64(at), Size: int64(len(uki)), SHA256: hash(uki), From: cmp.Or(o.From, boot.UpgradesFrom), Kernel: hash(linux), Modules: cmp.Or(o.Modules, o.Release),
		Archive: hash(archive), Images: images,
	}, nil
}

// InstallerImage is the name of the installer image of a release: all builds of the release have the same.
func InstallerImage(version string) string {
	return "ghcr.io/garboard-os/installer:" + boot.Release(version)
}

// onBuild are the instructions that a builder of container images runs after FROM with an installer image (Dockerfile
// reference, "ONBUILD").
var onBuild = []string{
	"ARG RM",
	"COPY --from=customization / /customization/",
	`RUN ["/` + esp.InstallDir + "/" + ProgramFile + `", "/customization"]`,
}

// installerImage is the image with the files of an installer directory. The program comes in a layer of its own: it
// changes rarely.
func (o Options) installerImage(dir string) (oci.Image, map[string]map[string]string) {
	in := func(names ...string) map[string]string {
		files := map[string]string{}
		for _, n := range names {
			files[esp.InstallDir+"/"+n] = filepath.Join(dir, n)
		}
		return files
	}
	image := oci.Image{Ref: cmp.Or(o.Name, InstallerImage(o.Version)), Layers: []string{"tools", "system"}, OnBuild: onBuild, Gzip: true}
	image.Labels = map[string]string{esp.InstallerLabel: o.Version}
	system := in(UKIFile, esp.MediumFile, KernelFile, signed.StatementFile, signed.SignatureFile)
	// it may have no signature
	maps.DeleteFunc(system, func(_, file string) bool { _, err := os.Stat(file); return err != nil })
	return image, map[string]map[string]string{"tools": in(loaderDir, ProgramFile), "system": system}
}

// InstallerLayout writes the image to a directory, in the OCI image layout.
func (o Options) InstallerLayout(ctx context.Context, to string) error {
	return o.withDirectory(to, func(dir string) error {
		image, layers := o.installerImage(dir)
		return oci.WriteLayout(ctx, to, image, layers)
	})
}

// withDirectory calls use with an installer directory, which is beside to for that time.
func (o Options) withDirectory(to string, use func(dir string) error) (err error) {
	dir, err := os.MkdirTemp(filepath.Dir(to), ".installer-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := o.Directory(dir); err != nil {
		return err
	}
	program, err := os.ReadFile(o.Program)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, ProgramFile), program, 0o755)
	}
	if err != nil {
		return err
	}
	return use(dir)
}
