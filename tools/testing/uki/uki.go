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
	version      = 0x20e // where the version is, 512 bytes further
)

// headers is how much of an image comes before its sections, and Kernel and Initramfs are the block lists of theirs.
const (
	headers   = 1024
	Initramfs = "5+1"
	Kernel    = "6+3"
)

// Release is that of the kernel in an image.
const Release = "6.12.0-test"

// Linux has the header of a kernel, and its release: one setup sector, and 32 bytes after it.
func Linux(release string) []byte {
	kernel := make([]byte, 1024+32)
	kernel[setupSectors], kernel[kernelSize] = 1, 2
	copy(kernel[headerMagic:], "HdrS")
	const at = 0x1e0
	binary.LittleEndian.PutUint16(kernel[version:], at)
	copy(kernel[512+at:], release+" (somebody) #1")
	return kernel
}

// Stub is a program for UEFI with one section, and headers of a size.
func Stub(t *testing.T, headers uint32) []byte {
	t.Helper()
	b := start(t, 1, headers)
	text := pe.SectionHeader32{VirtualSize: 100, VirtualAddress: 4096, SizeOfRawData: 512, PointerToRawData: headers}
	copy(text.Name[:], ".text")
	put(t, b, text)
	b.Write(make([]byte, int(headers)+512-b.Len()))
	return b.Bytes()
}

// start is what comes before the headers of the sections.
func start(t *testing.T, sections uint16, headers uint32) *bytes.Buffer {
	t.Helper()
	var b bytes.Buffer
	dos := make([]byte, 0x40)
	copy(dos, "MZ")
	dos[0x3c] = 0x40
	put(t, &b, dos)
	put(t, &b, []byte("PE\x00\x00"))
	put(t, &b, pe.FileHeader{Machine: pe.IMAGE_FILE_MACHINE_AMD64, NumberOfSections: sections, SizeOfOptionalHeader: 240})
	put(t, &b, pe.OptionalHeader64{Magic: 0x20b, SectionAlignment: 4096, FileAlignment: 512, SizeOfHeaders: headers, NumberOfRvaAndSizes: 16})
	return &b
}

func put(t *testing.T, b *bytes.Buffer, v any) {
	t.Helper()
	if err := binary.Write(b, binary.LittleEndian, v); err != nil {
		t.Fatal(err)
	}
}

// Program is the content of PID 1's program in an image.
func Program(version string) string { return "the program of " + version }

// initramfs has an archive that isn't compressed, and one that is, as that of a machine with microcode.
func initramfs(t *testing.T, program string) string {
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
	return file("early", "abc") + end + "\x00\x00\x00\x00" + string(encoder.EncodeAll([]byte(file("dev/null", "")+file("init", program)+end), nil))
}

// Image returns one with its sections (UAPI.5).
func Image(t *testing.T, version, cmdline string) []byte {
	t.Helper()
	return ImageOf(t, version, cmdline, Program(version))
}

// ImageOf returns one with this program of PID 1.
func ImageOf(t *testing.T, version, cmdline, program string) []byte {
	t.Helper()
	sections := []struct {
		name    string
		content string
	}{
		{".osrel", "ID=garboard\nVERSION_ID=\"" + version + "\"\n"},
		{".uname", Release},
		{".cmdline", cmdline},
		{".initrd", initramfs(t, program)},
		{".linux", string(Linux(Release))},
	}
	b := start(t, uint16(len(sections)), headers)
	at := uint32(headers)
	for _, s := range sections {
		h := pe.SectionHeader32{VirtualSize: uint32(len(s.content)), VirtualAddress: at * 8, SizeOfRawData: uint32(len(s.content)+511) / 512 * 512, PointerToRawData: at}
		copy(h.Name[:], s.name)
		put(t, b, h)
		at += h.SizeOfRawData
	}
	b.Write(make([]byte, headers-b.Len()))
	for _, s := range sections {
		b.WriteString(s.content + strings.Repeat("\x00", (512-len(s.content)%512)%512))
	}
	return b.Bytes()
}
