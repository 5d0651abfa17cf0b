package files

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/tools/testing/isolate"
	"golang.org/x/sys/unix"
)

// TestMain runs the tests, as root, once more in a mount namespace of their own.
func TestMain(m *testing.M) { isolate.Main(m, syscall.CLONE_NEWNS) }

// /etc as on a node: an overlay over the image's, which stays as it is under it.
func TestImageUnderTheOverlay(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: mounts an overlay over /etc in a namespace of its own")
	}
	upper := t.TempDir()
	must(t, unix.Mount("tmpfs", upper, "tmpfs", 0, ""))
	t.Cleanup(func() { unix.Unmount(upper, unix.MNT_DETACH) })
	for _, dir := range []string{"upper", "work"} {
		must(t, os.Mkdir(filepath.Join(upper, dir), 0o755))
	}
	must(t, unix.Mount("overlay", "/etc", "overlay", 0, "lowerdir=/etc,upperdir="+upper+"/upper,workdir="+upper+"/work"))
	t.Cleanup(func() { unix.Unmount("/etc", unix.MNT_DETACH) })
	passwd, err := os.ReadFile("/etc/passwd")
	must(t, err)

	b := newBench(t, nil)
	b.root = "/"
	b.d.o.root, b.d.o.image = "/", openImage
	for range 3 {
		b.lay(entry("/etc/passwd", "garboard:x:1:1::/:\n", config.FileAppend))
		b.is("/etc/passwd", string(passwd)+"garboard:x:1:1::/:\n", 0o644)
	}
	b.lay(entry("/etc/passwd", "", config.FileOverwrite))
	b.is("/etc/passwd", "", 0o644)
	img := openImage()
	defer img.Close()
	below, _, there, err := img.file("/etc/passwd")
	if err != nil || !there || string(below) != string(passwd) {
		t.Errorf("the image's file is %q (%v)", below, err)
	}
	b.lay()
	b.is("/etc/passwd", string(passwd), 0o644)
}
