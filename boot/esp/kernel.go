package esp

import (
	"bytes"
	"debug/pe"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
)

// versionPointer is where the kernel's version is, 512 bytes further (Documentation/arch/x86/boot.rst).
const versionPointer = 0x20e

// maxRelease is the size of the name in uname(2), in bytes.
const maxRelease = 64

// Release is what uname -r prints when a kernel runs.
func Release(kernel []byte) (string, error) {
	if err := wholeKernel(bytes.NewReader(kernel), int64(len(kernel))); err != nil {
		return "", err
	}
	if len(kernel) < versionPointer+2 {
		return "", errors.New("the kernel is cut off")
	}
	at := block + int(binary.LittleEndian.Uint16(kernel[versionPointer:]))
	if at >= len(kernel) {
		return "", errors.New("the kernel is cut off")
	}
	text, _, _ := bytes.Cut(kernel[at:], []byte{0})
	release, _, ok := strings.Cut(string(text), " ")
	if !ok || release == "" || len(release) > maxRelease {
		return "", errors.New("the kernel doesn't say its version")
	}
	return release, nil
}

// Offsets in a PE file (PE format, "Signature", "Optional Header" and "Section Table").
const (
	peOffset         = 0x3c
	signatureSize    = 4
	optionalImage    = 56 // size of the image in memory
	sectionHeader    = 40
	virtualSizeField = 8
	rawSizeField     = 16

	// maxHeaders bounds what is read of an image that may be anything, in bytes.
	maxHeaders = 1 << 20
	minHeaders = peOffset + 4
)

// ReplaceKernel is a unified kernel image with another kernel. Its other parts are read from the image.
func ReplaceKernel(image io.ReaderAt, size int64, kernel []byte) (*io.SectionReader, error) {
	file, err := pe.NewFile(io.NewSectionReader(image, 0, size))
	if err != nil {
		return nil, err
	}
	optional, ok := file.OptionalHeader.(*pe.OptionalHeader64)
	uname, linux := file.Section(SectionUname), file.Section(SectionKernel)
	if !ok || uname == nil || linux == nil || linux != file.Sections[len(file.Sections)-1] || int64(linux.Offset)+int64(linux.Size) != size {
		return nil, errors.New("unified kernel image: its last section isn't the kernel")
	}
	if optional.FileAlignment == 0 || optional.SectionAlignment == 0 || optional.SizeOfHeaders > maxHeaders || optional.SizeOfHeaders < minHeaders || uname.Offset < optional.SizeOfHeaders ||
		uint64(uname.Offset)+uint64(uname.Size) > uint64(linux.Offset) || uname.Size > maxText {
		return nil, errors.New("unified kernel image: its sections aren't in order")
	}
	release, err := Release(kernel)
	if err != nil {
		return nil, err
	}
	if len(release) > int(uname.Size) {
		return nil, fmt.Errorf("unified kernel image: it has no room for the release %s", release)
	}
	headers := make([]byte, optional.SizeOfHeaders)
	if _, err := image.ReadAt(headers, 0); err != nil {
		return nil, err
	}
	start := int(binary.LittleEndian.Uint32(headers[peOffset:])) + signatureSize + binary.Size(pe.FileHeader{})
	if table := start + int(file.SizeOfOptionalHeader); start+optionalImage > len(headers) || table+len(file.Sections)*sectionHeader > len(headers) {
		return nil, errors.New("unified kernel image: its headers are cut off")
	}
	set := func(at int, value uint32) { binary.LittleEndian.PutUint32(headers[at:], value) }
	raw := aligned(uint32(len(kernel)), optional.FileAlignment)
	set(start+optionalImage, aligned(linux.VirtualAddress+uint32(len(kernel)), optional.SectionAlignment))
	for i, s := range file.Sections {
		at := start + int(file.SizeOfOptionalHeader) + i*sectionHeader
		switch s {
		case uname:
			set(at+virtualSizeField, uint32(len(release)))
		case linux:
			set(at+virtualSizeField, uint32(len(kernel)))
			set(at+rawSizeField, raw)
		}
	}
	name := append([]byte(release), make([]byte, int(uname.Size)-len(release))...)
	all := joined{
		{0, int64(len(headers)), bytes.NewReader(headers)},
		between(image, int64(len(headers)), int64(uname.Offset)),
		{int64(uname.Offset), int64(len(name)), bytes.NewReader(name)},
		between(image, int64(uname.Offset)+int64(len(name)), int64(linux.Offset)),
		{int64(linux.Offset), int64(raw), bytes.NewReader(append(bytes.Clone(kernel), make([]byte, int(raw)-len(kernel))...))},
	}
	return io.NewSectionReader(all, 0, int64(linux.Offset)+int64(raw)), nil
}

func aligned(n, to uint32) uint32 { return (n + to - 1) / to * to }

// joined are readers that follow each other.
type joined []part

type part struct {
	start, size int64
	io.ReaderAt
}

func between(r io.ReaderAt, from, to int64) part {
	return part{from, to - from, io.NewSectionReader(r, from, to-from)}
}

// ReadAt implements io.ReaderAt.
func (j joined) ReadAt(to []byte, at int64) (n int, err error) {
	for _, p := range j {
		offset := at + int64(n) - p.start
		if offset < 0 || offset >= p.size || n == len(to) {
			continue
		}
		want := to[n:]
		want = want[:min(int64(len(want)), p.size-offset)]
		read, err := p.ReadAt(want, offset)
		if n += read; read < len(want) {
			return n, err
		}
	}
	if n < len(to) {
		return n, io.EOF
	}
	return n, nil
}
