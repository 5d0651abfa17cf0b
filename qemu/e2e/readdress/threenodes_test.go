//go:build e2e && long

package readdress

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

// maxGap is how long no API server may answer while others are there.
const maxGap = 10 * time.Second

// All control planes get other addresses, one after another. The worker and its pods use those that are there.
func TestReaddressThreeNodes(t *testing.T) {
	c, m := e2etest.Ready(t, "readdress3", qemu.Container, e2etest.Nodes(3, 1))
	c.Healthy()
	r := &rig{Cluster: c, t: t, network: c.Network()}
	r.access()
	c.Apply(strings.ReplaceAll(pod, "IMAGE", config.DefaultAPIServerImage))
	var all []netip.Addr
	for _, n := range c.Nodes {
		all = append(all, n.Address)
	}
	var since string
	well := func() error {
		for i, at := range all {
			if err := r.at(at, c.Nodes[i].Name, i < 3, all[:3]); err != nil {
				return fmt.Errorf("%s: %w", at, err)
			}
		}
		return r.pod(all[0], &since)
	}
	c.Eventually(moveBudget, "the cluster is well", well)
	m.Reached("the cluster is well")
	for i := range 3 {
		next := all[i]
		for range 100 {
			next = next.Next()
		}
		longest := r.outage(append([]netip.Addr{next}, all[:3]...))
		began := time.Now()
		out, err := r.gbctl(all[i], "readdress", next.String())
		if err != nil {
			for _, at := range all[:3] {
				log, _ := r.gbctl(at, "logs", "etcd", "--tail", "150")
				t.Logf("etcd at %s:\n%s", at, log)
			}
			t.Fatalf("%v\n%s", err, out)
		}
		all[i] = next
		c.Eventually(moveBudget, "the cluster is well", well)
		gap := longest()
		m.Reached(fmt.Sprintf("%s is at %s after %s; no API server for %s", c.Nodes[i].Name, next, time.Since(began).Round(time.Second), gap))
		if gap > c.Scale(maxGap) {
			t.Errorf("no API server answered for %s", gap)
		}
	}

	// A worker needs no operation.
	next := all[3]
	for range 100 {
		next = next.Next()
	}
	patch := fmt.Sprintf("{machine: {network: {interfaces: [{interface: eth0, cidr: %s/24}]}}}", next)
	if out, err := r.gbctl(all[3], "patch", "mc", "--try", "--timeout", "5m", "-p", patch); err != nil {
		t.Fatal(out, err)
	}
	all[3] = next
	c.Eventually(moveBudget, "the worker is reached at "+next.String(), func() error {
		out, err := r.gbctl(next, "config", "confirm")
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		return err
	})
	c.Eventually(moveBudget, "the worker is Ready there", func() error {
		answer, err := r.Server(r.network, qemu.Node{Address: all[0]}).Get(t.Context(), "/api/v1/nodes/"+c.Nodes[3].Name)
		if err != nil || !strings.Contains(string(answer), `{"type":"InternalIP","address":"`+next.String()+`"}`) {
			return fmt.Errorf("the Node: %s, %w", answer, err)
		}
		return r.pod(all[0], &since)
	})
	m.Reached("the worker is at " + next.String())
}

// at is nil once a node is Ready at an address, and the control planes are members of etcd there.
func (r *rig) at(at netip.Addr, name string, control bool, members []netip.Addr) error {
	s := r.Server(r.network, qemu.Node{Address: members[0]})
	answer, err := s.Get(r.t.Context(), "/api/v1/nodes/"+name)
	if err != nil || !strings.Contains(string(answer), `{"type":"InternalIP","address":"`+at.String()+`"}`) || !strings.Contains(string(answer), `"flannel.alpha.coreos.com/public-ip":"`+at.String()+`"`) {
		return fmt.Errorf("the Node: %s, %w", answer, err)
	}
	out, err := r.gbctl(at, "health")
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	if !control {
		return nil
	}
	if out, err = r.gbctl(at, "etcd", "status"); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	list, err := r.gbctl(at, "etcd", "members")
	for _, m := range members {
		if err != nil || !strings.Contains(list, "https://"+m.String()+":2380") || !strings.Contains(list, "https://"+m.String()+":2379") {
			return fmt.Errorf("etcd: %s, %w", list, err)
		}
	}
	return nil
}

// outage measures for how long no address has an API server that answers, until its end is asked for.
func (r *rig) outage(all []netip.Addr) (longest func() time.Duration) {
	stop, ended := make(chan struct{}), make(chan time.Duration)
	var servers []*e2etest.Server
	for _, at := range all {
		servers = append(servers, r.Server(r.network, qemu.Node{Address: at}).Anew(time.Second))
	}
	go func() {
		var most time.Duration
		last := time.Now()
		for {
			for _, s := range servers {
				if _, err := s.Get(r.t.Context(), "/api/v1/namespaces/default/configmaps/before"); err == nil {
					most, last = max(most, time.Since(last)), time.Now()
				}
			}
			select {
			case <-stop:
				ended <- most.Round(100 * time.Millisecond)
				return
			case <-time.After(50 * time.Millisecond):
			}
		}
	}()
	return func() time.Duration { close(stop); return <-ended }
}
