package media

import (
	"bytes"
	"debug/pe"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/esp"
)

// Names of the files for a boot over the network.
const (
	KernelFile    = esp.KernelFile
	InitramfsFile = "initramfs"
	UKIFile       = "garboard.efi"
	ScriptFile    = "boot.ipxe"
	// IPXEFile is what a BIOS loads first, unless its network card has iPXE already.
	IPXEFile = "undionly.kpxe"
)

// NetworkFiles are what a server of boot files has, by name: iPXE takes kernel and initramfs, and UEFI takes the
// unified kernel image.
type NetworkFiles map[string][]byte

// NetworkFiles makes them.
func (o Options) NetworkFiles() (NetworkFiles, error) {
	uki, err := o.uki()
	if err != nil {
		return nil, err
	}
	files := NetworkFiles{UKIFile: uki, ScriptFile: script(o.cmdline()), IPXEFile: o.Loader.IPXE}
	if files[InitramfsFile], err = o.initramfs(); err == nil {
		files[KernelFile], err = os.ReadFile(o.Kernel)
	}
	return files, err
}

// ReadNetworkFiles reads the files that Build has written.
func ReadNetworkFiles(dir string) (NetworkFiles, error) {
	files := NetworkFiles{}
	for _, name := range []string{KernelFile, InitramfsFile, UKIFile, ScriptFile, IPXEFile} {
		content, err := os.ReadFile(filepath.Join(dir, name))
		if errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("%w; make the files with 'gbctl media build pxe -O %s'", err, dir)
		}
		if err != nil {
			return nil, err
		}
		files[name] = content
	}
	return files, nil
}

// AddArgs adds arguments to the kernel's command line, in the unified kernel image and in the script for iPXE.
func (f NetworkFiles) AddArgs(args ...string) error {
	uki := f[UKIFile]
	file, err := pe.NewFile(bytes.NewReader(uki))
	if err != nil {
		return fmt.Errorf("%s: %w", UKIFile, err)
	}
	if image, err := esp.ReadImage(bytes.NewReader(uki), int64(len(uki))); err == nil && image.Signed && len(args) > 0 {
		return fmt.Errorf("%s is signed for Secure Boot, and its command line can't change: add the arguments where it is made (--extra-kernel-arg)", UKIFile)
	}
	at, section := 0, (*pe.Section)(nil)
	for i, s := range file.Sections {
		if s.Name == esp.SectionCmdline {
			at, section = i, s
		}
	}
	if section == nil || section.VirtualSize > section.Size {
		return fmt.Errorf("%s: it has no command line", UKIFile)
	}
	old, err := section.Data()
	if err != nil {
		return fmt.Errorf("%s: %w", UKIFile, err)
	}
	cmdline := strings.Join(append(boot.Yield(strings.Fields(string(old[:section.VirtualSize])), args), args...), " ")
	if len(cmdline) > int(section.Size) {
		return fmt.Errorf("%s has room for a command line of %d characters, and this one has %d: %s", UKIFile, section.Size, len(cmdline), cmdline)
	}
	uki = bytes.Clone(uki)
	copy(uki[section.Offset:], cmdline)
	header := int(binary.LittleEndian.Uint32(uki[peOffset:])) + signatureSize + binary.Size(file.FileHeader) +
		int(file.SizeOfOptionalHeader) + at*sectionHeaderSize
	binary.LittleEndian.PutUint32(uki[header+virtualSizeField:], uint32(len(cmdline)))
	f[UKIFile], f[ScriptFile] = uki, script(cmdline)
	return nil
}

// Offsets in a PE file (PE format, "Signature" and "Section Table").
const (
	peOffset         = 0x3c
	virtualSizeField = 8
)

// forIPXE are the variables in the URL of a configuration, as iPXE must fill them in: a serial number may have
// characters that a URL can't have, and the hardware address is that of the network card that boots
// (https://ipxe.org/cfg).
var forIPXE = strings.NewReplacer("${serial}", "${serial:uristring}", "${mac}", "${netX/mac}")

func script(cmdline string) []byte {
	return fmt.Appendf(nil, "#!ipxe\nkernel %s %s initrd=%s\ninitrd %s\nboot\n", KernelFile, forIPXE.Replace(cmdline), InitramfsFile, InitramfsFile)
}

// pxe writes the files into a directory.
func (o Options) pxe(to string) error {
	files, err := o.NetworkFiles()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	beside, err := o.beside(files[UKIFile], UKIFile, 0)
	if err != nil {
		return err
	}
	maps.Copy(files, beside)
	for name, content := range files {
		if err := boot.WriteFile(filepath.Join(to, name), content, 0o644); err != nil {
			return err
		}
	}
	return nil
}
