//go:build e2e && long

package convert

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

const (
	// askBudget is for the operation to ask, and undoBudget for its way back.
	askBudget  = 5 * time.Minute
	undoBudget = 5 * time.Minute
	// backBudget is for a self-hosted control plane to serve again.
	backBudget = 3 * time.Minute
)

// long are the steps that aren't over before the power can be cut.
var long = append([]string{"checkpointer", "confirm"}, programs...)

// The questions of the operation.
const (
	first  = "confirm disabling pod-checkpointer"
	second = "confirm applying static pod definitions"
)

// A conversion is taken back at both questions. Then it comes to its end, although its node
// loses power and its client is killed at each step.
func TestConvertIsInterrupted(t *testing.T) {
	c, m := e2etest.Ready(t, "convertcut", qemu.Container, e2etest.SelfHosted(t))
	c.SelfHost()
	m.Reached("self-hosted, after a reboot")
	c.RunWeb(podBudget, config.DefaultAPIServerImage)
	c.Kubectl("create", "configmap", "kept", "--from-literal=key=value")
	before := stateOf(c)

	abort := func(s *e2etest.Session) {
		c.Gbctl("-n", c.Nodes[0].Address.String(), "operation", "abort", s.Operation())
	}
	for _, way := range []struct {
		name     string
		question string
		take     func(*e2etest.Session)
		says     string
	}{
		{"the answer no at the first question", first, func(s *e2etest.Session) { s.Type("no") }, "failed: checkpointer: it wasn't confirmed"},
		{"an abort at the first question", first, abort, "aborted: aborted by"},
		{"an abort at the second question", second, abort, "aborted: aborted by"},
	} {
		s := c.Session("-n", c.Nodes[0].Address.String(), "convert-k8s", "--remove-checkpoints")
		for s.Asks(askBudget, ""); !s.Prompts(way.question); s.Asks(askBudget, "") {
			s.Type("yes")
		}
		way.take(s)
		if err := s.End(undoBudget); err == nil || !strings.Contains(s.Text(), way.says) {
			t.Errorf("%s: the client ended with %v:\n%s", way.name, err, s.Text())
		}
		c.Eventually(backBudget, way.name+": all is as it was", func() error {
			return asBefore(before, stateOf(c))
		})
		selfHosted(c, true)
		m.Reached(way.name + ": all is as it was")
	}

	pressed := func() {
		if err := c.Off(t.Context(), c.Node()); err != nil {
			t.Fatal(err)
		}
		if err := c.On(t.Context(), c.Node()); err != nil {
			t.Fatal(err)
		}
	}
	cut := c.Disturb(e2etest.Disturbance{
		Node: c.Nodes[0], Command: []string{"convert-k8s"},
		Once: map[string]func(){ // S-299
			"    checking for active pod checkpoints\n": func() {},
			" active pod checkpoints: [":                pressed, // pod-checkpointer is disabled
		},
	})
	for _, step := range long {
		if !slices.Contains(cut, step) {
			t.Errorf("the power was cut at %v, and not at %s", cut, step)
		}
	}
	m.Reached("converted")
	converted(c)
	c.Eventually(podBudget, "the pod runs", func() error { _, err := c.ContainerID(e2etest.Web); return err })
	if value := c.Kubectl("get", "configmap", "kept", "-o", "jsonpath={.data.key}"); value != "value" {
		t.Errorf("the config map has %q", value)
	}
}

// state is what a conversion changes.
type state struct {
	Config  any
	Sets    string // the DaemonSets and their generations, as they are made again
	Secrets string
	Ready   bool
}

func asBefore(before, now state) error {
	if diff := cmp.Diff(before, now); diff != "" {
		return fmt.Errorf("(-before +now):\n%s", diff)
	}
	return nil
}

// stateOf is the state of the first node. It is empty as far as there is no answer.
func stateOf(c *e2etest.Cluster) (now state) {
	text, _ := c.TryGbctl("-n", c.Nodes[0].Address.String(), "get", "mc", "-o", "yaml")
	var resource struct{ Spec any }
	if yaml.Unmarshal([]byte(text), &resource) == nil {
		now.Config = resource.Spec
	}
	const ready = `{range .items[*]}{.metadata.name}: {.status.numberReady} of {.status.desiredNumberScheduled}{"\n"}{end}`
	now.Sets, _ = c.Try("-n", "kube-system", "get", "daemonsets", "-o", "jsonpath="+ready)
	now.Secrets, _ = c.Try("-n", "kube-system", "get", "secrets", "-o", "name")
	_, err := c.TryGbctl("-n", c.Nodes[0].Address.String(), "health")
	now.Ready = err == nil
	return now
}
