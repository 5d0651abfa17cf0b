//go:build e2e && long

// Package renamed tests nodes that get other names, and the same name: the second machine with
// a name doesn't register, and both say why.
package renamed

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	// joinBudget is for a renamed kubelet to get its certificate, and for its node to be Ready.
	joinBudget = time.Minute
	// tellBudget is for a machine to ask for a name, and for doctor to report the answer.
	tellBudget = 30 * time.Second
	// stayBudget is longer than a problem may last before it is a warning (problemTime of package doctor).
	stayBudget = 150 * time.Second
	// freeBudget is for a kubelet that waits to ask again (a minute at most), to begin, and to be Ready.
	freeBudget = 2 * time.Minute
)

func TestTwoNodesWithOneName(t *testing.T) {
	c, m := e2etest.Ready(t, "renamed", qemu.Container, e2etest.Nodes(1, 2))
	control, first, second := c.Nodes[0], c.Nodes[1], c.Nodes[2]
	rename := func(n qemu.Node, name string) {
		c.Gbctl("-n", n.Address.String(), "patch", "mc", "-p", "{machine: {network: {hostname: "+name+"}}}")
	}
	c.Gbctl("-n", first.Address.String(), "patch", "mc", "-p", `{machine: {sysctls: {net.ipv4.ipforward: "1"}}}`)
	c.Eventually(tellBudget, "the doctor says that a parameter isn't there", says(c, first, "INFO SysctlStatuses net.ipv4.ipforward has a problem", "problem-stays"))
	rename(first, "renamed-1")
	registered := func(name string, n qemu.Node) func() error {
		return func() error {
			out, err := c.Try("get", "node", name, "-o", `jsonpath={.status.addresses[0].address} {.status.conditions[?(@.type=="Ready")].status}`)
			if want := n.Address.String() + " True"; err == nil && out != want {
				err = fmt.Errorf("it is %q, want %q", out, want)
			}
			return err
		}
	}
	c.Eventually(joinBudget, "the first machine has registered as renamed-1", registered("renamed-1", first))
	m.Reached("the first machine has its new name")
	c.Kubectl("delete", "node", first.Name)
	if _, err := c.TryGbctl("-n", first.Address.String(), "doctor"); err != nil {
		t.Error(err)
	}

	rename(second, "renamed-1") // a configuration copied from the neighbour
	c.Eventually(tellBudget, "the second machine waits, and says why", says(c, second, "node-name-taken", "ERROR", "doesn't register",
		"the name renamed-1 belongs to a machine with another key, at "+first.Address.String(), "machine.network.hostname", "kubectl delete node renamed-1"))
	c.Eventually(tellBudget, "the first machine says it, too", says(c, first, "node-name-taken", "WARNING", "wants the name \"renamed-1\"", second.Name))
	m.Reached("both say why")
	if err := registered("renamed-1", first)(); err != nil {
		t.Errorf("the Node of the first machine: %v", err)
	}
	if out := c.Gbctl("-n", second.Address.String(), "service", "kubelet"); !strings.Contains(out, "belongs to a machine with another key") {
		t.Errorf("the service doesn't say what it waits for:\n%s", out)
	}

	// A control plane makes its certificate itself.
	rename(control, "renamed-1")
	c.Eventually(tellBudget, "the control plane waits for the name, and says why", says(c, control, "node-name-taken", "ERROR", "doesn't register",
		"has the name renamed-1", first.Address.String()))
	rename(control, control.Name)
	c.Eventually(freeBudget, "the control plane has its name again", registered(control.Name, control))
	if err := registered("renamed-1", first)(); err != nil {
		t.Errorf("the Node of the first machine: %v", err)
	}
	m.Reached("a control plane doesn't take the name, either")

	rename(second, "renamed-2")
	c.Eventually(freeBudget, "the second machine has registered as renamed-2", registered("renamed-2", second))
	c.Kubectl("delete", "node", second.Name)
	m.Reached("the second machine has a name of its own")
	c.Eventually(freeBudget, "logs of its pods can be read: it has a serving certificate", func() error {
		pods, err := c.Try("get", "pods", "-n", "kube-system", "-l", "k8s-app=kube-proxy", "--field-selector", "spec.nodeName=renamed-2", "-o", "name")
		if err == nil && pods == "" {
			err = errors.New("there is no pod of kube-proxy")
		}
		if err == nil {
			_, err = c.Try("logs", "-n", "kube-system", strings.TrimSpace(pods), "--tail=1")
		}
		return err
	})
	c.Eventually(stayBudget, "the parameter that isn't there is a warning", says(c, first, "WARNING SysctlStatuses net.ipv4.ipforward has a problem"))
}

// says is nil once doctor of the node has a finding with these words.
func says(c *e2etest.Cluster, n qemu.Node, words ...string) func() error {
	return func() error {
		out, _ := c.TryGbctl("-n", n.Address.String(), "doctor") // the exit code says that there is an error
		for _, word := range words {
			if !strings.Contains(out, word) {
				return fmt.Errorf("%q isn't in\n%s", word, out)
			}
		}
		return nil
	}
}
