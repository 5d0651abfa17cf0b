//go:build e2e

package docker

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/image/oci"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

// Docker takes the archive of an installer image under its name, with its instructions for builders and its files.
func TestDockerLoadsTheInstaller(t *testing.T) {
	docker, dir := e2etest.Docker(t), t.TempDir()
	file, archive := filepath.Join(dir, "system/garboard.efi"), filepath.Join(dir, "installer.tar")
	e2etest.WriteFile(t, file, []byte("a system"))
	const name = "ghcr.io/garboard-os/installer:v1.0.0"
	image := oci.Image{Ref: name, Layers: []string{"system"}, OnBuild: []string{"ARG RM"}, Gzip: true}
	if err := oci.WriteArchive(t.Context(), archive, image, map[string]map[string]string{"system": {"usr/install": filepath.Dir(file)}}); err != nil {
		t.Fatal(err)
	}
	if out, err := docker("load", "--input", archive); err != nil || !strings.Contains(out, "Loaded image: "+name) {
		t.Fatalf("%v: %s", err, out)
	}
	if out, err := docker("image", "inspect", "--format", "{{.Config.OnBuild}}", name); err != nil || strings.TrimSpace(out) != "[ARG RM]" {
		t.Errorf("%v: %s", err, out)
	}
	if out, err := docker("create", "--name", "installer", name, "none"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if out, err := docker("cp", "installer:/usr/install/garboard.efi", filepath.Join(dir, "copied")); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if got, err := os.ReadFile(filepath.Join(dir, "copied")); err != nil || string(got) != "a system" {
		t.Errorf("%v: %q", err, got)
	}
}
