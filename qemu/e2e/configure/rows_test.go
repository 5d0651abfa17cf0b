//go:build e2e && long

package configure

import (
	"fmt"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

// TestRowsOnANode has the rows that need a node of their own for minutes.
func TestRowsOnANode(t *testing.T) {
	c, m := e2etest.Start(t, "rows", qemu.Container)
	c.Ready(m)
	t.Run("logs and metrics", func(t *testing.T) { observed(t, c.In(t)) })
	t.Run("S-037 a mistake is corrected during the boot", func(t *testing.T) { mended(t, c.In(t)) })
}

const (
	noImage    = "ghcr.io/garboard-os/kubelet:none"
	noEndpoint = "10.5.0.99:6443"
)

// mended: a node whose boot can't end, as its configuration has a wrong control-plane endpoint
// and no kubelet, takes the correction in the default mode, without another reboot.
func mended(t *testing.T, c *e2etest.Cluster) {
	c.Gbctl("patch", "mc", "--on-reboot", "-p", `
machine: {kubelet: {image: `+noImage+`}}
cluster: {controlPlane: {endpoint: "https://`+noEndpoint+`"}}
`)
	c.Gbctl("reboot")
	c.Eventually(2*upBudget, "doctor names the endpoint, and the kubelet waits for its image", func() error {
		out, _ := c.TryGbctl("doctor")
		state, err := c.TryGbctl("service", "kubelet")
		if err == nil && (!strings.Contains(out, noEndpoint) || !strings.Contains(state, noImage) || strings.Contains(state, "[Running]")) {
			err = fmt.Errorf("it says:\n%s\n%s", out, state)
		}
		return err
	})
	said := len(c.Text())
	c.Gbctl("apply-config", "-f", c.Configuration(c.Node()))
	up(c)
	c.Eventually(2*upBudget, "doctor names it no more, and Kubernetes answers", func() error {
		if out, err := c.TryGbctl("doctor"); err != nil || strings.Contains(out, noEndpoint) {
			return fmt.Errorf("%w:\n%s", err, out)
		}
		_, err := c.Try("get", "--raw=/readyz")
		return err
	})
	if strings.Contains(c.Text()[said:], "init: reboot") {
		t.Error("the node has rebooted")
	}
}
