// Package media makes what a machine boots from: a unified kernel image for UEFI, an image of a CD that also is one of a USB stick, one of a
// disk with the system installed, the files for a boot over the network, and a container image with the system. It only puts together what was built: it needs no other program, and runs on any workstation.
//
//	kernel, initramfs, command line ─▶ unified kernel image ─▶ FAT32 with EFI/BOOT/BOOTX64.EFI ─▶ ISO
//
// The medium has the kernel once. UEFI starts the unified kernel image, and GRUB, for a BIOS, takes kernel and initramfs out of it.
package media

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/image/initramfs"
	"github.com/garboard-os/garboard/image/loader"
	"github.com/garboard-os/garboard/image/oci"
)

// The kinds of media.
const (
	ISO       = "iso"
	UKI       = "uki"
	PXE       = "pxe"
	Installer = "installer"
	Disk      = "disk"
)

// Kinds are all of them.
var Kinds = []string{ISO, Disk, UKI, PXE, Installer}

// BootFile is where UEFI looks on a medium that isn't in its boot entries (UEFI 2.10, 3.5.1.1).
const BootFile = "/EFI/BOOT/BOOTX64.EFI"

// defaultArgs: the last console is where the kernel writes. A screen is where a person looks, and a machine without a screen has a serial line.
const defaultArgs = "console=ttyS0,115200 console=tty0 quiet panic=10"

// Options are what a medium is made of.
type Options struct {
	Loader  loader.Loader
	Version string // of Garboard
	Release string // of the kernel
	// Kernel and Initramfs are files.
	Kernel, Initramfs string
	// Microcode is a directory with the microcode of processors, as in /lib/firmware; "": none.
	Microcode string
	// Args are added to the kernel's command line.
	Args []string
	// Config is a machine configuration, and Images a file with container images; nil and "": none. Only an ISO can have them.
	Config []byte
	Images string
}

func (o Options) cmdline() string {
	args := append([]string{defaultArgs}, o.Args...)
	if o.Config != nil {
		args = append(args, boot.ISOArgument)
	}
	return strings.Join(args, " ")
}

// Build makes a medium. It is one file; the files for a boot over the network are in a directory.
func (o Options) Build(ctx context.Context, kind, to string) error {
	if o.Images != "" && kind != ISO {
		return fmt.Errorf("a medium of kind %s can't have container images", kind)
	}
	if o.Config != nil && kind != ISO {
		return fmt.Errorf("a medium of kind %s can't have a configuration: name its URL instead, with the kernel argument garboard.config=URL", kind)
	}
	if kind == PXE {
		return o.pxe(to)
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
	case Installer:
		return o.installer(ctx, uki, to)
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
	return unified(o.Loader.Stub, []section{
		{esp.SectionRelease, osRelease(o.Version)},
		{esp.SectionUname, []byte(o.Release)},
		{esp.SectionCmdline, []byte(o.cmdline())},
		{esp.SectionInitramfs, archive},
		{esp.SectionKernel, kernel},
	})
}

// initramfs begins with the microcode.
func (o Options) initramfs() ([]byte, error) {
	content, err := os.ReadFile(o.Initramfs)
	if err != nil || o.Microcode == "" {
		return content, err
	}
	microcode, err := initramfs.Microcode(o.Microcode)
	return append(microcode, content...), err
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
	if err := makeFAT(filepath.Join(dir, efiFile), "GARBOARD", []fatFile{{BootFile, uki}}); err != nil {
		return err
	}
	described, err := o.describe(filepath.Join(dir, efiFile), uki)
	if err != nil {
		return err
	}
	script, err := o.grub(uki)
	if err != nil {
		return err
	}
	files := map[string][]byte{biosFile: o.Loader.BIOS, esp.MediumFile: described, strings.TrimPrefix(loader.ConfigFile, "/"): []byte(script)}
	label := boot.MediumLabel
	if o.Config != nil {
		files[boot.ISOFile], label = o.Config, boot.ISOLabel
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o644); err != nil {
			return err
		}
	}
	if o.Images != "" {
		if err := copyFile(o.Images, filepath.Join(dir, boot.BundleFile)); err != nil {
			return err
		}
	}
	made := filepath.Join(work, "iso")
	if err := writeISO(made, dir, label, o.Loader); err != nil {
		return err
	}
	if o.Config != nil { // it has keys
		if err := os.Chmod(made, 0o600); err != nil {
			return err
		}
	}
	return os.Rename(made, to)
}

func copyFile(from, to string) (err error) {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	_, err = io.Copy(out, in)
	return err
}

// grub is the script for a BIOS. It takes kernel and initramfs out of the unified kernel image.
func (o Options) grub(uki []byte) (string, error) {
	image, err := esp.ReadImage(bytes.NewReader(uki), int64(len(uki)))
	if err != nil {
		return "", err
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
`, efiFile, BootFile, o.Version, image.Kernel, esp.Quoted(o.cmdline()), o.Version, image.Initramfs), nil
}

// describe says where the system is in the file with the EFI partition, for the installation.
func (o Options) describe(file string, uki []byte) ([]byte, error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	at := bytes.Index(content, uki)
	if at < 0 {
		return nil, fmt.Errorf("%s isn't in one piece in %s", BootFile, efiFile)
	}
	return o.description(uki, efiFile, at)
}

func (o Options) description(uki []byte, file string, at int) ([]byte, error) {
	sum := sha256.Sum256(uki)
	return json.Marshal(esp.Medium{Version: o.Version, File: file, Offset: int64(at), Size: int64(len(uki)), SHA256: hex.EncodeToString(sum[:]), From: boot.UpgradesFrom})
}

// InstallerImage is the name of the installer image of a release.
func InstallerImage(version string) string {
	return "ghcr.io/garboard-os/installer:" + strings.ReplaceAll(version, "+", "-")
}

// installer makes an image for a registry, from which machines install and upgrade themselves.
func (o Options) installer(ctx context.Context, uki []byte, to string) error {
	files, err := o.installerFiles(uki)
	if err != nil {
		return err
	}
	return oci.WriteArchive(ctx, to, InstallerImage(o.Version), files)
}

// InstallerLayout writes the same image to a directory, in the OCI image layout.
func (o Options) InstallerLayout(ctx context.Context, dir string) error {
	uki, err := o.uki()
	if err != nil {
		return err
	}
	files, err := o.installerFiles(uki)
	if err != nil {
		return err
	}
	return oci.WriteLayout(ctx, dir, InstallerImage(o.Version), files)
}

func (o Options) installerFiles(uki []byte) (map[string][]byte, error) {
	described, err := o.description(uki, UKIFile, 0)
	return map[string][]byte{path.Join(esp.InstallDir, UKIFile): uki, path.Join(esp.InstallDir, esp.MediumFile): described}, err
}
