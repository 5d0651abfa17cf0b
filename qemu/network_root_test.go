package qemu

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu/container/snapshot"
	"github.com/garboard-os/garboard/qemu/network"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/google/go-cmp/cmp"
)

// S-331: several nodes reach each other, the registry and, through the load balancer, the
// API. Each node's network can have faults, in both directions, also while it is off.
func TestContainerNetworks(t *testing.T) {
	o := artefacts(t)
	o.Name, o.Workers = "networks", 2
	t.Setenv("GARBOARD_HOME", t.TempDir())
	before := snapshot.Take(t, o.Name)
	var said strings.Builder
	o.Out = &said
	c := up(t, o)
	steps := []string{
		"nodes run as containers: asked for", "validating CIDR and reserving IPs", "generating PKI and tokens",
		fmt.Sprintf("creating state directory in %q", c.Dir()), "creating network networks", "creating load balancer",
		"creating control plane nodes", "creating worker nodes", "",
	}
	if diff := cmp.Diff(strings.Join(steps, "\n"), said.String()); diff != "" {
		t.Errorf("what is said (-want +got):\n%s", diff)
	}
	one := c.Nodes[1].Name
	fault := func(n network.Conditions, shown string) {
		t.Helper()
		if err := c.SetNetwork(t.Context(), one, n); err != nil {
			t.Fatal(err)
		}
		s, err := c.Status(t.Context())
		if err != nil || s[1].Network != shown {
			t.Errorf("status shows %q, %v; want %q", s[1].Network, err, shown)
		}
	}
	expect(t, c, "ask 10.5.0.3", "networks-worker-1 boot 1")
	expect(t, c, "ask 10.5.0.4", "networks-worker-2 boot 1")
	expect(t, c, "ask 10.5.0.1", "networks-controlplane-1 boot 1") // the load balancer

	fault(network.Conditions{CutFrom: []string{c.Nodes[0].Name}}, "cut off from networks-controlplane-1")
	expect(t, c, "ask 10.5.0.3", "timeout")
	expect(t, c, "ask 10.5.0.4", "networks-worker-2")
	fault(network.Conditions{CutFrom: []string{c.Nodes[2].Name}}, "cut off from networks-worker-2")
	expect(t, c, "ask 10.5.0.3", "networks-worker-1")
	fault(network.Conditions{DeafTo: []string{c.Nodes[0].Name}}, "deaf to networks-controlplane-1")
	expect(t, c, "ask 10.5.0.3", "timeout")
	fault(network.Conditions{Off: true}, "cut off")
	expect(t, c, "ask 10.5.0.3", "timeout")

	// The fault stays after a power cut.
	if err := c.Cut(t.Context(), one); err != nil {
		t.Fatal(err)
	}
	if err := c.On(t.Context(), one); err != nil {
		t.Fatal(err)
	}
	expect(t, c, "ask 10.5.0.3", "i/o timeout")

	// The connection and the request are two round trips, of two directions each.
	const delay = 60 * time.Millisecond
	fault(network.Conditions{Delay: delay, Jitter: delay / 10, Loss: 0.001}, "delay 60ms, jitter 6ms, loss 0.1%")
	expect(t, c, "ask 10.5.0.3", "networks-worker-1 boot 2")
	eventually.That(t, 10*time.Second, "the answer is late", func() error { return late(c, "ask 10.5.0.3", 4*delay) })
	fault(network.Conditions{}, "fine")
	eventually.That(t, 10*time.Second, "the answer isn't late any more", func() error {
		if late(c, "ask 10.5.0.3", delay) == nil {
			return errors.New("it is")
		}
		return nil
	})

	for _, bad := range []network.Conditions{{Loss: 2}, {Delay: -1}, {CutFrom: []string{"nobody"}}} {
		if err := c.SetNetwork(t.Context(), one, bad); err == nil {
			t.Errorf("%+v is taken", bad)
		}
	}
	fault(network.Conditions{Delay: time.Millisecond}, "delay 1ms") // and so it is removed
	if err := Down(t.Context(), o.Name); err != nil {
		t.Fatal(err)
	}
	if diff := before.Diff(snapshot.Take(t, o.Name)); diff != "" {
		t.Errorf("left behind:\n%s", diff)
	}
}

var took = regexp.MustCompile(`after (\d+) ms`)

// late is nil if an answer took at least that long.
func late(c *Cluster, line string, least time.Duration) error {
	answer, err := tellNode(c, line)
	if err != nil {
		return err
	}
	m := took.FindStringSubmatch(answer)
	if m == nil {
		return errors.New(answer)
	}
	if ms, _ := strconv.Atoi(m[1]); time.Duration(ms)*time.Millisecond < least {
		return fmt.Errorf("%s: it isn't", answer)
	}
	return nil
}

// A single node is its own endpoint, with no load balancer in between.
func TestContainerEndpointOfOne(t *testing.T) {
	o := artefacts(t)
	o.Name = "alone"
	t.Setenv("GARBOARD_HOME", t.TempDir())
	c := up(t, o)
	expect(t, c, "ask 10.5.0.1", "connection refused")
}
