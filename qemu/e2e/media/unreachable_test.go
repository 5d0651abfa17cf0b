//go:build e2e && long

package media

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/network/registry"
)

// proveBudget is what a system has to become healthy in. It isn't scaled: the node measures it.
const proveBudget = 10 * time.Minute

// Systems that can't be reached from afar, in a worker that is a machine with a BIOS and 1 GiB of memory. One that
// isn't signed as the configuration demands, and one whose kernel is cut off, aren't written. PID 1 of the next one
// hangs, and another one doesn't drive the network card. The machine goes back to the former system by itself, its node
// is Ready and takes pods, and the upgrade of the next node doesn't begin. With a healthy system, one command upgrades
// this machine and another one. (S-190)
func TestSystemWithoutNetwork(t *testing.T) {
	half, cut := e2etest.Installer(t, e2etest.WithHalfAKernel(t, media.Options{Args: args, Version: "v1.4.0"}))
	stuck, hangs := e2etest.Installer(t, e2etest.WithInit(t, media.Options{Args: args, Version: "v1.5.0"}, "hang"))
	layout, upgrade := e2etest.Installer(t, media.Options{Args: append([]string{"module_blacklist=virtio_net"}, args...), Version: "v2.0.0"})
	healthy, next := e2etest.Installer(t, media.Options{Args: args, Version: "v2.1.0"})
	images := httptest.NewServer(registry.New(half, stuck, layout, healthy))
	t.Cleanup(images.Close)
	disk := e2etest.DiskImage(t, media.Options{Args: args, Version: "v1.0.0"})
	all, m := e2etest.Ready(t, "unreachable", qemu.Container, e2etest.Nodes(1, 2), func(o *qemu.Options) {
		o.Mirrors = map[string][]string{e2etest.InstallerHost: {images.URL}}
	})
	machine := func(n qemu.Node) *e2etest.Cluster {
		t.Helper()
		if err := all.Cut(t.Context(), n.Name); err != nil {
			t.Fatal(err)
		}
		all.Kubectl("delete", "node", n.Name) // the machine has other keys: the name is free for it now
		return all.Machine(n, func(o *qemu.Options) { disk(o); o.MemoryMiB = 1024 }, "machine: {install: {disk: /dev/vda}}")
	}
	c := machine(all.Nodes[1]).Patient(systemBudget)
	t.Attr(e2etest.Booted, qemu.QEMU)
	first, second := all.Nodes[1].Name, all.Nodes[2].Name // the second one is a container, until it is a machine, too
	has := func(node string, want ...string) {
		t.Helper()
		c.Eventually(bootBudget, fmt.Sprintf("%s has slots with %q", node, want), func() error {
			out, err := c.TryGbctl("-n", node, "get", "slots")
			for _, text := range want {
				if err == nil && !strings.Contains(out, text) {
					err = errors.New(out)
				}
			}
			return err
		})
	}
	ready := func() {
		t.Helper()
		c.Eventually(bootBudget, "all nodes are Ready, and take pods", func() error {
			out, err := all.Try("get", "nodes", "-o", "jsonpath={.items[*].spec.unschedulable}")
			if err == nil && out != "" {
				err = errors.New("a node is cordoned")
			}
			return errors.Join(err, all.NodesReady(all.Nodes...))
		})
	}
	fails := func(image string, want ...string) {
		t.Helper()
		out, err := c.TryGbctl("-n", first+","+second, "upgrade", "--image", image)
		for _, text := range append(want, "nothing was done, because "+first+" failed") {
			if err == nil || !strings.Contains(out+err.Error(), text) {
				t.Errorf("an upgrade to %s says %v, want %q\n%s", image, err, text, out)
			}
		}
	}
	has(first, "good", "v1.0.0", "empty")
	ready()
	m.Reached("the first system is good, and the nodes are Ready")

	c.Gbctl("-n", first, "patch", "mc", "-p", fmt.Sprintf("machine: {images: {verify: [{prefix: %s/, keys: [%s]}]}}", e2etest.InstallerHost, publicKey(t)))
	fails(next, "isn't signed as machine.images.verify demands for "+e2etest.InstallerHost+"/: it has no signature of cosign")
	c.Gbctl("-n", first, "patch", "mc", "-p", `[{"op": "remove", "path": "/machine/images"}]`)
	m.Reached("a system without a signature is refused")
	fails(cut, "the kernel has ")
	has(first, "v1.0.0", "empty")
	ready()
	m.Reached("a system with half a kernel is refused")

	fails(hangs, "is bad: it was started, and ")
	if !strings.Contains(c.Text(), "this system hangs") {
		t.Error("the next system didn't run")
	}
	has(first, "v1.5.0", "it was started, and didn't become healthy before the machine restarted")
	ready()
	m.Reached("a system that hangs has failed")

	before := len(c.Text())
	c.Gbctl("-n", first, "upgrade", "--image", upgrade, "--wait=false")
	prints := func(budget time.Duration, what, text string) {
		t.Helper()
		c.Eventually(budget, what, func() error {
			_, after, found := strings.Cut(c.Text()[before:], text)
			if !found {
				return errors.New("not yet")
			}
			before = len(c.Text()) - len(after)
			return nil
		})
		m.Reached(what)
	}
	prints(2*bootBudget, "a system without network runs", "Garboard v2.0.0 runs from slot B, which is trying")
	machine(all.Nodes[2]) // there are ten minutes for it
	has(second, "good", "v1.0.0", "empty")
	m.Reached("another worker is a machine")
	prints(proveBudget, "the former system runs again", "Garboard v1.0.0 runs from slot A, which is good")
	has(first, "not healthy within 10m0s", "networkd")
	ready()
	t.Log(c.Patient(2*systemBudget).Gbctl("-n", first+","+second, "upgrade", "--image", next))
	for _, node := range []string{first, second} {
		has(node, "v2.1.0", "healthy")
	}
	ready()
	m.Reached("both machines are upgraded")
}

// publicKey is a key that has signed nothing, as machine.images.verify takes it.
func publicKey(t *testing.T) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		t.Fatal(err)
	}
	return base64.StdEncoding.EncodeToString(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}))
}
