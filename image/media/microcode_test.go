package media

import (
	"bytes"
	"debug/pe"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Microcode is at the very beginning of the initramfs, in what UEFI starts and in what iPXE loads.
func TestMicrocode(t *testing.T) {
	t.Parallel()
	o := options(t)
	o.Microcode = t.TempDir()
	if err := o.Build(t.Context(), UKI, filepath.Join(t.TempDir(), "medium")); err == nil || !strings.Contains(err.Error(), "has no microcode") {
		t.Errorf("a directory without microcode: %v", err)
	}
	if err := os.Mkdir(filepath.Join(o.Microcode, "amd-ucode"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(o.Microcode, "amd-ucode", "microcode_amd.bin"), []byte("the microcode"), 0o600); err != nil {
		t.Fatal(err)
	}
	file, err := pe.NewFile(bytes.NewReader(read(t, build(t, o, UKI))))
	if err != nil {
		t.Fatal(err)
	}
	section := file.Section(".initrd")
	content, err := section.Data()
	if err != nil {
		t.Fatal(err)
	}
	for what, got := range map[string][]byte{
		"the unified kernel image": content[:section.VirtualSize], "the files for iPXE": read(t, filepath.Join(build(t, o, PXE), InitramfsFile)),
	} {
		microcode, system := bytes.Index(got, []byte("the microcode")), bytes.Index(got, read(t, o.Initramfs))
		if !bytes.HasPrefix(got, []byte("070701")) || microcode < 0 || system < microcode || system+len(read(t, o.Initramfs)) != len(got) {
			t.Errorf("in %s, the microcode is at %d, and the system at %d of %d", what, microcode, system, len(got))
		}
	}
}

// Microcode is a part of the system, of which a disk must have room for two.
func TestSizeWithMicrocode(t *testing.T) {
	t.Parallel()
	o := options(t)
	folder := filepath.Join(t.TempDir(), "intel-ucode")
	if err := os.Mkdir(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, "06-01-01"), make([]byte, 4<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	for size, want := range map[int64][2]string{ // of the kernel: messages without and with microcode
		100 << 20: {"the system has 106 MB", "the system has 110 MB"},
		129 << 20: {"the system has 136 MB", "the system has 140 MB: it is too large for disks below 8 GiB"},
		249 << 20: {"the system has 262 MB: it is too large for disks below 8 GiB", "the system has 266 MB, and a disk has room for 264 MB"},
	} {
		if err := os.Truncate(o.Kernel, size); err != nil {
			t.Fatal(err)
		}
		for i, dir := range []string{"", filepath.Dir(folder)} {
			var said []string
			o.Microcode = dir
			if err := o.CheckSize(func(line string) { said = append(said, line) }); err != nil {
				said = []string{err.Error()}
			}
			if len(said) == 0 || !strings.HasPrefix(said[0], want[i]) {
				t.Errorf("%q, want %q", said, want[i])
			}
		}
	}
}
