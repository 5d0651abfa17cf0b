//go:build e2e && long

// Package versions tests a cluster of an older version of Kubernetes, its upgrade to the
// version of this release, and the way back. Its nodes can pull the images of both.
package versions

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/image/components"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	// podBudget is for a pod to be scheduled and to be ready.
	podBudget = 20 * time.Second
	// upgradeBudget is for the whole operation: the first node of each of three programs is
	// watched for half a minute.
	upgradeBudget = 6 * time.Minute
	// versionBudget is for all programs to be of a version: they pull its images and start.
	versionBudget = 90 * time.Second
)

// web runs until the end: an upgrade must not restart it.
const web = `
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: default}
spec:
  containers:
  - name: web
    image: IMAGE
    command: [/usr/local/bin/kubectl, proxy, --address=0.0.0.0, --port=8080, --accept-hosts=.*, --www=/etc/ssl/certs, --www-prefix=/certs/]
    readinessProbe: {httpGet: {path: /certs/ca-certificates.crt, port: 8080}, periodSeconds: 1, timeoutSeconds: 5}
`

// the older version accepts all that a node renders.
func TestQ16OtherKubernetes(t *testing.T) {
	c, m := e2etest.Ready(t, "versions", qemu.Container, e2etest.OtherKubernetes(t))
	c.Apply(strings.ReplaceAll(web, "IMAGE", withVersion(config.DefaultAPIServerImage, components.OtherKubernetesVersion)))
	var before string
	c.Eventually(podBudget, "the pod is ready", func() (err error) {
		before, err = c.ContainerID("web")
		return err
	})
	c.Eventually(versionBudget, "all is "+components.OtherKubernetesVersion, func() error {
		return runs(c, components.OtherKubernetesVersion, append(staticPods, config.DefaultProxyImage)...)
	})
	m.Reached("a pod runs on " + components.OtherKubernetesVersion)

	node := c.Nodes[0].Address.String()
	// An image that no registry has: nothing changes.
	out, err := c.Patient(upgradeBudget).TryGbctl("-n", node, "upgrade-k8s", "--to", missing)
	if err == nil || !strings.Contains(fmt.Sprint(out, err), "images") {
		t.Errorf("upgrade to %s, which isn't there: %v\n%s", missing, err, out)
	}
	if text := c.Gbctl("-n", node, "get", "mc", "-o", "yaml"); strings.Contains(text, missing) {
		t.Errorf("the configuration has version %s:\n%s", missing, text)
	}
	m.Reached("a version that isn't there is refused")

	t.Log(c.Gbctl("-n", node, "upgrade-k8s", "--to", plain(config.KubernetesVersion), "--dry-run"))
	for _, to := range []string{config.KubernetesVersion, components.OtherKubernetesVersion} { // S-316, S-317, S-323
		t.Log(c.Patient(upgradeBudget).Gbctl("-n", node, "upgrade-k8s", "--to", plain(to), "--yes"))
		if err := runs(c, to, append(staticPods, config.DefaultProxyImage)...); err != nil {
			t.Errorf("after the operation: %v", err)
		}
		c.Eventually(podBudget, "the pod is ready", func() error {
			after, err := c.ContainerID("web")
			if err == nil && after != before {
				t.Errorf("the change has replaced container %s by %s", before, after)
			}
			return err
		})
		m.Reached("the same pod runs on " + to)
	}
}

// missing is a version that no registry has.
const missing = "1.36.99"

// plain is a version without its v.
func plain(version string) string { return strings.TrimPrefix(version, "v") }

// withVersion returns a default image of Kubernetes, of another version.
func withVersion(image, version string) string {
	return strings.TrimSuffix(image, config.KubernetesVersion) + version
}

// staticPods are the default images of the static pods.
var staticPods = []string{config.DefaultAPIServerImage, config.DefaultControllerManagerImage, config.DefaultSchedulerImage}

// runs returns nil if the API server and the kubelet report a version, and containers of
// these images run in the same version.
func runs(c *e2etest.Cluster, version string, images ...string) error {
	answer, err := c.Endpoint().Get(c.T().Context(), "/version")
	if err != nil {
		return err
	}
	var server struct{ GitVersion string }
	if err := json.Unmarshal(answer, &server); err != nil {
		return err
	}
	if server.GitVersion != version {
		return fmt.Errorf("the API server is %s", server.GitVersion)
	}
	kubelet, err := c.Try("get", "node", c.Node(), "-o", "jsonpath={.status.nodeInfo.kubeletVersion}")
	if err == nil && kubelet != version {
		err = fmt.Errorf("the kubelet is %s", kubelet)
	}
	if err != nil {
		return err
	}
	pods, err := c.TryGbctl("containers", "-k")
	if err != nil {
		return err
	}
	for _, name := range images {
		if !e2etest.Row(pods, withVersion(name, version), "CONTAINER_RUNNING") {
			return fmt.Errorf("no %s runs:\n%s", withVersion(name, version), pods)
		}
	}
	return nil
}
