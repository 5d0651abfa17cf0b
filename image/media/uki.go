package media

import (
	"bytes"
	"debug/pe"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
)

// A section of a unified kernel image (UAPI.5, "Unified Kernel Images"), by the name that systemd's stub looks for.
type section struct {
	name    string
	content []byte
	room    uint32 // at least, in the file: for what is added later
}

// Characteristics of the sections: initialized data that can be read (PE format, "Section Flags").
const sectionFlags = pe.IMAGE_SCN_CNT_INITIALIZED_DATA | pe.IMAGE_SCN_MEM_READ

// Offsets in the headers of a PE32+ file (PE format, "COFF File Header" and "Optional Header").
const (
	signatureSize     = 4
	sectionCountField = 2 // in the COFF header
	symbolsField      = 8 // where they are, and how many
	symbolsSize       = 8
	sectionHeaderSize = 40
	maxAlignment      = 64 << 10 // in a file

	initializedSizeField = 8 // all in the optional header
	imageSizeField       = 56
)

// unified puts sections into systemd's stub. The result is a program for UEFI, and boots the kernel that is in it.
func unified(stub []byte, sections []section) ([]byte, error) {
	file, err := pe.NewFile(bytes.NewReader(stub))
	if err != nil {
		return nil, fmt.Errorf("boot stub: %w", err)
	}
	header, ok := file.OptionalHeader.(*pe.OptionalHeader64)
	// pe also reads what has no MZ, and doesn't look at the alignments. One that is 0 is larger than the limit, too.
	if !ok || len(file.Sections) == 0 || !bytes.HasPrefix(stub, []byte("MZ")) || max(header.FileAlignment-1, header.SectionAlignment-1) >= maxAlignment {
		return nil, errors.New("boot stub: it is no program for a 64-bit UEFI")
	}
	coff := int(binary.LittleEndian.Uint32(stub[0x3c:])) + signatureSize
	optional := coff + binary.Size(pe.FileHeader{})
	table := optional + int(file.SizeOfOptionalHeader)
	if end := table + (len(file.Sections)+len(sections))*sectionHeaderSize; end > min(int(header.SizeOfHeaders), len(stub)) {
		return nil, fmt.Errorf("boot stub: its headers have no room for %d sections", len(sections))
	}
	last := file.Sections[len(file.Sections)-1]
	address := align(last.VirtualAddress+last.VirtualSize, header.SectionAlignment)
	// Symbols may follow. A firmware hashes sections, so nothing is between them (Authenticode).
	end := min(int(align(last.Offset+last.Size, header.FileAlignment)), len(stub))
	image := append(bytes.Clone(stub[:end]), make([]byte, int(align(uint32(end), header.FileAlignment))-end)...)
	clear(image[coff+symbolsField:][:symbolsSize])
	initialized := header.SizeOfInitializedData
	for i, s := range sections {
		size := align(max(uint32(len(s.content)), s.room), header.FileAlignment)
		h := pe.SectionHeader32{
			VirtualSize: uint32(len(s.content)), VirtualAddress: address,
			SizeOfRawData: size, PointerToRawData: uint32(len(image)), Characteristics: sectionFlags,
		}
		copy(h.Name[:], s.name)
		at := table + (len(file.Sections)+i)*sectionHeaderSize
		if _, err := binary.Encode(image[at:at+sectionHeaderSize], binary.LittleEndian, h); err != nil {
			return nil, err
		}
		image = append(image, s.content...)
		image = append(image, make([]byte, int(size)-len(s.content))...)
		address = align(address+uint32(len(s.content)), header.SectionAlignment)
		initialized += size
	}
	binary.LittleEndian.PutUint16(image[coff+sectionCountField:], uint16(len(file.Sections)+len(sections)))
	binary.LittleEndian.PutUint32(image[optional+initializedSizeField:], initialized)
	binary.LittleEndian.PutUint32(image[optional+imageSizeField:], address)
	return image, nil
}

func align(n, to uint32) uint32 { return (n + to - 1) / to * to }

// osRelease describes the system in a unified kernel image (os-release(5)).
func osRelease(version string) []byte {
	var b strings.Builder
	for _, line := range [][2]string{{"ID", "garboard"}, {"NAME", "Garboard"}, {"PRETTY_NAME", "Garboard " + version}, {"VERSION_ID", version}} {
		fmt.Fprintf(&b, "%s=%q\n", line[0], line[1])
	}
	return []byte(b.String())
}
