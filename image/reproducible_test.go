package image

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/garboard-os/garboard/image/initramfs"
	"github.com/garboard-os/garboard/image/rootfs"
	"github.com/garboard-os/garboard/image/squashfs"
)

// surroundings are what must not show in an image.
type surroundings struct {
	umask int
	zone  string
	mtime time.Time
	// backwards makes the files in reverse order, so that directories list them differently.
	backwards bool
}

// Two builds from the same parts in different folders, by different umasks, in another time zone, at another time, and
// with files made in another order, are the same to the byte; and one changed byte in a part is another image.
func TestReproducible(t *testing.T) {
	here := surroundings{umask: 0o022, zone: "UTC", mtime: time.Unix(1, 0)}
	there := surroundings{umask: 0o077, zone: "Asia/Kathmandu", mtime: time.Unix(1_800_000_000, 0), backwards: true}
	rootA, initA := buildSmall(t, here, "")
	rootB, initB := buildSmall(t, there, "")
	if !bytes.Equal(rootA, rootB) {
		t.Error("two root filesystems from the same parts differ")
	}
	if !bytes.Equal(initA, initB) {
		t.Error("two initramfs from the same parts differ")
	}
	rootC, initC := buildSmall(t, here, "changed")
	if bytes.Equal(rootA, rootC) || bytes.Equal(initA, initC) {
		t.Error("a changed part doesn't show: the comparison proves nothing")
	}
}

func buildSmall(t *testing.T, s surroundings, suffix string) (root, archive []byte) {
	t.Helper()
	t.Setenv("TZ", s.zone)
	defer syscall.Umask(syscall.Umask(s.umask))
	dir := t.TempDir()
	src := smallParts(t, dir, s, suffix)
	entries, err := rootfs.Plan(src)
	if err != nil {
		t.Fatal(err)
	}
	tree := filepath.Join(dir, "tree")
	if err := os.Mkdir(tree, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := rootfs.Lay(tree, entries); err != nil {
		t.Fatal(err)
	}
	image := filepath.Join(dir, "image")
	if err := squashfs.Pack(context.Background(), tree, image); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	contents := initramfs.Contents{Init: src.Programs["containerd"], RootFS: image, ModulesDir: src.ModulesDir}
	if err := initramfs.Write(context.Background(), &out, contents); err != nil {
		t.Fatal(err)
	}
	root, err = os.ReadFile(image)
	if err != nil {
		t.Fatal(err)
	}
	return root, out.Bytes()
}

// smallParts makes enough files, and large enough ones, for several compressed blocks and fragments.
func smallParts(t *testing.T, dir string, s surroundings, suffix string) rootfs.Sources {
	t.Helper()
	const large = 1<<20 + 1<<18
	files := []string{"containerd", "runc", "tools/etc/ssl/certs/ca-certificates", "6.1.0-test/modules.dep", "6.1.0-test/modules.builtin"}
	for i := range 40 {
		files = append(files, fmt.Sprintf("6.1.0-test/kernel/m%d.ko", i))
	}
	if s.backwards {
		slices.Reverse(files)
	}
	for _, name := range files {
		size := 4000
		if name == "containerd" {
			size = large
		}
		var contents bytes.Buffer
		for i := 0; contents.Len() < size && filepath.Ext(name) != ".dep"; i++ {
			fmt.Fprintf(&contents, "%s %d %s\n", name, i*i, suffix)
		}
		path := filepath.Join(dir, "parts", name)
		if err := os.MkdirAll(filepath.Dir(path), fs.ModePerm); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, contents.Bytes(), 0o666); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, s.mtime, s.mtime); err != nil {
			t.Fatal(err)
		}
	}
	part := func(name string) string { return filepath.Join(dir, "parts", name) }
	return rootfs.Sources{
		Version:    "v0.1.0",
		Programs:   map[string]string{"containerd": part("containerd"), "runc": part("runc")},
		Tools:      part("tools"),
		ModulesDir: part("6.1.0-test"),
	}
}
