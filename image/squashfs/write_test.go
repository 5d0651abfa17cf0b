package squashfs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// noise can't be compressed.
func noise(size int, seed uint64) []byte {
	data, r := make([]byte, size), rand.New(rand.NewPCG(seed, 1))
	for i := range data {
		data[i] = byte(r.Uint32())
	}
	return data
}

// sample has files of all sizes that matter.
func sample() Tree {
	t := Tree{
		"empty":              Content(nil, 0o600),
		"one":                Content([]byte("1"), 0o755),
		"block":              Content(bytes.Repeat([]byte("b"), blockBytes), 0o644),
		"block-and-one":      Content(bytes.Repeat([]byte("c"), blockBytes+1), 0o644),
		"noise":              Content(noise(blockBytes+5, 1), 0o644),
		"usr":                Directory(0o755),
		"usr/lib":            Directory(0o755),
		"usr/lib/modules/a":  Content(noise(5000, 2), 0o644),
		"lib":                Link("usr/lib"),
		"tmp":                Directory(0o777 | fs.ModeSticky),
		"proc":               Directory(0o555),
		"deep/er/than/usual": Content([]byte("deep"), 0o400),
	}
	// More than one block of inodes and of a listing, and more entries than a header of a listing has.
	for i := range 1000 {
		t[fmt.Sprintf("many/a-file-with-a-long-name-so-that-the-listing-is-large-%04d", i)] = Content(fmt.Appendf(nil, "file %d", i), 0o644)
	}
	return t
}

func written(t *testing.T, tree Tree) []byte {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "image"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := tree.Write(t.Context(), f); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func reread(t *testing.T, data []byte) Tree {
	t.Helper()
	tree, err := Read(bytes.NewReader(data), int64(len(data)))
	if err != nil {
		t.Fatal(err)
	}
	return tree
}

// same compares a tree with the one that it was made of, which may lack directories.
func same(t *testing.T, got, want Tree) {
	t.Helper()
	full, err := want.whole()
	if err != nil {
		t.Fatal(err)
	}
	delete(full, root)
	if len(got) != len(full) {
		t.Errorf("%d files, want %d", len(got), len(full))
	}
	for name, w := range full {
		g, ok := got[name]
		if !ok || g.Target != w.Target || g.Size != w.Size || w.Target == "" && g.Mode != w.Mode {
			t.Errorf("%s: %v %q %d, want %v %q %d", name, g.Mode, g.Target, g.Size, w.Mode, w.Target, w.Size)
			continue
		}
		if !w.Mode.IsRegular() {
			continue
		}
		is, err := got.ReadFile(name)
		should, errWant := full.ReadFile(name)
		if err := errors.Join(err, errWant); err != nil || !bytes.Equal(is, should) {
			t.Errorf("%s: its %d bytes differ from %d, %v", name, len(is), len(should), err)
		}
	}
}

// What is written can be read, by this package and by another program, and doesn't depend on when and how often.
func TestWrite(t *testing.T) {
	t.Parallel()
	data := written(t, sample())
	same(t, reread(t, data), sample())
	if !bytes.Equal(data, written(t, sample())) {
		t.Error("two images of one tree differ")
	}
	if len(data)%padding != 0 {
		t.Errorf("the image has %d bytes", len(data))
	}
	dir := t.TempDir()
	image, unpacked := filepath.Join(dir, "image"), filepath.Join(dir, "unpacked")
	if err := os.WriteFile(image, data, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), "unsquashfs", "-no-progress", "-d", unpacked, image).CombinedOutput(); err != nil {
		t.Fatalf("unsquashfs: %v: %s", err, out)
	}
	for name, f := range sample() {
		path := filepath.Join(unpacked, name)
		info, err := os.Lstat(path)
		if err != nil || info.Mode().Type() != f.Mode.Type() || f.Target == "" && info.Mode() != f.Mode || info.ModTime().Unix() != 0 {
			t.Errorf("%s: %v, %v", name, info, err)
			continue
		}
		if !f.Mode.IsRegular() {
			continue
		}
		if is, err := os.ReadFile(path); err != nil || int64(len(is)) != f.Size {
			t.Errorf("%s has %d bytes, %v", name, len(is), err)
		}
	}
}

// What isn't changed keeps its bytes, also those of another program that compresses better, and the rest is as it
// should be.
func TestChange(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	tree := filepath.Join(dir, "tree")
	for name, f := range sample() {
		path := filepath.Join(tree, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		switch f.Mode.Type() {
		case fs.ModeDir:
			err = errors.Join(os.MkdirAll(path, 0o755), os.Chmod(path, f.Mode))
		case fs.ModeSymlink:
			err = os.Symlink(f.Target, path)
		default:
			var content []byte
			if content, err = sample().ReadFile(name); err == nil {
				err = errors.Join(os.WriteFile(path, content, 0o644), os.Chmod(path, f.Mode))
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(tree, 0o755); err != nil {
		t.Fatal(err)
	}
	image := filepath.Join(dir, "image")
	if err := Pack(t.Context(), tree, image); err != nil {
		t.Fatal(err)
	}
	packed, err := os.ReadFile(image)
	if err != nil {
		t.Fatal(err)
	}
	base := reread(t, packed)
	same(t, base, sample())
	if again := written(t, base); len(again) > len(packed)+padding {
		t.Errorf("unchanged, it has %d bytes instead of %d", len(again), len(packed))
	}

	changed, want := reread(t, packed), sample()
	for _, c := range []Tree{changed, want} {
		if removed := c.Remove("/lib/modules"); len(removed) == 0 {
			t.Error("nothing is below the link lib")
		}
		c.Remove("noise")
		c.Remove("many/a-file-with-a-long-name-so-that-the-listing-is-large-0500")
		c["new/file"] = Content([]byte("new"), 0o644)
		c["one"] = Content([]byte("two"), 0o644)
	}
	same(t, reread(t, written(t, changed)), want)
	// An image that was written is the base of the next one, too.
	same(t, reread(t, written(t, reread(t, written(t, changed)))), want)
}

func TestResolve(t *testing.T) {
	t.Parallel()
	tree := Tree{"lib": Link("usr/lib"), "usr/lib": Directory(0o755), "abs": Link("/usr/lib"), "usr/up": Link("../usr/lib"), "loop": Link("loop/x")}
	for name, want := range map[string]string{
		"/lib/a": "usr/lib/a", "abs/a/b": "usr/lib/a/b", "usr/up/a": "usr/lib/a", "lib": "lib", "../../etc": "etc", "plain/./x": "plain/x",
	} {
		if got := tree.Resolve(name); got != want {
			t.Errorf("%s leads to %s, want %s", name, got, want)
		}
	}
	tree.Resolve("loop/a") // ends
}

func TestWriteRefuses(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		tree Tree
		want string
	}{
		"a file above a file": {Tree{"a": Content(nil, 0o644), "a/b": Content(nil, 0o644)}, "a/b lies in a"},
		"outside":             {Tree{"../a": Content(nil, 0o644)}, "no path below the root"},
		"a device":            {Tree{"a": {Mode: fs.ModeDevice}}, "neither file, directory nor link"},
		"a long name":         {Tree{strings.Repeat("a", 257): Content(nil, 0o644)}, "more than 256 bytes"},
		"a short file":        {Tree{"a": {Mode: 0o644, Size: 2, Open: func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader("1")), nil }}}, "a: unexpected EOF"},
	} {
		f, err := os.Create(filepath.Join(t.TempDir(), "image"))
		if err != nil {
			t.Fatal(err)
		}
		if err := c.tree.Write(t.Context(), f); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
		f.Close()
	}
}

// Directories that have the same one twice would be read twice each, and those in them four times.
func TestReadRefusesSameNames(t *testing.T) {
	t.Parallel()
	f, err := os.Create(filepath.Join(t.TempDir(), "image"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Seek(superblockSize, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	w, size := &writer{}, uint32(0)
	if w.data, err = newBlocks(f, superblockSize); err != nil {
		t.Fatal(err)
	}
	start, offset := w.listings.position()
	var top inode
	for range maxDepth {
		top = w.next("a", kindDirectory)
		w.put(&top, kindExtendedDirectory, 0o755, uint32(2), size+emptySize, start, uint32(1), uint16(0), offset, uint32(noXattrs))
		start, offset = w.listings.position()
		size = w.list([]inode{top, top})
	}
	if err := errors.Join(w.data.close(), w.tables(f, top)); err != nil {
		t.Fatal(err)
	}
	if _, err := Read(f, 1<<20); err == nil || !strings.Contains(err.Error(), "a is there twice") {
		t.Error(err)
	}
}

// A damaged image is an error, or gives other files: it doesn't end the program, and doesn't take all memory.
func FuzzRead(f *testing.F) {
	small := Tree{"a": Content(bytes.Repeat([]byte("a"), blockBytes+3), 0o644), "b/c": Content([]byte("c"), 0o644), "d": Link("a")}
	file, err := os.Create(filepath.Join(f.TempDir(), "image"))
	if err != nil {
		f.Fatal(err)
	}
	if err := small.Write(f.Context(), file); err != nil {
		f.Fatal(err)
	}
	data, err := os.ReadFile(file.Name())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	for _, n := range []int{0, 50, superblockSize, len(data) - padding} {
		f.Add(data[:n])
	}
	for i := range 200 {
		damaged := bytes.Clone(data)
		damaged[i*7%len(damaged)] ^= byte(1 << (i % 8))
		f.Add(damaged)
	}
	f.Fuzz(func(_ *testing.T, data []byte) {
		tree, err := Read(bytes.NewReader(data), int64(len(data)))
		if err != nil {
			return
		}
		for name, file := range tree {
			if file.Mode.IsRegular() && file.Size < 64<<20 {
				_, _ = tree.ReadFile(name) // whether it can be read doesn't matter
			}
		}
	})
}
