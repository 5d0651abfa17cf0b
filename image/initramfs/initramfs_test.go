package initramfs

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/zstd"
	"github.com/u-root/u-root/pkg/cpio"
)

// sample is a small initramfs' contents. The squashfs is random enough not to look like an archive.
func sample(t *testing.T) Contents {
	t.Helper()
	dir := t.TempDir()
	modules := filepath.Join(dir, "6.1.0-test")
	for name, contents := range map[string]string{
		"init":        "program",
		"rootfs.sqsh": "hsqs" + string(bytes.Repeat([]byte{1, 2, 3, 0xff}, 100)) + "x",
		"6.1.0-test/modules.dep": "kernel/drivers/block/loop.ko:\n" +
			"kernel/fs/squashfs/squashfs.ko: kernel/lib/lz4.ko\n" +
			"kernel/lib/lz4.ko:\n" +
			"kernel/fs/xfs/xfs.ko: kernel/lib/libcrc32c.ko\n" +
			"kernel/lib/libcrc32c.ko:\n",
		"6.1.0-test/modules.builtin":                 "kernel/fs/overlayfs/overlay.ko\n",
		"6.1.0-test/kernel/drivers/block/loop.ko":    "loop",
		"6.1.0-test/kernel/fs/squashfs/squashfs.ko":  "squashfs",
		"6.1.0-test/kernel/lib/lz4.ko":               "lz4",
		"6.1.0-test/kernel/fs/xfs/xfs.ko":            "xfs",
		"6.1.0-test/kernel/lib/libcrc32c.ko":         "libcrc32c",
		"6.1.0-test/kernel/drivers/block/unknown.ko": "unknown",
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(contents), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return Contents{Init: filepath.Join(dir, "init"), RootFS: filepath.Join(dir, "rootfs.sqsh"), ModulesDir: modules}
}

func write(t *testing.T, c Contents) []byte {
	t.Helper()
	var out bytes.Buffer
	if err := Write(context.Background(), &out, c); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// unpack does what the kernel does: a zstd frame, zeros up to the next multiple of four, an archive as it is.
func unpack(t *testing.T, image []byte) map[string]cpio.Record {
	t.Helper()
	end := bytes.LastIndex(image, []byte("070701"))
	start := end
	for i := end; i >= 0; i = bytes.LastIndex(image[:i], []byte("070701")) {
		start = i
	}
	if start%alignment != 0 {
		t.Errorf("the second segment starts at %d, which isn't a multiple of %d", start, alignment)
	}
	d, err := zstd.NewReader(bytes.NewReader(bytes.TrimRight(image[:start], "\x00")))
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	first, err := io.ReadAll(d)
	if err != nil {
		t.Fatal(err)
	}
	records := map[string]cpio.Record{}
	for _, segment := range [][]byte{first, image[start:]} {
		all, err := cpio.ReadAllRecords(cpio.Newc.Reader(bytes.NewReader(segment)))
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range all {
			if parent := filepath.Dir(r.Name); parent != "." && records[parent].Mode&cpio.S_IFMT != cpio.S_IFDIR {
				t.Errorf("%s comes before its folder: the kernel would drop it", r.Name)
			}
			records[r.Name] = r
		}
	}
	return records
}

func contentsOf(t *testing.T, r cpio.Record) string {
	t.Helper()
	data, err := io.ReadAll(io.NewSectionReader(r.ReaderAt, 0, int64(r.FileSize)))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func TestContents(t *testing.T) {
	c := sample(t)
	records := unpack(t, write(t, c))
	rootfs, err := os.ReadFile(c.RootFS)
	if err != nil {
		t.Fatal(err)
	}
	const base = "usr/lib/modules/6.1.0-test/"
	for name, want := range map[string]string{
		"init":                                  "program",
		RootFSName:                              string(rootfs),
		base + "kernel/drivers/block/loop.ko":   "loop",
		base + "kernel/fs/squashfs/squashfs.ko": "squashfs",
		base + "kernel/lib/lz4.ko":              "lz4",
		base + "modules.builtin":                "kernel/fs/overlayfs/overlay.ko\n",
		base + "modules.dep": "kernel/drivers/block/loop.ko:\n" +
			"kernel/fs/squashfs/squashfs.ko: kernel/lib/lz4.ko\nkernel/lib/lz4.ko:\n",
	} {
		r, ok := records[name]
		if !ok {
			t.Errorf("%s is missing", name)
			continue
		}
		if diff := cmp.Diff(want, contentsOf(t, r)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	for _, name := range []string{base + "kernel/fs/xfs/xfs.ko", base + "kernel/lib/libcrc32c.ko"} {
		if _, ok := records[name]; ok {
			t.Errorf("%s is of no use to stage 1", name)
		}
	}
	if r := records["dev/console"]; r.Mode != cpio.S_IFCHR|0o600 || r.Rmajor != 5 || r.Rminor != 1 {
		t.Errorf("dev/console: %v", r.Info)
	}
	if r := records["init"]; r.Mode != cpio.S_IFREG|0o755 || r.UID != 0 || r.MTime != 0 {
		t.Errorf("init: %v", r.Info)
	}
}

func TestWithoutModules(t *testing.T) {
	c := sample(t)
	c.ModulesDir = ""
	if _, ok := unpack(t, write(t, c))["usr/lib/modules/6.1.0-test"]; ok {
		t.Error("a module folder nonetheless")
	}
}

func TestMissingParts(t *testing.T) {
	for name, change := range map[string]func(*Contents){
		"init":    func(c *Contents) { c.Init += ".gone" },
		"rootfs":  func(c *Contents) { c.RootFS += ".gone" },
		"modules": func(c *Contents) { c.ModulesDir += ".gone" },
	} {
		c := sample(t)
		change(&c)
		if err := Write(context.Background(), io.Discard, c); err == nil {
			t.Errorf("%s missing: no error", name)
		}
	}
}
