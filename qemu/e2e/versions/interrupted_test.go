//go:build e2e && long

package versions

import (
	"slices"
	"testing"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/image/components"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

// long are the steps that aren't over before the power can be cut.
var long = []string{"images", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelets", "verify"}

// An upgrade comes to its end, although its node loses power and its client is killed at each
// step.
func TestUpgradeIsInterrupted(t *testing.T) {
	c, m := e2etest.Ready(t, "upgradecut", qemu.Container, e2etest.Nodes(1, 1), e2etest.OtherKubernetes(t))
	c.Healthy()
	inside := c.Network()
	c.RunWeb(podBudget, withVersion(config.DefaultAPIServerImage, components.OtherKubernetesVersion))
	m.Reached("a pod runs on " + components.OtherKubernetesVersion)
	cut := c.Disturb(e2etest.Disturbance{Node: c.Nodes[0], Command: []string{"upgrade-k8s", "--to", plain(config.KubernetesVersion), "--yes"}})
	for _, step := range long {
		if !slices.Contains(cut, step) {
			t.Errorf("the power was cut at %v, and not at %s", cut, step)
		}
	}
	m.Reached("upgraded")
	c.Eventually(versionBudget, "all is "+config.KubernetesVersion, func() error {
		return runs(c, inside, config.KubernetesVersion, config.KubernetesVersion)
	})
	c.Eventually(podBudget, "the pod is ready", func() error { _, err := c.ContainerID(e2etest.Web); return err })
}
