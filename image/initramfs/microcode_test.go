package initramfs

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/u-root/u-root/pkg/cpio"
)

// The archive has one file for each vendor, where the kernel looks for it.
func TestMicrocode(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if _, err := WithMicrocode(nil, dir); err == nil || !strings.Contains(err.Error(), "neither intel-ucode/* nor amd-ucode/*.bin") {
		t.Errorf("an empty directory: %v", err)
	}
	for name, content := range map[string]string{"intel-ucode/06-9e-09": "one", "intel-ucode/06-9e-0a": "two", "amd-ucode/microcode_amd.bin": "three", "amd-ucode/microcode_amd.bin.asc": "signature"} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	archive, err := WithMicrocode(nil, dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(archive)%alignment != 0 {
		t.Errorf("%d bytes: the next segment isn't found", len(archive))
	}
	records, err := cpio.ReadAllRecords(cpio.Newc.Reader(bytes.NewReader(archive)))
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, r := range records {
		if r.FileSize == 0 {
			continue
		}
		content := make([]byte, r.FileSize)
		if _, err := r.ReadAt(content, 0); err != nil {
			t.Fatal(err)
		}
		got[r.Name] = string(content)
	}
	if len(got) != 2 || got["kernel/x86/microcode/GenuineIntel.bin"] != "onetwo" || got["kernel/x86/microcode/AuthenticAMD.bin"] != "three" {
		t.Errorf("%q", got)
	}

	// A system that has some gets the other one instead.
	rest := []byte("\x28\xb5\x2f\xfd what is compressed")
	once, err := WithMicrocode(rest, dir)
	if err != nil || !bytes.Equal(once, append(archive, rest...)) {
		t.Errorf("before an archive: %v", err)
	}
	if twice, err := WithMicrocode(once, dir); err != nil || !bytes.Equal(twice, once) {
		t.Errorf("a second time: %d bytes instead of %d, %v", len(twice), len(once), err)
	}
}
