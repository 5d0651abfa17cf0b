//go:build e2e && long

// Package convert tests the conversion of a self-hosted control plane to static pods.
package convert

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	podBudget     = 60 * time.Second
	convertBudget = 10 * time.Minute
	writeBudget   = 30 * time.Second
	// silence is the promise to clients of the load balancer: how long a conversion may take
	// the API server from them.
	silence = 5 * time.Second
)

var programs = []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler"}

// selfHosted checks what the node reports.
func selfHosted(c *e2etest.Cluster, want bool) {
	c.T().Helper()
	out := c.Gbctl("-n", c.Nodes[0].Address.String(), "get", "bs")
	if got := strings.Contains(out, "true"); got != want {
		c.T().Errorf("self-hosted is %v, want %v:\n%s", got, want, out)
	}
}

// converted checks that the programs of the first node are static pods, and nothing else.
func converted(c *e2etest.Cluster) {
	t := c.T()
	t.Helper()
	selfHosted(c, false)
	sets := c.Kubectl("-n", "kube-system", "get", "daemonsets", "-o", "name")
	pods := c.Kubectl("-n", "kube-system", "get", "pods", "-o", "name")
	for _, program := range programs {
		if strings.Contains(sets, "/"+program) || !strings.Contains(pods, "pod/"+program+"-"+c.Node()) {
			t.Errorf("%s isn't a static pod only:\n%s\n%s", program, sets, pods)
		}
	}
	if strings.Contains(sets+pods, "pod-checkpointer") {
		t.Errorf("pod-checkpointer is still there:\n%s\n%s", sets, pods)
	}
}

// S-260, S-290 to S-303: a control plane is self-hosted over a reboot, goes back to it at the
// answer no, and becomes static pods while pods run on.
func TestS301Convert(t *testing.T) {
	c, m := e2etest.Ready(t, "convert", qemu.Container, e2etest.SelfHosted(t))
	c.SelfHost()
	m.Reached("self-hosted, after a reboot")
	node := c.Nodes[0].Address.String()
	selfHosted(c, true)
	before := c.RunWeb(podBudget, config.DefaultAPIServerImage)

	dry := c.Gbctl("-n", node, "convert-k8s", "--dry-run")
	t.Log(dry)
	if strings.Contains(dry, "the DaemonSet has") {
		t.Errorf("the new definitions differ:\n%s", dry)
	}
	if text := c.Gbctl("-n", node, "get", "mc", "-o", "yaml"); strings.Contains(text, "aggregatorCA") {
		t.Errorf("the dry run has changed the configuration:\n%s", text)
	}

	s := c.Session("-n", node, "convert-k8s", "--remove-checkpoints")
	for _, question := range []string{first, second} {
		s.Asks(askBudget, question)
		s.Type("yes")
	}
	if err := s.End(convertBudget); err != nil {
		t.Fatalf("%v\n%s", err, s.Text())
	}
	c.Golden("convert-k8s", s.Text())
	m.Reached("converted")
	c.Eventually(podBudget, "the pod is as it was", func() error {
		after, err := c.ContainerID(e2etest.Web)
		if err == nil && after != before {
			t.Errorf("the conversion has replaced container %s by %s", before, after)
		}
		return err
	})
	converted(c)

	c.Gbctl("-n", node, "reboot", "--wait")
	m.Reached("rebooted")
	c.Eventually(podBudget, "the static pods are ready", func() error {
		out, err := c.TryGbctl("-n", node, "health")
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		return err
	})
	selfHosted(c, false)
}

// Three control planes are converted while clients write and read: nothing that was
// acknowledged is lost.
func TestConvertUnderLoad(t *testing.T) {
	c, m := e2etest.Ready(t, "convert3", qemu.Container, e2etest.Nodes(3, 0), e2etest.SelfHosted(t))
	c.SelfHost()
	m.Reached("self-hosted, after a reboot of all nodes at once")
	load := c.Write(e2etest.KubernetesStore(c.Endpoint()))
	load.Goes(writeBudget, "before the conversion")
	out, err := c.Patient(convertBudget).TryGbctl("-n", c.Nodes[1].Address.String(), "convert-k8s", "--remove-checkpoints", "--yes")
	t.Log(out)
	if err != nil {
		t.Fatal(err)
	}
	longest := load.Longest() // Goes begins a new one
	m.Reached("converted")
	load.Goes(writeBudget, "after the conversion")
	load.Stop()
	load.Complete(writeBudget, map[string]func(context.Context) (map[string]string, error){"the API server": load.Read})
	t.Logf("the longest time without an acknowledged write was %s", longest.Took)
	if err := c.Promised(longest.From, longest.From.Add(longest.Took), silence); err != nil {
		t.Errorf("without an acknowledged write: %v", err)
	}
}
