//go:build e2e

package operation

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

const (
	// So long after its power button is pressed, a node stops its services. offBudget is how long
	// that takes then, or after a second press. reboot.TestAllNodesAtOnce measures the
	// promises.
	pressBudget = 60 * time.Second
	offBudget   = 30 * time.Second
)

// pressed: the power button goes the way of `gbctl shutdown`. The held pod is on n, and its
// budget lets it go when another one is ready. Both nodes are off afterwards.
func pressed(t *testing.T, c *e2etest.Cluster, n qemu.Node) {
	m := e2etest.Marks(t)
	button := func(n qemu.Node) <-chan error {
		off := make(chan error, 1)
		go func() { off <- c.Off(t.Context(), n.Name) }()
		return off
	}
	ended := func(off <-chan error, start time.Time, limit time.Duration) {
		t.Helper()
		if err := <-off; err != nil { // the cluster cuts the power of a node that hangs
			t.Fatal(err)
		}
		if err := eventually.Took(start, time.Now(), limit); err != nil {
			t.Error(err)
		}
	}

	from := len(console(t, c, n))
	start := time.Now()
	off := button(n)
	c.Kubectl("scale", "deployment", "held", "--replicas=2")
	ended(off, start, pressBudget+offBudget)
	m.Reached(n.Name + " is off")
	text := console(t, c, n)[from:]
	inOrder(t, text, "power off asked for by SIGTERM: pods move to other nodes first", " cordon: done", " drain: running", " drain: done", " end: running", "power off now")
	if is := state(t, c, n); is != "off" {
		t.Errorf("%s is %q", n.Name, is)
	}
	if by := c.Kubectl("get", "node", n.Name, "-o", `jsonpath={.spec.unschedulable} {.metadata.annotations.garboard\.dev/cordoned-by}`); !strings.HasPrefix(by, "true shutdown-") {
		t.Errorf("%s is cordoned by %q", n.Name, by)
	}
	var at string
	c.Eventually(stepBudget, "the pod is ready on another node", func() error {
		out, err := c.Try("get", "pods", "-l", "app=held", "-o", `jsonpath={range .items[?(@.status.containerStatuses[0].ready==true)]}{.spec.nodeName} {end}`)
		nodes := strings.Fields(out)
		if err == nil && (len(nodes) == 0 || slices.Contains(nodes, n.Name)) {
			err = fmt.Errorf("it is on %q", nodes)
		}
		if err == nil {
			at = nodes[0]
		}
		return err
	})

	// With n off, etcd can't do without one more: that is a warning. Now no pod may go.
	c.Kubectl("patch", "poddisruptionbudget", "hold", "--type=merge", "-p", `{"spec":{"minAvailable":2}}`)
	next, err := c.Find(at)
	if err != nil {
		t.Fatal(err)
	}
	from = len(console(t, c, next))
	off = button(next)
	id := draining(c, stepBudget, func() (string, error) {
		return c.TryGbctl("-n", next.Address.String(), "operation", "list")
	})
	c.Eventually(stepBudget, "its console names the budget", func() error {
		return hasAll(console(t, c, next)[from:], []string{"disruption budget hold"})
	})
	m.Reached(next.Name + " waits for a budget")
	start = time.Now()
	again := button(next)
	ended(off, start, offBudget)
	ended(again, start, offBudget)
	m.Reached(next.Name + " is off")
	text = console(t, c, next)[from:]
	inOrder(t, text, "power off asked for by SIGTERM: pods move to other nodes first", id+": warning: stop etcd member "+next.Name, id+" drain: running", "power off now")
	if err := hasAll(text, []string{"the cluster would lose its quorum", "no answer from " + n.Name + " ("}); err != nil {
		t.Error(err)
	}
	// The twin: the time for the pods wasn't up.
	for _, step := range []string{" drain: skipped", " drain: done", " end: "} {
		if strings.Contains(text, id+step) {
			t.Errorf("%s had been pressed twice, and goes on:\n%s", next.Name, text)
		}
	}
	if is := state(t, c, next); is != "off" {
		t.Errorf("%s is %q", next.Name, is)
	}
}

func console(t *testing.T, c *e2etest.Cluster, n qemu.Node) string {
	t.Helper()
	text, err := os.ReadFile(c.Console(n.Name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// inOrder: the text has all parts, each after the one before it.
func inOrder(t *testing.T, text string, parts ...string) {
	t.Helper()
	left := text
	for _, part := range parts {
		_, after, has := strings.Cut(left, part)
		if !has {
			t.Fatalf("no %q, in this place, in\n%s", part, text)
		}
		left = after
	}
}

// state is "off" if the node has powered off by itself.
func state(t *testing.T, c *e2etest.Cluster, n qemu.Node) string {
	t.Helper()
	all, err := c.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range all {
		if s.Name == n.Name {
			return s.State
		}
	}
	t.Fatalf("there is no node %s", n.Name)
	return ""
}
