//go:build e2e && long

package installed

import (
	"cmp"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/network/registry"
)

// The ISO of a release installs a machine, which becomes Ready. If there is a release before, its ISO does, and the
// machine is upgraded with the installer image of the later one: make release-check QEMU=1 BEFORE=DIR.
func TestPublishedRelease(t *testing.T) {
	dir, before := os.Getenv("GARBOARD_RELEASE"), os.Getenv("GARBOARD_RELEASE_BEFORE")
	if dir == "" {
		t.Skip("GARBOARD_RELEASE names no release to install")
	}
	iso := published(t, cmp.Or(before, dir), "amd64.iso")
	images := httptest.NewServer(registry.New(unpacked(t, published(t, dir, "amd64_images.tar")), unpacked(t, published(t, dir, "amd64_installer.tar"))))
	t.Cleanup(images.Close)
	c, mark := e2etest.Start(t, "release", qemu.QEMU, e2etest.Nodes(1, 0), func(o *qemu.Options) {
		o.Boot.Medium, o.Boot.UEFI, o.DiskGiB, o.MemoryMiB = iso, true, diskGiB, memoryMiB
		o.Mirrors = map[string][]string{"ghcr.io": {images.URL}}
	})
	c.Says(bootBudget, 0, "installing Garboard")
	mark.Reached("the machine installs itself")
	c.Says(2*bootBudget, 0, "runs from slot A, which is trying")
	mark.Reached("the disk boots")
	c.Ready(mark)
	m := machine{c.Patient(systemBudget), mark, t, ""}
	if before == "" {
		t.Log(m.Gbctl("-n", m.Node(), "get", "slots"))
		return
	}
	release := filepath.Base(published(t, dir, "amd64.iso"))[len("garboard_"):]
	release = release[:len(release)-len("_amd64.iso")]
	m.Gbctl("-n", m.Node(), "upgrade", "--image", "ghcr.io/garboard-os/installer:"+release)
	m.slots("B good " + release)
	m.Ready(mark)
	mark.Reached("the machine is upgraded, and Ready")
}

// published is a file of a release.
func published(t *testing.T, dir, end string) string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(dir, "garboard_*_"+end))
	if err != nil || len(found) != 1 {
		t.Fatalf("%s has %q for *_%s, %v", dir, found, end, err)
	}
	return found[0]
}

// unpacked is the directory with the image layout of an archive.
func unpacked(t *testing.T, archive string) string {
	t.Helper()
	layout := t.TempDir()
	if out, err := exec.Command("tar", "-xf", archive, "-C", layout).CombinedOutput(); err != nil {
		t.Fatalf("tar: %v: %s", err, out)
	}
	return layout
}
