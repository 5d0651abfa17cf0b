//go:build e2e && long

package mirror

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/image/components"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/network/registry"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
)

const (
	upgradeBudget = 8 * time.Minute
	// talkBudget is for a packet of a node that sends its logs.
	talkBudget = 30 * time.Second
)

// A cluster begins, grows by a control plane, is upgraded and gets a node back without the internet: its images come
// from two bundles on a workstation, and no packet is for an address outside of its network. An upgrade whose bundle
// lacks an image doesn't begin.
func TestAirGap(t *testing.T) {
	var both qemu.Options
	e2etest.OtherKubernetes(t)(&both)
	source := httptest.NewServer(registry.New(both.Images))
	t.Cleanup(source.Close)
	dir := t.TempDir()
	old := strings.TrimPrefix(components.OtherKubernetesVersion, "v")
	current := strings.TrimPrefix(config.KubernetesVersion, "v")
	of := func(version string) []string {
		return strings.Fields(e2etest.Gbctl(t, "images", "list", "--for", "upgrade", "--to", version))
	}
	var system []string // those that are no program of Kubernetes
	for _, image := range config.DefaultImages() {
		if !slices.Contains(of(current), image) {
			system = append(system, image)
		}
	}
	bundle := func(name string, images []string) *registry.Archive {
		t.Helper()
		file := filepath.Join(dir, name)
		e2etest.Gbctl(t, append([]string{"images", "bundle", "-O", file, "--registry-mirror", "*=" + source.URL}, images...)...)
		archive, err := registry.OpenArchive(file)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { archive.Close() })
		return archive
	}
	first, next := bundle("cluster.tar", append(system, of(old)...)), bundle("upgrade.tar", of(current))
	proxy := strings.TrimSuffix(config.DefaultProxyImage, config.KubernetesVersion) + config.KubernetesVersion
	without := bundle("without.tar", slices.DeleteFunc(of(current), func(image string) bool { return image == proxy }))
	var serves atomic.Pointer[registry.Registry]
	serves.Store(registry.Serve(first, without))
	workstation := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { serves.Load().ServeHTTP(w, r) }))
	t.Cleanup(workstation.Close)
	at, err := url.Parse(workstation.URL)
	if err != nil {
		t.Fatal(err)
	}
	nothing := t.TempDir()
	if _, err := layout.Write(nothing, empty.Index); err != nil {
		t.Fatal(err)
	}

	c, m := e2etest.Start(t, "airgap", qemu.Container, e2etest.Nodes(2, 1), func(o *qemu.Options) {
		o.KubernetesVersion, o.Images, o.Later = components.OtherKubernetesVersion, nothing, 1
		o.Mirrors = map[string][]string{"*": {fmt.Sprintf("http://10.5.0.1:%s", at.Port())}}
	})
	outside := c.Audit()
	c.Ready(m)
	if err := c.On(t.Context(), c.Nodes[1].Name); err != nil {
		t.Fatal(err)
	}
	c.Eventually(upgradeBudget, "the cluster has grown by a control plane", func() error { return c.NodesReady(c.Nodes...) })
	c.Healthy()
	m.Reached("the cluster has grown, and is healthy")

	node := c.Nodes[0].Address.String()
	out, err := c.Patient(upgradeBudget).TryGbctl("-n", node, "upgrade-k8s", "--to", current, "--yes")
	if text := fmt.Sprint(out, err); err == nil || !strings.Contains(text, proxy) {
		t.Errorf("an upgrade without the image %s: %s", proxy, text)
	}
	if text := c.Gbctl("-n", node, "get", "mc", "-o", "yaml"); strings.Contains(text, config.KubernetesVersion) {
		t.Errorf("the upgrade that lacks an image has begun:\n%s", text)
	}
	if out, err := c.TryGbctl("-n", node, "images", "verify", "--for", "upgrade", "--to", current); err == nil || !strings.Contains(err.Error(), "1 of 5 images can't be had") {
		t.Errorf("before the upgrade: %v\n%s", err, out)
	}
	m.Reached("an upgrade that lacks an image is refused")
	serves.Store(registry.Serve(first, next))
	c.Gbctl("-n", node, "images", "verify", "--for", "upgrade", "--to", current)
	c.Patient(upgradeBudget).Gbctl("-n", node, "upgrade-k8s", "--to", current, "--yes")
	m.Reached("the cluster is upgraded")
	worker := c.Nodes[2]
	c.Patient(upgradeBudget).Gbctl("-n", worker.Address.String(), "reset", "--system-labels-to-wipe", "EPHEMERAL", "--reboot", "--yes")
	c.Eventually(upgradeBudget, "the worker is back, with an empty disk", func() error { return c.NodesReady(c.Nodes...) })
	m.Reached("a node has joined with an empty disk")

	if text := outside(); text != "" {
		t.Errorf("packets were for addresses outside of the nodes' network:\n%s", text)
	}
	// The filter sees what it is for.
	c.Gbctl("-n", node, "patch", "mc", "-p", "machine: {logging: {destinations: [{endpoint: 'udp://192.0.2.1:514', format: json_lines}]}}")
	c.Eventually(talkBudget, "the filter sees a packet", func() error {
		if text := outside(); !strings.Contains(text, "192.0.2.1") {
			return errors.New(text)
		}
		return nil
	})
}
