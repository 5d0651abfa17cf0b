//go:build e2e

package onenode

import (
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

const (
	// sickBudget is for a DaemonSet's pod to be replaced, within its grace period of 30 s, and for the node to see
	// that: it looks every 10 s.
	sickBudget = 60 * time.Second
	// codeUnhealthy is gbctl's exit code.
	codeUnhealthy = 7
)

// A node is healthy if Kubernetes serves on it: without kube-proxy it isn't, and with it, it is again.
func TestHealthTellsOfKubernetes(t *testing.T) {
	c, _ := e2etest.Shared(t, name, qemu.Container)
	c.Healthy()
	image := c.Kubectl("-n", "kube-system", "get", "daemonset", "kube-proxy", "-o", "jsonpath={.spec.template.spec.containers[0].image}")
	use := func(image string) time.Time {
		c.Kubectl("-n", "kube-system", "set", "image", "daemonset/kube-proxy", "kube-proxy="+image)
		return time.Now()
	}
	t.Cleanup(func() { _, _ = c.Try("-n", "kube-system", "set", "image", "daemonset/kube-proxy", "kube-proxy="+image) })
	began := use(image + "-none")
	names := regexp.MustCompile(`doesn't serve .* pod kube-system/kube-proxy-\S+: (ErrImagePull|ImagePullBackOff)`)
	c.Eventually(sickBudget, "gbctl health tells of kube-proxy", func() error {
		out, err := c.TryGbctl("health")
		if exit := new(exec.ExitError); !errors.As(err, &exit) || exit.ExitCode() != codeUnhealthy || !names.MatchString(out) {
			return fmt.Errorf("%w: %s", err, out)
		}
		t.Logf("after %.1fs:\n%s", time.Since(began).Seconds(), out)
		return nil
	})
	if found, err := diagnose(c); err != nil || !strings.Contains(all(found), image+"-none") {
		t.Errorf("gbctl doctor: %v: %s", err, all(found))
	}
	if out, err := c.TryGbctl("health", "--wait", "3s"); err == nil {
		t.Errorf("gbctl health --wait: %s", out)
	}

	began = use(image)
	c.Gbctl("health", "--wait", sickBudget.String())
	t.Logf("healthy again after %.1fs:\n%s", time.Since(began).Seconds(), c.Gbctl("health"))
	t.Logf("\n%s", c.Gbctl("get", "nodehealths"))
}
