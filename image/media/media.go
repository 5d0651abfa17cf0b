// Package media makes what a machine boots from: a unified kernel image for UEFI, an image of a CD that also is one of
// a USB stick, one of a disk with the system installed, the files for a boot over the network, and a container image
// with the system. It only puts together what was built: it needs no other program, and runs on any workstation.
//
//	kernel, initramfs, command line ─▶ unified kernel image ─▶ FAT32 with EFI/BOOT/BOOTX64.EFI ─▶ ISO
//
// The medium has the kernel once. UEFI starts the unified kernel image, and GRUB, for a BIOS, takes kernel and
// initramfs out of it.
package media

import (
	"bytes"
	"cmp"
	"context"
	"crypto"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/boot/signed"
	"github.com/garboard-os/garboard/image/initramfs"
	"github.com/garboard-os/garboard/image/loader"
	"github.com/garboard-os/garboard/image/oci"
	"github.com/garboard-os/garboard/image/secureboot"
)

// The kinds of media.
const (
	ISO           = "iso"
	UKI           = "uki"
	PXE           = "pxe"
	InstallerKind = "installer"
	Disk          = "disk"
)

// Kinds are all of them.
var Kinds = []string{ISO, Disk, UKI, PXE, InstallerKind}

// BootFile is where UEFI looks on a medium that isn't in its boot entries (UEFI 2.10, 3.5.1.1).
const BootFile = "/EFI/BOOT/BOOTX64.EFI"

// defaultArgs follow boot.Hardening. The last console is where the kernel writes. A screen is where a person looks, and
// a machine without a screen has a serial line.
const defaultArgs = "console=ttyS0,115200 console=tty0 quiet panic=10"

// maxCmdline is what the kernel takes (COMMAND_LINE_SIZE of x86).
const maxCmdline = 2048

// Options are what a medium is made of.
type Options struct {
	Loader  loader.Loader
	Version string // of Garboard
	Release string // of the kernel
	// Kernel and Initramfs are files.
	Kernel, Initramfs string
	// Microcode is a directory with the microcode of processors, as in /lib/firmware; "": none.
	Microcode string
	// Cmdline is the kernel's command line; "": the usual one. Args are added to it.
	Cmdline string
	Args    []string
	// Modules is the release of the kernel that the modules are for; "": Release.
	Modules string
	// From is the oldest release that can be upgraded to this one, and PodImages are what it runs pods with; "": those
	// of this release.
	From      string
	PodImages []string
	// Key signs the system; nil: a system that is the one of Signed keeps its signature, and others have none.
	Key    crypto.Signer
	Signed signed.Files
	// Secure signs what a machine with UEFI Secure Boot starts; nil: such machines refuse the medium.
	Secure *secureboot.Keys
	// Program is the file of the program in the installer image, and Name the name of that image; "": the usual one.
	Program, Name string
	// Config is a machine configuration, and Images a file with container images; nil and "": none. Only an ISO and a
	// disk can have them.
	Config []byte
	Images string
}

// With are the options of a medium that is made of the same parts, with what other options add. Their version, kernel
// and initramfs, if they have them, are the medium's.
func (o Options) With(other Options) Options {
	o.Version, o.Kernel, o.Initramfs = cmp.Or(other.Version, o.Version), cmp.Or(other.Kernel, o.Kernel), cmp.Or(other.Initramfs, o.Initramfs)
	o.Args, o.Microcode, o.Config, o.Images, o.Name, o.Secure = other.Args, other.Microcode, other.Config, other.Images, other.Name, other.Secure
	return o
}

// Hardening are the kernel arguments that harden each system, without those that args set otherwise.
func Hardening(args ...string) []string { return boot.Yield(boot.Hardening(), args) }

func (o Options) cmdline() string {
	own := strings.Fields(cmp.Or(o.Cmdline, strings.Join(append(boot.Hardening(), defaultArgs), " ")))
	args := append(boot.Yield(own, o.Args), o.Args...)
	if o.Config != nil {
		args = append(args, boot.ISOArgument)
	}
	return strings.Join(args, " ")
}

// Carries reports whether media of a kind can have a configuration and container images.
func Carries(kind string) bool { return kind == ISO || kind == Disk }

// Build makes a medium. It is one file; the files for a boot over the network are in a directory.
func (o Options) Build(ctx context.Context, kind, to string) error {
	if o.Images != "" && !Carries(kind) {
		return fmt.Errorf("a medium of kind %s can't have container images", kind)
	}
	if o.Config != nil && !Carries(kind) {
		return fmt.Errorf("a medium of kind %s can't have a configuration: name its URL instead, with the kernel argument garboard.config=URL", kind)
	}
	switch kind {
	case PXE:
		return o.pxe(to)
	case InstallerKind:
		return o.withDirectory(to, func(dir string) error {
			image, layers := o.installerImage(dir)
			return oci.WriteArchive(ctx, to, image, layers)
		})
	}
	uki, err := o.uki()
	if err != nil {
		return err
	}
	switch kind {
	case UKI:
		return boot.WriteFile(to, uki, 0o644)
	case ISO:
		return o.iso(uki, to)
	case Disk:
		return o.disk(uki, to)
	}
	return fmt.Errorf("kind %q: must be one of %s", kind, strings.Join(Kinds, ", "))
}

func (o Options) uki() ([]byte, error) {
	kernel, err := os.ReadFile(o.Kernel)
	if err != nil {
		return nil, err
	}
	archive, err := o.initramfs()
	if err != nil {
		return nil, err
	}
	sections := []section{
		{name: esp.SectionRelease, content: osRelease(o.Version)},
		{name: esp.SectionUname, content: []byte(o.Release)},
		{name: esp.SectionCmdline, content: []byte(o.cmdline()), room: maxCmdline},
		{name: esp.SectionInitramfs, content: archive},
	}
	linux := section{name: esp.SectionKernel, content: kernel} // the last one: it may be replaced (esp.ReplaceKernel)
	if o.Secure != nil {
		return o.signed(sections, linux)
	}
	return unified(o.Loader.Stub, append(sections, linux))
}

// initramfs begins with the microcode.
func (o Options) initramfs() ([]byte, error) {
	content, err := os.ReadFile(o.Initramfs)
	if err != nil || o.Microcode == "" {
		return content, err
	}
	return initramfs.WithMicrocode(content, o.Microcode)
}

// iso makes the ISO beside its final name, and renames it.
func (o Options) iso(uki []byte, to string) (err error) {
	work, err := os.MkdirTemp(filepath.Dir(to), ".media-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	dir := filepath.Join(work, "files")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	boots := []fatFile{{BootFile, uki}}
	if o.Secure != nil {
		if boots, err = o.enrolling(uki); err != nil {
			return err
		}
	}
	if err := makeFAT(filepath.Join(dir, efiFile), "GARBOARD", boots); err != nil {
		return err
	}
	files, err := o.describe(filepath.Join(dir, efiFile), uki)
	if err != nil {
		return err
	}
	script, err := o.grub(uki)
	if err != nil {
		return err
	}
	files[biosFile], files[strings.TrimPrefix(loader.ConfigFile, "/")] = o.Loader.BIOS, []byte(script)
	label, err := o.added(dir, files)
	if err != nil {
		return err
	}
	made := filepath.Join(work, "iso")
	if err := writeISO(made, dir, label, o.Loader); err != nil {
		return err
	}
	return o.finish(made, to)
}

// maxFile is the largest file of ISO 9660 with one extent, which go-diskfs writes (ECMA-119, 9.1.4), in bytes.
const maxFile = 1<<32 - 1

// added writes these files, the configuration and the container images to a directory, and returns the label of a
// volume with it.
func (o Options) added(dir string, files map[string][]byte) (label string, err error) {
	label = boot.MediumLabel
	if o.Config != nil {
		files[boot.ISOFile], label = o.Config, boot.ISOLabel
		files[boot.ISOSum] = fmt.Appendf(nil, "%x  %s\n", sha256.Sum256(o.Config), boot.ISOFile)
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			return "", err
		}
	}
	if o.Images == "" {
		return label, nil
	}
	if info, err := os.Stat(o.Images); err != nil {
		return "", err
	} else if info.Size() > maxFile {
		return "", fmt.Errorf("%s has %d bytes, and a file on a medium can have %d: put fewer images into it, and serve the others (gbctl images serve, gbctl images push)", o.Images, info.Size(), int64(maxFile))
	}
	bundle, err := os.Create(filepath.Join(dir, boot.BundleFile))
	if err != nil {
		return "", err
	}
	return label, errors.Join(copyFile(o.Images, bundle, 0), bundle.Close())
}

// finish gives a complete file its name.
func (o Options) finish(made, to string) error {
	if o.Config != nil { // it has keys
		if err := os.Chmod(made, 0o600); err != nil {
			return err
		}
	}
	return os.Rename(made, to)
}

func copyFile(from string, to *os.File, at int64) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	_, err = io.Copy(io.NewOffsetWriter(to, at), in)
	return err
}

// grub is the script for a BIOS. It takes kernel and initramfs out of the unified kernel image.
func (o Options) grub(uki []byte) (string, error) {
	image, err := esp.ReadImage(bytes.NewReader(uki), int64(len(uki)))
	if err != nil {
		return "", err
	}
	file := BootFile
	if o.Secure != nil {
		file = mediumSystem
	}
	return fmt.Sprintf(`serial --unit=0 --speed=115200
terminal_output --append serial
loopback efi /%s
loopback uki (efi)%s
echo "Garboard %s: loading the kernel"
linux (uki)%s %s
echo "Garboard %s: loading the system"
initrd (uki)%s
boot
echo "The medium can't be read. The machine restarts in 30 seconds."
sleep 30
reboot
`, efiFile, file, o.Version, image.Kernel, esp.Quoted(o.cmdline()), o.Version, image.Initramfs), nil
}

// describe says where the system is in the file with the EFI partition, for the installation.
func (o Options) describe(file string, uki []byte) (map[string][]byte, error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	at := bytes.Index(content, uki)
	if at < 0 {
		return nil, fmt.Errorf("the system isn't in one piece in %s", efiFile)
	}
	return o.beside(uki, efiFile, at)
}
