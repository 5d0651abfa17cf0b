package esp

import (
	"debug/pe"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
)

// Sections of a unified kernel image (UAPI.5, "Unified Kernel Images").
const (
	SectionRelease   = ".osrel"
	SectionUname     = ".uname"
	SectionCmdline   = ".cmdline"
	SectionInitramfs = ".initrd"
	SectionKernel    = ".linux"
	// What a TPM unseals: the owner's key, and the owner's signature of what is measured (systemd-stub(7)).
	SectionPolicyKey       = ".pcrpkey"
	SectionPolicySignature = ".pcrsig"
)

// Image is a unified kernel image.
type Image struct {
	Version string // of Garboard
	Cmdline string
	// Kernel and Initramfs are where they lie, as block lists of GRUB: first block + count, of 512 bytes (GRUB manual,
	// "How to specify block lists").
	Kernel, Initramfs string
	// Signed: it is signed for Secure Boot, and its command line is the only one.
	Signed bool
	// PolicyKey is the owner's, whose signatures a TPM takes, in PEM; "": the image has none.
	PolicyKey string
}

// InitName is where PID 1's program is in the initramfs.
const InitName = "init"

const (
	block = 512
	// maxText bounds the sections with text.
	maxText = 16 << 10
)

// ReadImage reads what a boot loader needs to know, and refuses an image that isn't whole.
func ReadImage(r io.ReaderAt, size int64) (Image, error) {
	image, err := readImage(r, size)
	if err != nil {
		return Image{}, fmt.Errorf("unified kernel image: %w", err)
	}
	return image, nil
}

func readImage(r io.ReaderAt, size int64) (i Image, err error) {
	file, err := pe.NewFile(io.NewSectionReader(r, 0, size))
	if err != nil {
		return i, err
	}
	for _, s := range file.Sections {
		if int64(s.Offset)+int64(s.Size) > size {
			return i, fmt.Errorf("its section %s ends after the file", s.Name)
		}
	}
	if i.Kernel, err = blocks(file, SectionKernel); err != nil {
		return i, err
	}
	if i.Initramfs, err = blocks(file, SectionInitramfs); err != nil {
		return i, err
	}
	linux := file.Section(SectionKernel)
	if err := wholeKernel(linux, int64(linux.VirtualSize)); err != nil {
		return i, fmt.Errorf("its section %s: %w", SectionKernel, err)
	}
	if file.Section(SectionPolicyKey) != nil {
		if i.PolicyKey, err = text(file, SectionPolicyKey); err != nil {
			return i, err
		}
	}
	release, err := text(file, SectionRelease)
	if err != nil {
		return i, err
	}
	id := ""
	for line := range strings.Lines(release) {
		switch key, value, _ := strings.Cut(strings.TrimSpace(line), "="); key {
		case "ID":
			id = strings.Trim(value, `"`)
		case "VERSION_ID":
			i.Version = strings.Trim(value, `"`)
		}
	}
	if id != "garboard" || i.Version == "" {
		return i, errors.New("it has no ID=garboard with a VERSION_ID")
	}
	if optional, ok := file.OptionalHeader.(*pe.OptionalHeader64); ok {
		i.Signed = optional.DataDirectory[pe.IMAGE_DIRECTORY_ENTRY_SECURITY].Size > 0
	}
	i.Cmdline, err = text(file, SectionCmdline)
	return i, err
}

func blocks(file *pe.File, name string) (string, error) {
	s := file.Section(name)
	if s == nil || s.Offset%block != 0 || s.Size%block != 0 || s.Size == 0 {
		return "", fmt.Errorf("it has no section %s in blocks of %d bytes", name, block)
	}
	return fmt.Sprintf("%d+%d", s.Offset/block, s.Size/block), nil
}

func text(file *pe.File, name string) (string, error) {
	s := file.Section(name)
	if s == nil || s.VirtualSize > maxText || s.VirtualSize > s.Size {
		return "", fmt.Errorf("it has no section %s of at most %d bytes", name, maxText)
	}
	data := make([]byte, s.VirtualSize)
	if _, err := s.ReadAt(data, 0); err != nil {
		return "", err
	}
	return strings.Trim(string(data), "\x00\n "), nil
}

// Fields of the kernel's header (Documentation/arch/x86/boot.rst).
const (
	setupSectors = 0x1f1
	kernelSize   = 0x1f4 // of the part after the setup sectors, in units of 16 bytes
	headerMagic  = 0x202
)

// wholeKernel refuses what is no kernel, or is shorter than its header says.
func wholeKernel(kernel io.ReaderAt, size int64) error {
	header := make([]byte, headerMagic+4)
	if _, err := kernel.ReadAt(header, 0); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if string(header[headerMagic:]) != "HdrS" {
		return errors.New("it is no Linux kernel for x86 (bzImage)")
	}
	want := (int64(header[setupSectors])+1)*block + int64(binary.LittleEndian.Uint32(header[kernelSize:]))*16
	if size < want {
		return fmt.Errorf("the kernel has %d of %d bytes", size, want)
	}
	return nil
}
