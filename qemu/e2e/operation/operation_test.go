//go:build e2e

// Package operation tests an operation that blocks others. Its node loses power
// in the middle. The operation continues, and is aborted at the end.
package operation

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	podsBudget = 60 * time.Second
	// stepBudget is for a step of an operation to be reached.
	stepBudget = 30 * time.Second
	// backBudget is for a node to boot, to be Ready and to continue.
	backBudget = 90 * time.Second
	// followBudget is for everything that happens while a client follows the operation.
	followBudget = 4 * time.Minute
)

// held is a pod whose disruption budget forbids its eviction.
const held = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: held, namespace: default}
spec:
  selector: {matchLabels: {app: held}}
  template:
    metadata: {labels: {app: held}}
    spec:
      terminationGracePeriodSeconds: 2
      containers: [{name: held, image: IMAGE, command: [/usr/local/bin/kubectl, proxy, --port=8001]}]
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: hold, namespace: default}
spec: {minAvailable: 1, selector: {matchLabels: {app: held}}}
`

// it survives its client and a restart, streams its progress, and keeps
// other operations from running at the same time.
func TestOperationThatIsCutShort(t *testing.T) {
	c, m := e2etest.Ready(t, "operation", qemu.Container, e2etest.Nodes(3, 0), func(o *qemu.Options) {
		o.ControlPlanePatches = [][]byte{[]byte("cluster: {allowSchedulingOnControlPlanes: true}")}
	})
	c.Complete()
	c.Apply(strings.ReplaceAll(held, "IMAGE", config.DefaultAPIServerImage))
	var name, pod string
	c.Eventually(podsBudget, "the held pod is ready", func() error {
		out, err := c.Try("get", "pods", "-l", "app=held", "-o", `jsonpath={range .items[?(@.status.containerStatuses[0].ready==true)]}{.spec.nodeName} {.metadata.uid}{end}`)
		var ok bool
		if name, pod, ok = strings.Cut(out, " "); err == nil && !ok {
			err = fmt.Errorf("it is %q", out)
		}
		return err
	})
	m.Reached("the held pod is ready")
	n, err := c.Find(name)
	if err != nil {
		t.Fatal(err)
	}
	other := c.Nodes[0]
	if other.Name == n.Name {
		other = c.Nodes[1]
	}
	on := func(node qemu.Node, args ...string) (string, error) {
		return c.TryGbctl(append([]string{"-n", node.Address.String()}, args...)...)
	}

	// A client follows it, all the time.
	type said struct {
		out string
		err error
	}
	followed := make(chan said, 1)
	go func() {
		out, err := c.Patient(followBudget).TryGbctl("-n", n.Address.String(), "reboot", "--drain-timeout", "1h")
		followed <- said{out, err}
	}()
	id := draining(c, stepBudget, func() (string, error) { return on(n, "operation", "list") })
	m.Reached("the operation waits for a budget")

	// One at a time: the operation that blocks is named, on this node and on others.
	for _, node := range []qemu.Node{n, other} {
		for _, args := range [][]string{{"reboot"}, {"shutdown"}, {"reset", "--yes"}} {
			c.Eventually(stepBudget, args[0]+" on "+node.Name+" is refused for the one that runs", func() error {
				_, err := on(node, args...)
				if err == nil {
					t.Fatalf("%s on %s begins", args[0], node.Name)
				}
				return hasAll(err.Error(), []string{id})
			})
		}
	}
	c.Eventually(stepBudget, "a plan says so", func() error {
		out, err := on(other, "reboot", "--dry-run")
		if err == nil {
			err = hasAll(out, []string{"node " + name + " is running reboot (" + id + ")"})
		}
		return err
	})

	if err := c.Cut(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	quorum(t, c, n, other, id)
	m.Reached("nobody else goes while its node is off")
	if err := c.On(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	again := draining(c, backBudget, func() (string, error) { return on(n, "operation", "list") })
	if again != id {
		t.Errorf("operation %s goes on as %s", id, again)
	}
	m.Reached("it goes on after a power cut")
	// Until its etcd is back as well, another node is refused because of the quorum.
	c.Eventually(backBudget, "it is in the way again, after the power cut", func() error {
		_, err := on(other, "reboot")
		if err == nil {
			t.Fatal("another node goes, after the power cut")
		}
		return hasAll(err.Error(), []string{id})
	})

	if out, err := on(n, "operation", "abort", id); err != nil {
		t.Fatalf("abort: %v\n%s", err, out)
	}
	var end said
	c.Eventually(stepBudget, "the client hears of the end", func() error {
		select {
		case end = <-followed:
			return nil
		default:
			return fmt.Errorf("it still follows %s", id)
		}
	})
	t.Logf("the client ended with %v, and heard\n%s", end.err, end.out)
	for _, part := range []string{"✓ cordon", "disruption budget hold", id + ": goes on after a restart of the node", "↶ cordon undone", id + " aborted"} {
		if !strings.Contains(end.out, part) {
			t.Errorf("the client doesn't hear %q", part)
		}
	}
	if end.err == nil || strings.Count(end.out, "✓ cordon") != 1 {
		t.Error("the client takes that for a success, or hears things twice")
	}
	m.Reached("it is aborted")

	// Its changes are undone, and there are no others.
	c.Eventually(backBudget, "the node is as before", func() error {
		out, err := c.Try("get", "node", name, "-o", `jsonpath={.spec.unschedulable} {.status.conditions[?(@.type=="Ready")].status}`)
		if err == nil && out != " True" {
			err = fmt.Errorf("cordoned and Ready are %q", out)
		}
		return err
	})
	if out := c.Kubectl("get", "pods", "-l", "app=held", "-o", "jsonpath={.items[*].metadata.uid}"); out != pod {
		t.Errorf("the pod %s is %s now", pod, out)
	}
	c.Eventually(stepBudget, "nobody is in the way any more", func() error {
		out, err := on(other, "reboot", "--dry-run")
		if err == nil && strings.Contains(out, id) {
			err = fmt.Errorf("%s is: %s", id, out)
		}
		return err
	})
	m.Reached("others may go")
	t.Run("power button", func(t *testing.T) { pressed(t, c.In(t), n) })
}

// lockKey is the key of etcd with the holder of the cluster's lock.
const lockKey = "/garboard.dev/operation"

// quorum: with one of three down, none of the others is stopped unless it is
// forced, and the lock stays with the one that is down.
func quorum(t *testing.T, c *e2etest.Cluster, away, asked qemu.Node, id string) {
	t.Helper()
	var third qemu.Node
	for _, n := range c.Nodes {
		if n.Name != away.Name && n.Name != asked.Name {
			third = n
		}
	}
	etcd := c.Etcd(c.Network(), third)
	c.Eventually(stepBudget, "etcd tells of the lock", func() error { // the one that is down may have been the leader
		ctx, cancel := eventually.Context(t.Context(), stepBudget/3)
		defer cancel()
		found, err := etcd.Get(ctx, lockKey)
		if err == nil && (len(found.Kvs) != 1 || !strings.Contains(string(found.Kvs[0].Value), id)) {
			t.Fatalf("the lock isn't %s's: %v", id, found)
		}
		return err
	})
	counted := []string{"stop etcd member " + asked.Name + " (", "the cluster would lose its quorum", "without this one 1 do (" + third.Name + " (", "no answer from " + away.Name + " ("}
	for _, what := range []string{"reboot", "shutdown"} {
		ask := func(args ...string) (string, error) {
			return c.TryGbctl(append([]string{"-n", asked.Address.String(), what}, args...)...)
		}
		c.Eventually(stepBudget, what+" is refused, and says who was counted", func() error {
			_, err := ask()
			if err == nil {
				t.Fatalf("%s goes, and takes the quorum with it", what)
			}
			return hasAll(err.Error(), append(counted, "`gbctl -n "+asked.Address.String()+" "+what+" --force`"))
		})
		c.Eventually(stepBudget, what+" would go by force, and says the same", func() error {
			out, err := ask("--force", "--dry-run")
			return errors.Join(err, hasAll(out, counted))
		})
	}
	c.Eventually(stepBudget, "a change that takes a reboot is refused as well", func() error {
		_, err := c.TryGbctl("-n", asked.Address.String(), "patch", "mc", "--mode", "reboot", "-p", `machine: {sysctls: {net.core.somaxconn: "4242"}}`)
		if err == nil {
			t.Fatal("it goes, and takes the quorum with it")
		}
		return hasAll(err.Error(), append(counted, "the node would reboot for this", "--on-reboot"))
	})
}

func hasAll(text string, parts []string) error {
	for _, part := range parts {
		if !strings.Contains(text, part) {
			return fmt.Errorf("nobody says %q:\n%s", part, text)
		}
	}
	return nil
}

var running = regexp.MustCompile(`((?:reboot|shutdown)-[a-z0-9]+) +running +drain `)

// draining waits until the operation is at its second step, and returns its ID.
func draining(c *e2etest.Cluster, budget time.Duration, list func() (string, error)) (id string) {
	c.Eventually(budget, "the operation waits for the pod", func() error {
		out, err := list()
		if err != nil {
			return err
		}
		found := running.FindStringSubmatch(out)
		if found == nil {
			return fmt.Errorf("there is\n%s", out)
		}
		id = found[1]
		return nil
	})
	return id
}
