//go:build e2e && long

// Package endpoint tests a cluster that loses its endpoint after its nodes have
// joined, and with it the control plane that a worker was connected to. The
// worker continues with the other control planes, also after a reboot.
package endpoint

import (
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
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
	// voteBudget is for three control planes to be members, and to be known.
	voteBudget = 60 * time.Second
	// connectBudget is for a kubelet to connect again.
	connectBudget = 15 * time.Second
	// podBudget is for a pod on a node that has its image.
	podBudget = 30 * time.Second
	// bootBudget is for a worker to boot, and for its kubelet to renew its lease.
	bootBudget = 60 * time.Second
	// answerBudget is for an API server that has just changed to another etcd.
	answerBudget = 30 * time.Second
	// watched is how long renewals are watched. A kubelet renews its lease every
	// ten seconds, and counts as lost after fifty.
	watched  = 60 * time.Second
	maxGap   = 30 * time.Second
	leaseGap = 10 * time.Second
)

// pods run only on the worker.
const pods = `
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
      containers: [{name: work, image: IMAGE, command: [/usr/local/bin/kubectl, proxy, --port=8001]}]
`

// S-222
func TestEndpointGone(t *testing.T) {
	c, m := e2etest.Ready(t, "endpoint", qemu.Container, e2etest.Nodes(3, 1))
	worker := c.Nodes[3]
	c.Apply(strings.ReplaceAll(pods, "IMAGE", config.DefaultAPIServerImage))
	running := func(count int) func() error {
		return func() error {
			out, err := c.Try("get", "pods", "-l", "app=work", "--field-selector", "status.phase=Running", "-o", `jsonpath={range .items[*]}{.spec.nodeName}{"\n"}{end}`)
			if err == nil && len(strings.Fields(out)) != count {
				err = fmt.Errorf("running on %q", strings.Fields(out))
			}
			return err
		}
	}
	c.Eventually(podBudget, "a pod runs on the worker", running(1))
	c.Eventually(voteBudget, "the worker knows three API servers that are ready", func() error { return c.KnowsServers(worker, c.Nodes[:3]...) })
	t.Log(c.Gbctl("-n", worker.Address.String(), "get", "apiservers"))
	m.Reached("the worker knows three API servers")

	if err := c.SetEndpoint(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	var peer qemu.Node // connections through the endpoint have just ended, and come back
	c.Eventually(connectBudget, "the worker is connected to an API server", func() (err error) {
		peer, err = connectedTo(c, worker)
		return err
	})
	if err := c.Cut(t.Context(), peer.Name); err != nil {
		t.Fatal(err)
	}
	m.Reached("the endpoint is off, and so is " + peer.Name)
	gap := renewals(t, c, worker.Name)
	m.Reached(fmt.Sprintf("the longest time between two renewals of the worker's lease was %s", gap))
	if gap > eventually.Scale(maxGap) {
		t.Errorf("the worker's lease wasn't renewed for %s", gap)
	}
	c.Kubectl("scale", "deployment", "work", "--replicas=2")
	c.Eventually(podBudget, "a second pod runs on the worker", running(2))

	t.Run("reboot", func(t *testing.T) {
		c := c.In(t)
		reboot(c, worker)
		m.Reached("the worker is back")
		c.Kubectl("scale", "deployment", "work", "--replicas=4")
		c.Eventually(podBudget, "four pods run on the worker", running(4))
		m.Reached("and runs more pods")
	})
	// The negative twin: without the list it can't.
	t.Run("reboot without the list", func(t *testing.T) {
		c := c.In(t)
		if err := c.Off(t.Context(), worker.Name); err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(filepath.Join(c.Dir(), worker.Name, "state", "api-servers.json")); err != nil {
			t.Fatal(err)
		}
		before := renewed(c, worker.Name)
		if err := c.On(t.Context(), worker.Name); err != nil {
			t.Fatal(err)
		}
		c.Eventually(bootBudget, "the worker knows nobody but the endpoint, in vain", func() error {
			out, err := c.TryGbctl("-n", worker.Address.String(), "get", "apiservers")
			if err == nil && (strings.Contains(out, "kubernetes") || !e2etest.Row(out, "false", "config")) {
				err = fmt.Errorf("it knows:\n%s", out)
			}
			return err
		})
		if after := renewed(c, worker.Name); after != before {
			t.Errorf("the lease was renewed at %s", after)
		}
		if err := c.SetEndpoint(t.Context(), true); err != nil {
			t.Fatal(err)
		}
		c.Eventually(bootBudget, "the worker lives", func() error {
			if renewed(c, worker.Name) == before {
				return errors.New("its lease isn't renewed")
			}
			return nil
		})
		m.Reached("without the list the worker came back with the endpoint")
	})
}

// reboot turns the worker off and on, and waits until its kubelet has renewed its lease.
func reboot(c *e2etest.Cluster, worker qemu.Node) {
	t := c.T()
	if err := c.Off(t.Context(), worker.Name); err != nil {
		t.Fatal(err)
	}
	before := renewed(c, worker.Name)
	if err := c.On(t.Context(), worker.Name); err != nil {
		t.Fatal(err)
	}
	c.Eventually(bootBudget, "the worker lives", func() error {
		if renewed(c, worker.Name) == before {
			return errors.New("its lease isn't renewed")
		}
		return nil
	})
}

// renewed is the time of the last renewal of the worker's lease.
func renewed(c *e2etest.Cluster, worker string) (at string) {
	c.T().Helper()
	c.Eventually(answerBudget, "Kubernetes tells of the worker's lease", func() (err error) {
		at, err = c.Try("get", "lease", "-n", "kube-node-lease", worker, "-o", "jsonpath={.spec.renewTime}")
		return err
	})
	return at
}

// renewals watches the worker's lease for some time, and returns the longest
// time between two renewals. The node is Ready all the time.
func renewals(t *testing.T, c *e2etest.Cluster, worker string) time.Duration {
	t.Helper()
	var last time.Time
	var gap time.Duration
	for began := time.Now(); time.Since(began) < watched; {
		c.Eventually(2*maxGap, "the worker's lease is renewed", func() error {
			out, err := c.Try("get", "lease", "-n", "kube-node-lease", worker, "-o", "jsonpath={.spec.renewTime}")
			if err != nil {
				return err
			}
			at, err := time.Parse(time.RFC3339, out)
			if err != nil || at.Equal(last) {
				return fmt.Errorf("it says %q still: %w", out, err)
			}
			if !last.IsZero() {
				gap = max(gap, at.Sub(last))
			}
			last = at
			return nil
		})
		var ready string
		c.Eventually(answerBudget, "Kubernetes tells of the worker", func() (err error) {
			ready, err = c.Try("get", "node", worker, "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`)
			return err
		})
		if ready != "True" {
			t.Fatalf("the worker's Ready is %q", ready)
		}
	}
	if gap < leaseGap/2 {
		t.Errorf("the lease was renewed every %s: that isn't a kubelet's", gap)
	}
	return gap.Round(time.Millisecond)
}

// connectedTo is the control plane with the most connections from the worker's balancer.
func connectedTo(c *e2etest.Cluster, worker qemu.Node) (qemu.Node, error) {
	pids, err := c.Processes("kubelet")
	if err != nil {
		return qemu.Node{}, err
	}
	count := map[netip.Addr]int{}
	for _, pid := range pids {
		table, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/tcp", pid))
		if err != nil {
			return qemu.Node{}, err
		}
		for line := range strings.Lines(string(table)) {
			if fields := strings.Fields(line); len(fields) > 3 && fields[3] == "01" { // established, proc_net_tcp(5)
				from, to := address(fields[1]), address(fields[2])
				if from.Addr() == worker.Address && to.Port() == 6443 {
					count[to.Addr()]++
				}
			}
		}
	}
	var most qemu.Node
	for _, n := range c.Nodes[:3] {
		if count[n.Address] > count[most.Address] {
			most = n
		}
	}
	if most.Name == "" {
		return most, fmt.Errorf("the worker has no connections to API servers: %v", count)
	}
	return most, nil
}

// address reads one of proc_net_tcp(5): bytes in the order of the machine.
func address(text string) netip.AddrPort {
	host, port, _ := strings.Cut(text, ":")
	raw, err := hex.DecodeString(host + port)
	if err != nil || len(raw) != 6 {
		return netip.AddrPort{}
	}
	slices.Reverse(raw[:4])
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte(raw[:4])), uint16(raw[4])<<8|uint16(raw[5]))
}
