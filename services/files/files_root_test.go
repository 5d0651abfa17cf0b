package files

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/garboard-os/garboard/config"
	"golang.org/x/sys/unix"
)

// isolated marks the process that already has a mount namespace of its own.
const isolated = "GARBOARD_TEST_ISOLATED"

// TestMain runs the tests, as root, once more in a mount namespace of their own.
func TestMain(m *testing.M) {
	if os.Geteuid() != 0 || os.Getenv(isolated) != "" {
		os.Exit(m.Run())
	}
	cmd := exec.Command(os.Args[0], os.Args[1:]...)
	cmd.Env = append(os.Environ(), isolated+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		os.Exit(exit.ExitCode())
	case err != nil:
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// /etc as on a node: an overlay over the image's, which stays as it is under it.
func TestImageUnderTheOverlay(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: mounts an overlay over /etc in a namespace of its own")
	}
	must(t, unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
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
