//go:build e2e

package onenode

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/image/oci"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

// loads: pods run images of this machine, and the new one of a name after it was loaded again.
func loads(t *testing.T, c *e2etest.Cluster) {
	t.Helper()
	for _, text := range []string{"first", "second"} {
		dir := t.TempDir()
		source, archive := filepath.Join(dir, "main.go"), filepath.Join(dir, "app.tar")
		e2etest.WriteFile(t, source, fmt.Appendf(nil, "package main\n\nimport \"time\"\n\nfunc main() { println(%q); time.Sleep(time.Hour) }\n", text))
		build := exec.CommandContext(t.Context(), "go", "build", "-o", filepath.Join(dir, "bin/app"), source)
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		image := oci.Image{Ref: "app:dev", Layers: []string{"app"}, Entrypoint: []string{"/bin/app"}, Gzip: true}
		if err := oci.WriteArchive(t.Context(), archive, image, map[string]map[string]string{"app": {"bin": filepath.Join(dir, "bin")}}); err != nil {
			t.Fatal(err)
		}
		home := "GARBOARD_HOME=" + filepath.Dir(filepath.Dir(c.Dir()))
		if out, err := c.TryGbctlWith("", []string{home}, "cluster", "load", "--name", c.Name, archive); err != nil || !strings.Contains(out, ": docker.io/library/app:dev sha256:") {
			t.Fatalf("%v: %s", err, out)
		}
		c.Apply("apiVersion: v1\nkind: Pod\nmetadata: {name: " + text + ", namespace: default}\nspec:\n  terminationGracePeriodSeconds: 1\n" +
			"  containers: [{name: app, image: 'app:dev', imagePullPolicy: Never}]\n")
		c.Eventually(podsBudget, "the pod says "+text, func() error {
			out, err := c.Try("logs", text)
			if err == nil && strings.TrimSpace(out) != text {
				err = fmt.Errorf("it says %q", out)
			}
			return err
		})
	}
}
