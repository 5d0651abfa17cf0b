//go:build e2e

package onenode

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

const (
	// backBudget is a promise: a service that was killed is up again within it.
	backBudget = 10 * time.Second
	// recoverBudget is for everything that depends on it to recover.
	recoverBudget = 30 * time.Second
)

const workload = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: work, namespace: default}
spec:
  replicas: 1
  selector: {matchLabels: {app: work}}
  template:
    metadata: {labels: {app: work}}
    spec:
      terminationGracePeriodSeconds: 1
      containers: [{name: work, image: ` + config.DefaultPauseImage + `}]
`

// Services are killed, one after the other: each restarts by itself, the
// workload continues, and the console shows what happened.
func TestKilledServicesComeBack(t *testing.T) {
	c, _ := e2etest.Shared(t, name, qemu.Container)
	c.Apply(workload)
	pods := 1
	c.Eventually(recoverBudget, "the pod runs", func() error { return available(c, pods) })
	for _, service := range []string{"containerd", "etcd", "kubelet"} {
		t.Run(service, func(t *testing.T) {
			c := c.In(t)
			before := containers(t, c)
			offset := len(c.Text())
			start := time.Now()
			if err := c.Kill(service); err != nil {
				t.Fatal(err)
			}
			failed := c.Says(backBudget, offset, service+": Failed: ", "next try in")
			c.Says(backBudget, offset, service+": Running (up): Health check successful")
			end := time.Now()
			t.Logf("%s: back after %.1fs; the console:", service, end.Sub(start).Seconds())
			for _, line := range c.Lines(offset) {
				if strings.HasPrefix(line.Text, service+": ") {
					t.Logf("  +%.3fs %s", (line.At - failed.At).Seconds(), line.Text)
				}
			}
			if err := c.Promised(start, end, backBudget); err != nil {
				t.Errorf("%s is back: %v", service, err)
			}

			// The cluster works: from the API to a container that starts.
			pods++
			c.Eventually(recoverBudget, "the deployment is scaled", func() error {
				_, err := c.Try("scale", "deployment/work", fmt.Sprintf("--replicas=%d", pods))
				return err
			})
			c.Eventually(recoverBudget, "another pod starts", func() error { return available(c, pods) })
			c.Eventually(recoverBudget, "the node is Ready", func() error {
				out, err := c.Try("get", "nodes", "-o", `jsonpath={.items[0].status.conditions[?(@.type=="Ready")].status}`)
				if err == nil && out != "True" {
					err = fmt.Errorf("Ready is %q", out)
				}
				return err
			})
			t.Logf("%s: another pod runs after %.1fs", service, time.Since(start).Seconds())

			after := containers(t, c)
			for name, id := range before {
				if after[name] != id {
					t.Errorf("%s: container %s was replaced by %s, as %s was killed", name, id, after[name], service)
				}
			}
		})
	}
	t.Run("a task that is half removed", func(t *testing.T) { halfRemoved(t, c.In(t)) })
	c.Kubectl("delete", "deployment", "work", "--cascade=foreground")
}

func available(c *e2etest.Cluster, want int) error {
	out, err := c.Try("get", "deployment", "work", "-o", "jsonpath={.status.availableReplicas}")
	if err == nil && out != fmt.Sprint(want) {
		err = fmt.Errorf("%s of %d pods are available", out, want)
	}
	return err
}

// containers are the running containers of all pods, by pod and with their
// number of restarts. Controllers end when the API doesn't answer for long, as
// without etcd, so theirs don't count.
func containers(t *testing.T, c *e2etest.Cluster) map[string]string {
	t.Helper()
	out := c.Kubectl("get", "pods", "--all-namespaces", "-o",
		`jsonpath={range .items[*]}{.metadata.namespace}/{.metadata.name} {.status.containerStatuses[0].containerID} {.status.containerStatuses[0].restartCount}{"\n"}{end}`)
	all := map[string]string{}
	for line := range strings.Lines(out) {
		name, container, _ := strings.Cut(strings.TrimSpace(line), " ")
		if strings.Contains(name, "/kube-controller-manager-") || strings.Contains(name, "/kube-scheduler-") {
			continue
		}
		all[name] = container
	}
	return all
}
