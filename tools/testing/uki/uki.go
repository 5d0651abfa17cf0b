// Package uki makes unified kernel images for tests, as small as they can be.
package uki

import (
	"bytes"
	"debug/pe"
	"encoding/binary"
	"fmt"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
)

// Places in the header of a kernel (Documentation/arch/x86/boot.rst).
const (
	setupSectors = 0x1f1
	kernelSize   = 0x1f4
	headerMagic  = 0x202
)

// headers is how much of an image comes before its sections, and Kernel and Initramfs are the block lists of theirs.
const (
	headers   = 1024
	Initramfs = "4+1"
	Kernel    = "5+3"
)

// Program is the content of PID 1's program in an image.
func Program(version string) string { return "the program of " + version }

// initramfs has an archive that isn't compressed, and one that is, as that of a machine with microcode.
func initramfs(t *testing.T, version string) string {
	t.Helper()
	file := func(name, content string) string {
		header := fmt.Sprintf("070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x", 0, 0o100755, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name)+1, 0)
		pad := func(s string) string { return s + strings.Repeat("\x00", (4-len(s)%4)%4) }
		return pad(header+name+"\x00") + pad(content)
	}
	end := file("TRAILER!!!", "")
	encoder, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	return file("early", "abc") + end + "\x00\x00\x00\x00" + string(encoder.EncodeAll([]byte(file("dev/null", "")+file("init", Program(version))+end), nil))
}

// Image returns one with its sections (UAPI.5).
func Image(t *testing.T, version, cmdline string) []byte {
	t.Helper()
	kernel := make([]byte, 1024+32)
	kernel[setupSectors], kernel[kernelSize] = 1, 2
	copy(kernel[headerMagic:], "HdrS")
	sections := []struct {
		name    string
		content string
	}{
		{".osrel", "ID=garboard\nVERSION_ID=\"" + version + "\"\n"},
		{".cmdline", cmdline},
		{".initrd", initramfs(t, version)},
		{".linux", string(kernel)},
	}
	var b bytes.Buffer
	put := func(v any) {
		if err := binary.Write(&b, binary.LittleEndian, v); err != nil {
			t.Fatal(err)
		}
	}
	dos := make([]byte, 0x40)
	copy(dos, "MZ")
	dos[0x3c] = 0x40
	put(dos)
	put([]byte("PE\x00\x00"))
	put(pe.FileHeader{Machine: pe.IMAGE_FILE_MACHINE_AMD64, NumberOfSections: uint16(len(sections)), SizeOfOptionalHeader: 240})
	put(pe.OptionalHeader64{Magic: 0x20b, NumberOfRvaAndSizes: 16})
	at := uint32(headers)
	for _, s := range sections {
		h := pe.SectionHeader32{VirtualSize: uint32(len(s.content)), SizeOfRawData: uint32(len(s.content)+511) / 512 * 512, PointerToRawData: at}
		copy(h.Name[:], s.name)
		put(h)
		at += h.SizeOfRawData
	}
	b.Write(make([]byte, headers-b.Len()))
	for _, s := range sections {
		b.WriteString(s.content + strings.Repeat("\x00", (512-len(s.content)%512)%512))
	}
	return b.Bytes()
}
