// Package module makes modules of the kernel for tests, as small as they can be: they only say what they are.
package module

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"strings"
)

// Module is one for a release of the kernel, with more fields of its section .modinfo, such as depends=xor.
func Module(release string, fields ...string) []byte {
	info := strings.Join(append(fields, "vermagic="+release+" SMP mod_unload", ""), "\x00")
	const names = "\x00.modinfo\x00.shstrtab\x00"
	const header, section = 64, 64
	at := uint64(header + len(info) + len(names))
	var b bytes.Buffer
	put := func(v any) { _ = binary.Write(&b, binary.LittleEndian, v) } // never fails (bytes.Buffer)
	put(elf.Header64{
		Ident: [16]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)},
		Type:  uint16(elf.ET_REL), Machine: uint16(elf.EM_X86_64), Version: uint32(elf.EV_CURRENT),
		Shoff: at, Ehsize: header, Shentsize: section, Shnum: 3, Shstrndx: 2,
	})
	b.WriteString(info + names)
	put(elf.Section64{})
	put(elf.Section64{Name: 1, Type: uint32(elf.SHT_PROGBITS), Off: header, Size: uint64(len(info))})
	put(elf.Section64{Name: 10, Type: uint32(elf.SHT_STRTAB), Off: uint64(header + len(info)), Size: uint64(len(names))})
	return b.Bytes()
}
