//go:build e2e && long

// Package versions tests a cluster of an older version of Kubernetes, its upgrade to the
// version of this release, and the way back. Its nodes can pull the images of both.
package versions

import (
	"context"
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
	// wideBudget is for four nodes, whose kubelets change one after another.
	wideBudget  = 20 * time.Minute
	writeBudget = 30 * time.Second
	// silence is the promise to clients of the load balancer: how long an upgrade may take the
	// API server from them.
	silence = 2 * time.Second
	// versionBudget is for all programs to be of a version: they pull its images and start.
	versionBudget = 90 * time.Second
)

// the older version accepts all that a node renders.
func TestQ16OtherKubernetes(t *testing.T) {
	c, m := e2etest.Ready(t, "versions", qemu.Container, ownManagers(t)...)
	before := c.RunWeb(podBudget, withVersion(config.DefaultAPIServerImage, components.OtherKubernetesVersion))
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
		s := c.Session("-n", node, "upgrade-k8s", "--to", plain(to))
		if err := s.End(upgradeBudget); err != nil {
			t.Fatalf("%v\n%s", err, s.Text())
		}
		c.Golden("upgrade-k8s-to-"+to, s.Text())
		if err := runs(c, to, append(staticPods, config.DefaultProxyImage)...); err != nil {
			t.Errorf("after the operation: %v", err)
		}
		c.Eventually(podBudget, "the pod is ready", func() error {
			after, err := c.ContainerID(e2etest.Web)
			if err == nil && after != before {
				t.Errorf("the change has replaced container %s by %s", before, after)
			}
			return err
		})
		m.Reached("the same pod runs on " + to)
	}
	c.Golden("upgrade-k8s-fails", diesLate(c))
	m.Reached("a controller manager that fails late has its former image")
}

// ownManager is an image of a registry of the user's own. In the new version it has a program
// that fails when it has been healthy for a while.
const ownManager = "registry.example/own/manager:" + config.KubernetesVersion

// ownManagers are the options for nodes that can pull it.
func ownManagers(t *testing.T) []e2etest.Option {
	return []e2etest.Option{
		e2etest.OtherKubernetes(t),
		e2etest.WithName(t, withVersion(ownManager, components.OtherKubernetesVersion), withVersion(config.DefaultControllerManagerImage, components.OtherKubernetesVersion)),
		e2etest.WithProgram(t, ownManager, "dying", "usr/local/bin/kube-controller-manager"),
	}
}

// diesLate: the upgrade stops at the first control plane, and its controller manager has the
// former image again. The others have it all the time.
func diesLate(c *e2etest.Cluster) (transcript string) {
	t := c.T()
	t.Helper()
	former := withVersion(ownManager, components.OtherKubernetesVersion)
	useManager(c, former)
	hasManager(c, former)
	s := c.Session("-n", c.Nodes[0].Address.String(), "upgrade-k8s", "--to", plain(config.KubernetesVersion))
	if err := s.End(upgradeBudget); err == nil {
		t.Errorf("the upgrade succeeds")
	}
	if n := strings.Count(s.Text(), "… kube-controller-manager "); n != 1 {
		t.Errorf("the upgrade has changed the controller manager of %d nodes:\n%s", n, s.Text())
	}
	hasManager(c, former)
	for _, n := range c.ControlPlanes() {
		if text := c.Gbctl("-n", n.Address.String(), "get", "mc", "-o", "yaml"); strings.Contains(text, ownManager) {
			t.Errorf("the configuration of %s has the image that fails:\n%s", n.Name, text)
		}
	}
	return s.Text()
}

// useManager gives all control planes an image for the controller manager. One node after another is healthy with it. Where two images have
// the same content, containerd has one name for both.
func useManager(c *e2etest.Cluster, image string) {
	c.T().Helper()
	var nodes []string
	for _, n := range c.ControlPlanes() {
		nodes = append(nodes, n.Address.String())
	}
	c.Patient(upgradeBudget).Gbctl("-n", strings.Join(nodes, ","), "patch", "mc", "-p", "cluster: {controllerManager: {image: \""+image+"\"}}")
	c.Healthy()
}

// hasManager waits until all control planes run an image as the controller manager.
func hasManager(c *e2etest.Cluster, image string) {
	c.T().Helper()
	for _, n := range c.ControlPlanes() {
		c.Eventually(versionBudget, image+" runs on "+n.Name, func() error {
			pods, err := c.TryGbctl("-n", n.Address.String(), "containers", "-k")
			if err == nil && !e2etest.Row(pods, image, "CONTAINER_RUNNING") {
				err = fmt.Errorf("containers are\n%s", pods)
			}
			return err
		})
	}
	c.Healthy()
}

// One command moves three control planes and a worker to another version while clients write:
// nothing that was acknowledged is lost. An upgrade that failed before that has changed one
// node, and has changed it back.
func TestUpgradeUnderLoad(t *testing.T) {
	c, m := e2etest.Ready(t, "upgrade3", qemu.Container, append(ownManagers(t), e2etest.Nodes(3, 1))...)
	c.Healthy()
	m.Reached("all control planes serve")
	load := c.Write(e2etest.KubernetesStore(c.Endpoint()))
	load.Goes(writeBudget, "before the upgrade")
	t.Log(diesLate(c))
	m.Reached("an upgrade has failed at the first node")
	useManager(c, withVersion(config.DefaultControllerManagerImage, components.OtherKubernetesVersion))
	load.Goes(writeBudget, "after the upgrade that failed")
	out, err := c.Patient(wideBudget).TryGbctl("-n", c.Nodes[1].Address.String(), "upgrade-k8s", "--to", plain(config.KubernetesVersion), "--yes")
	t.Log(out)
	if err != nil {
		t.Fatal(err)
	}
	longest := load.Longest() // Goes begins a new one
	m.Reached("all nodes run " + config.KubernetesVersion)
	load.Goes(writeBudget, "after the upgrade")
	load.Stop()
	load.Complete(writeBudget, map[string]func(context.Context) (map[string]string, error){"the API server": load.Read})
	t.Logf("the longest time without an acknowledged write was %s", longest.Took)
	if err := c.Promised(longest.From, longest.From.Add(longest.Took), silence); err != nil {
		t.Errorf("without an acknowledged write: %v", err)
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
