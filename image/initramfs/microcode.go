package initramfs

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"

	"github.com/u-root/u-root/pkg/cpio"
)

// microcodes are where a kernel looks for the microcode of a processor before it does anything else: in an archive that
// isn't compressed, at the very beginning of the initramfs (Documentation/arch/x86/microcode.rst). Files of several
// processors are put one after the other.
var microcodes = []struct{ pattern, name string }{
	{"intel-ucode/*", "GenuineIntel.bin"},
	{"amd-ucode/*.bin", "AuthenticAMD.bin"},
}

// WithMicrocode is an archive with the microcode of a directory, as in /lib/firmware, instead of what it may have.
func WithMicrocode(archive []byte, dir string) ([]byte, error) {
	microcode, err := microcodeOf(dir)
	return append(microcode, withoutMicrocode(archive)...), err
}

// withoutMicrocode is what comes after the microcode: that isn't compressed, and the rest is.
func withoutMicrocode(archive []byte) []byte {
	if !bytes.HasPrefix(archive, []byte(cpioMagic)) {
		return archive
	}
	_, after, _ := bytes.Cut(archive, []byte(cpioTrailer))
	return bytes.TrimLeft(after, "\x00")
}

// microcodeOf makes an archive of the microcode.
func microcodeOf(dir string) ([]byte, error) {
	records := []cpio.Record{cpio.Directory("kernel", 0o755), cpio.Directory("kernel/x86", 0o755), cpio.Directory("kernel/x86/microcode", 0o755)}
	folders := len(records)
	for _, m := range microcodes {
		files, err := filepath.Glob(filepath.Join(dir, m.pattern)) // sorted
		if err != nil {
			return nil, err
		}
		var all []byte
		for _, file := range files {
			content, err := os.ReadFile(file)
			if err != nil {
				return nil, err
			}
			all = append(all, content...)
		}
		if len(all) > 0 {
			records = append(records, cpio.StaticFile("kernel/x86/microcode/"+m.name, string(all), 0o644))
		}
	}
	if len(records) == folders {
		return nil, fmt.Errorf("%s has no microcode: neither %s nor %s", dir, microcodes[0].pattern, microcodes[1].pattern)
	}
	var archive bytes.Buffer
	err := writeSegment(&archive, records)
	return archive.Bytes(), err
}
