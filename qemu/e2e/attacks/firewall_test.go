//go:build e2e && long

package attacks

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

const (
	// joinBudget is for a control plane to boot, to join and to be Ready beside two others and a worker.
	joinBudget = 120 * time.Second
	// liveBudget is for a change of the configuration to be in the kernel.
	liveBudget = 15 * time.Second
	// metadataAddress is that of the clouds' metadata service. The test's network has one.
	metadataAddress = "169.254.169.254"
)

// dialer is a pod that connects from a node; with host, it has the node's network.
func dialer(name, node string, host bool) string {
	return fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: kube-system}
spec:
  nodeName: %s
  hostNetwork: %t
  dnsPolicy: ClusterFirst
  tolerations: [{operator: Exists}]
  terminationGracePeriodSeconds: 1
  containers: [{name: a, image: %q, command: [/intruder, wait]}]
---`, name, node, host, image)
}

// reached are the addresses that a pod connects to.
func (c attacked) reached(pod string, addresses []string) []string {
	c.T().Helper()
	return strings.Fields(c.Kubectl(append([]string{"-n", "kube-system", "exec", pod, "--", "/intruder", "dial"}, addresses...)...))
}

// hits are the packets that a rule of a node has counted.
func (c attacked) hits(n qemu.Node, rule string) uint64 {
	c.T().Helper()
	var found []struct{ Spec struct{ Packets uint64 } }
	out := c.Gbctl("-n", n.Address.String(), "get", "firewall", rule, "-o", "json")
	if err := json.Unmarshal([]byte(out), &found); err != nil {
		var one struct{ Spec struct{ Packets uint64 } }
		if json.Unmarshal([]byte(out), &one) != nil {
			c.T().Fatalf("%v in\n%s", err, out)
		}
		return one.Spec.Packets
	}
	if len(found) != 1 {
		c.T().Fatalf("rule %s of %s:\n%s", rule, n.Name, out)
	}
	return found[0].Spec.Packets
}

// Issue 47, 2.7: pods reach neither etcd nor trustd, on their own node and on others, nor the metadata service of a
// cloud. What belongs to a node goes on, also a control plane that joins.
func TestFirewall(t *testing.T) {
	cluster, m := e2etest.Start(t, "wall", qemu.Container, e2etest.Nodes(3, 1), func(o *qemu.Options) { o.Later = 1 }, e2etest.WithImage(t, image, "intruder"))
	c := attacked{cluster}
	controlPlanes := c.ControlPlanes()
	worker := c.Nodes[len(c.Nodes)-1]
	before := slices.DeleteFunc(slices.Clone(c.Nodes), func(n qemu.Node) bool { return n.Later })
	c.Eventually(joinBudget, "two control planes and the worker are Ready", func() error { return c.NodesReady(before...) })
	m.Reached("two control planes and a worker are Ready")
	c.metadata()
	pods := map[string]qemu.Node{"on-a-control-plane": controlPlanes[0], "on-a-worker": worker}
	for pod, n := range pods {
		c.Apply(dialer(pod, n.Name, false))
	}
	c.Apply(dialer("a-node", worker.Name, true))
	for _, pod := range []string{"on-a-control-plane", "on-a-worker", "a-node"} {
		c.Eventually(podBudget, pod+" runs", func() error {
			_, err := c.Try("-n", "kube-system", "exec", pod, "--", "/intruder", "dial")
			return err
		})
	}

	forbidden := []string{metadataAddress + ":80"}
	goes := []string{"kubernetes.default.svc.cluster.local:443"} // DNS, a Service and the API
	for _, n := range before[:2] {
		for _, port := range []string{"2379", "2380", "50001"} {
			forbidden = append(forbidden, net.JoinHostPort(n.Address.String(), port))
		}
		goes = append(goes, net.JoinHostPort(n.Address.String(), "6443"), net.JoinHostPort(n.Address.String(), "50000"))
	}
	for pod, n := range pods {
		if got := c.reached(pod, forbidden); len(got) > 0 {
			t.Errorf("%s reaches %v", pod, got)
		}
		if got := c.reached(pod, goes); len(got) != len(goes) {
			t.Errorf("%s reaches only %v of %v", pod, got, goes)
		}
		for _, rule := range []string{"pods-to-etcd", "pods-to-trustd", "pods-to-metadata"} {
			c.Eventually(liveBudget, rule+" of "+n.Name+" counts", func() error {
				if c.hits(n, rule) == 0 {
					return errors.New("no packets")
				}
				return nil
			})
		}
	}
	if got := c.reached("a-node", forbidden); len(got) != len(forbidden) {
		t.Errorf("the node's own programs reach only %v of %v", got, forbidden)
	}
	t.Logf("gbctl get firewall:\n%s", c.Gbctl("-n", controlPlanes[0].Address.String(), "get", "firewall"))
	m.Reached("the attacks are refused")

	later := controlPlanes[2]
	if err := c.On(t.Context(), later.Name); err != nil {
		t.Fatal(err)
	}
	etcd := c.Etcd(c.Network(), controlPlanes...)
	c.Eventually(joinBudget, "the third control plane has joined", func() error {
		return errors.Join(c.NodesReady(c.Nodes...), c.InSync(etcd, controlPlanes...))
	})
	m.Reached("the third control plane votes")
	if out := c.Gbctl("-n", controlPlanes[0].Address.String(), "etcd", "members"); strings.Count(out, "2380") < 3 {
		t.Errorf("members are\n%s", out)
	}
	// Pods on the other nodes know the new one, too.
	news := []string{net.JoinHostPort(later.Address.String(), "2379"), net.JoinHostPort(later.Address.String(), "50001")}
	c.Eventually(liveBudget, "the new control plane is protected", func() error {
		for pod := range pods {
			if got := c.reached(pod, news); len(got) > 0 {
				return fmt.Errorf("%s reaches %v", pod, got)
			}
		}
		return nil
	})
	t.Run("a change is live", func(t *testing.T) { attacked{c.In(t)}.changes(t, worker, controlPlanes[0]) })
	m.Reached("changes are live")
}

// metadata serves the address in the network of the nodes.
func (c attacked) metadata() {
	c.T().Helper()
	err := c.Network().Do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		address, err := netlink.ParseAddr(metadataAddress + "/32")
		if err != nil {
			return err
		}
		return errors.Join(netlink.AddrReplace(lo, address), netlink.LinkSetUp(lo))
	})
	if err != nil {
		c.T().Fatal(err)
	}
	l, err := c.Network().Listen(metadataAddress + ":80")
	if err != nil {
		c.T().Fatal(err)
	}
	c.T().Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_ = conn.Close()
		}
	}()
}

// changes: a configuration opens and closes what it says, at once; a rule that locks its operator out is undone.
func (c attacked) changes(t *testing.T, worker, controlPlane qemu.Node) {
	patch := func(n qemu.Node, text string, mode ...string) {
		t.Helper()
		c.Gbctl(append(append([]string{"-n", n.Address.String(), "patch", "mc"}, mode...), "-p", text)...)
	}
	reaches := func(pod, address string, want bool) {
		t.Helper()
		c.Eventually(liveBudget, fmt.Sprintf("%s reaches %s: %t", pod, address, want), func() error {
			if got := c.reached(pod, []string{address}); (len(got) > 0) != want {
				return fmt.Errorf("it is the other way: %v", got)
			}
			return nil
		})
	}
	patch(worker, "machine: {network: {firewall: {allowMetadata: true}}}", "--immediate")
	reaches("on-a-worker", metadataAddress+":80", true)
	reaches("on-a-control-plane", metadataAddress+":80", false)

	etcd := net.JoinHostPort(controlPlane.Address.String(), "2379")
	patch(controlPlane, "machine: {network: {firewall: {rules: [{name: scrape, action: accept, protocol: tcp, ports: ['2379'], sources: [10.244.0.0/16]}]}}}", "--immediate")
	reaches("on-a-control-plane", etcd, true)
	reaches("on-a-worker", etcd, false) // the worker stops its own pods
	patch(controlPlane, "machine: {network: {firewall: {rules: [{name: scrape, $patch: delete}]}}}", "--immediate")
	reaches("on-a-control-plane", etcd, false)

	if out, err := c.TryGbctl("-n", worker.Address.String(), "patch", "mc", "--immediate", "-p", "machine: {network: {firewall: {rules: [{name: rest, action: drop}]}}}"); err == nil || !strings.Contains(err.Error(), "drops the machine API") {
		t.Errorf("a rule is accepted that locks everybody out: %v\n%s", err, out)
	}
	// It cuts its own answer off, so only what the node does counts.
	_, _ = c.TryGbctl("-n", worker.Address.String(), "patch", "mc", "--mode=try", "--timeout=10s", "-p", "machine: {network: {firewall: {rules: [{name: lockout, action: drop, protocol: tcp, ports: ['50000'], sources: [10.5.0.1/32]}]}}}")
	c.Eventually(joinBudget, "the rule that locked its operator out is undone", func() error {
		out, err := c.TryGbctl("-n", worker.Address.String(), "get", "firewall")
		if err == nil && strings.Contains(out, "lockout") {
			err = errors.New("it is still there")
		}
		return err
	})
}
