//go:build e2e && long

package registries

import (
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

// cosign builds cosign, and returns what runs it in a directory with the keys.
func cosign(t *testing.T) (keys string, run func(args ...string)) {
	t.Helper()
	keys = t.TempDir()
	program := filepath.Join(keys, "cosign")
	build := exec.CommandContext(t.Context(), "go", "build", "-mod=readonly", "-o", program, "github.com/sigstore/cosign/v2/cmd/cosign")
	build.Dir = "cosign"
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build cosign: %v: %s", err, out)
	}
	return keys, func(args ...string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), program, args...)
		cmd.Dir, cmd.Env = keys, append(os.Environ(), "COSIGN_PASSWORD=", "HOME="+keys)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("cosign %v: %v: %s", args, err, out)
		}
	}
}

// digestOf is what a registry has under a name.
func digestOf(t *testing.T, ref string) string {
	t.Helper()
	parsed, err := name.ParseReference(ref)
	if err != nil {
		t.Fatal(err)
	}
	head, err := remote.Head(parsed)
	if err != nil {
		t.Fatal(err)
	}
	return head.Digest.String()
}

// A rule accepts an image that a real cosign has signed with the key, and refuses an image without a signature, and one that somebody else has signed.
func TestSignedImages(t *testing.T) {
	const signed, unsigned, foreign = "site/kubelet", "site/unsigned", "site/foreign"
	dir := t.TempDir()
	from := e2etest.Built(t, qemu.Container).Layout
	for _, repository := range []string{signed, unsigned, foreign} {
		// Their digests differ, so that a signature is for one of them.
		store(t, dir, from, map[string]string{config.DefaultKubeletImage: repository + ":1"}, ownLayerOf(t))
	}
	well := localhost(t)
	serve(t, nil, dir, well, nil)
	keys, run := cosign(t)
	for key, repository := range map[string]string{"site": signed, "other": foreign} {
		run("generate-key-pair", "--output-key-prefix", key)
		run("sign", "--key", key+".key", "--tlog-upload=false", "--allow-http-registry", "--yes", well+"/"+repository+"@"+digestOf(t, well+"/"+repository+":1"))
	}
	public, err := os.ReadFile(filepath.Join(keys, "site.pub"))
	if err != nil {
		t.Fatal(err)
	}

	c, m := e2etest.Ready(t, "signed", qemu.Container)
	inside, host := c.Network(), gateway+":5082"
	serve(t, inside, dir, host, nil)
	patch := func(text string) {
		t.Helper()
		c.Gbctl("-n", c.Node(), "patch", "mc", "-p", text)
	}
	patch(fmt.Sprintf("machine: {registries: {mirrors: {signed.test: {endpoints: [\"http://%s\"]}}}, images: {verify: [{prefix: signed.test/, keys: [%s]}]}}",
		host, base64.StdEncoding.EncodeToString(public)))
	says := func(repository, want string) {
		t.Helper()
		patch("machine: {kubelet: {image: signed.test/" + repository + ":1}}")
		c.Eventually(pullBudget, repository+": "+want, func() error {
			out, err := c.TryGbctl("-n", c.Node(), "service", "kubelet")
			lines := strings.Split(out, "\n")
			if err == nil && !(strings.Contains(out, "signed.test/"+repository) && slices.ContainsFunc(lines, func(l string) bool { return strings.Contains(l, want) })) {
				err = errors.New(out)
			}
			return err
		})
		m.Reached(repository + ": " + want)
	}
	const refused = "isn't signed as machine.images.verify demands for signed.test/: "
	says(unsigned, refused+"it has no signature of cosign")
	says(foreign, refused+"a signature is of another key")
	says(signed, "Pulling image signed.test/"+signed)
	c.Ready(m)
	c.Eventually(pullBudget, "the kubelet runs from the signed image", func() error {
		out, err := c.TryGbctl("-n", c.Node(), "containers")
		if err == nil && !strings.Contains(out, "signed.test/"+signed) {
			err = errors.New(out)
		}
		return err
	})
}
