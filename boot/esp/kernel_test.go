package esp

import (
	"bytes"
	"debug/pe"
	"encoding/binary"
	"io"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/tools/testing/uki"
)

// The image has the other kernel and its release, and the rest is as it was.
func TestReplaceKernel(t *testing.T) {
	t.Parallel()
	image := uki.Image(t, "v1.0.0", "quiet")
	linux := append(uki.Linux("6.13.0-other"), bytes.Repeat([]byte("more"), 1000)...)
	changed, err := ReplaceKernel(bytes.NewReader(image), int64(len(image)), linux)
	if err != nil {
		t.Fatal(err)
	}
	whole, err := io.ReadAll(changed)
	if err != nil || int64(len(whole)) != changed.Size() {
		t.Fatalf("%d of %d bytes, %v", len(whole), changed.Size(), err)
	}
	before, err := pe.NewFile(bytes.NewReader(image))
	if err != nil {
		t.Fatal(err)
	}
	file, err := pe.NewFile(bytes.NewReader(whole))
	if err != nil {
		t.Fatal(err)
	}
	for i, s := range file.Sections {
		content, err := s.Data()
		if err != nil {
			t.Fatal(err)
		}
		want, err := before.Sections[i].Data()
		if err != nil {
			t.Fatal(err)
		}
		switch s.Name {
		case SectionUname:
			want = []byte("6.13.0-other")
		case SectionKernel:
			want = linux
		default:
			want = want[:before.Sections[i].VirtualSize]
		}
		if !bytes.Equal(content[:s.VirtualSize], want) {
			t.Errorf("section %s has %d bytes, want %d", s.Name, s.VirtualSize, len(want))
		}
	}
	if size, end := file.OptionalHeader.(*pe.OptionalHeader64).SizeOfImage, file.Sections[len(file.Sections)-1]; size < end.VirtualAddress+end.VirtualSize {
		t.Errorf("the image ends at %x, and its kernel at %x", size, end.VirtualAddress+end.VirtualSize)
	}
	if _, err := ReadImage(bytes.NewReader(whole), int64(len(whole))); err != nil {
		t.Error(err)
	}
	// From anywhere, some bytes are the same as from the start.
	for _, at := range []int64{0, 1, 1023, 1024, int64(len(whole)) - 3} {
		part := make([]byte, 700)
		n, err := changed.ReadAt(part, at)
		if err != nil && err != io.EOF || !bytes.Equal(part[:n], whole[at:][:n]) || n < min(700, len(whole)-int(at)) {
			t.Errorf("%d bytes at %d, %v", n, at, err)
		}
	}
	// Offsets in the optional header, which begins at 0x58, and in the section table.
	with := func(at int, value uint32) []byte {
		other := bytes.Clone(image)
		binary.LittleEndian.PutUint32(other[at:], value)
		return other
	}
	for name, c := range map[string]struct {
		image, linux []byte
		want         string
	}{
		"no alignment":  {with(0x58+36, 0), linux, "aren't in order"},
		"large headers": {with(0x58+60, 1<<31), linux, "aren't in order"},
		"no headers":    {with(0x58+60, 0x10), linux, "aren't in order"},
		"small headers": {with(0x58+60, 0x60), linux, "its headers are cut off"},
		"no image":      {[]byte("no image"), linux, ""},
		"no kernel":     {image, []byte("no kernel"), "no Linux kernel"},
		"cut off":       {image[:len(image)-512], linux, "its last section isn't the kernel"},
	} {
		if _, err := ReplaceKernel(bytes.NewReader(c.image), int64(len(c.image)), c.linux); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestRelease(t *testing.T) {
	t.Parallel()
	if got, err := Release(uki.Linux("6.12.1-amd64")); got != "6.12.1-amd64" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	if got, err := Release(uki.Linux("6.12.1-amd64")[:0x300]); err == nil {
		t.Errorf("a kernel that is cut off is %q", got)
	}
	long := append(uki.Linux(""), bytes.Repeat([]byte("6"), 1000)...)
	copy(long[512+0x1e0:], bytes.Repeat([]byte("6"), 1000))
	if got, err := Release(append(long, " x"...)); err == nil {
		t.Errorf("a release has %d bytes", len(got))
	}
}

// The header of a kernel may be anything: what is too short for it is refused.
func TestReleaseOfAShortKernel(t *testing.T) {
	t.Parallel()
	kernel := make([]byte, versionPointer+2)
	copy(kernel[headerMagic:], "HdrS")
	for size := range len(kernel) + 1 {
		if release, err := Release(kernel[:size]); err == nil {
			t.Errorf("%d bytes: %q", size, release)
		}
	}
}
