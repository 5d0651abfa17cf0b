//go:build e2e

// Package threenodes tests three control planes. Two join the first one's etcd
// by themselves. The loss of the leader loses no write. A node that comes back
// with an empty disk replaces its former member. After two are lost, the third
// begins a new cluster with a snapshot.
package threenodes

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

// name is the name of the tests' common cluster.
const name = "three"

const (
	// joinBudget is for a node to boot, to join and to be promoted.
	joinBudget = 60 * time.Second
	// formerBudget is for that, and for a former member to learn that it was removed.
	formerBudget = 120 * time.Second
	// electBudget is for etcd to elect a leader, and for the load balancer to notice.
	electBudget = 30 * time.Second
)

// S-211, S-215, S-219, S-224
func TestThreeControlPlanes(t *testing.T) {
	c, m := e2etest.Shared(t, name, qemu.Container, e2etest.Nodes(3, 0))
	first, last := c.Nodes[0].Address.String(), c.Nodes[2]
	voting := func() error {
		out, err := c.TryGbctl("-n", first, "etcd", "status")
		if err == nil && (strings.Count(out, "follower") != 2 || strings.Count(out, "leader") != 1) {
			err = fmt.Errorf("etcd status:\n%s", out)
		}
		return err
	}
	c.Eventually(joinBudget, "three members vote", voting)
	m.Reached("three members vote")
	t.Log(c.Gbctl("-n", first, "etcd", "status"))
	former := member(c, last.Name)
	data := filepath.Join(c.Dir(), last.Name, "var", "lib", "etcd")
	kept := filepath.Join(c.Dir(), last.Name, "former")

	t.Run("its members are looked after", func(t *testing.T) { lookedAfter(t, c.In(t)) })
	t.Run("the last one loses its data", func(t *testing.T) {
		c := c.In(t)
		if err := c.Cut(t.Context(), last.Name); err != nil {
			t.Fatal(err)
		}
		c.Eventually(electBudget, "Kubernetes takes a write without it", func() error {
			return c.TryWrite("create", "configmap", "written")
		})
		if err := os.Rename(data, kept); err != nil {
			t.Fatal(err)
		}
		if err := c.On(t.Context(), last.Name); err != nil {
			t.Fatal(err)
		}
		c.Eventually(joinBudget, "three members vote", voting)
		m.Reached("three members vote again")
		t.Log(c.Gbctl("-n", last.Address.String(), "service", "etcd"))
		if now := member(c, last.Name); now == former {
			t.Errorf("it is member %s again, without that one's data", now)
		}
	})
	t.Run("the last one leaves and comes back", func(t *testing.T) {
		c := c.In(t)
		c.Gbctl("-n", last.Address.String(), "etcd", "leave")
		// The quorum has decided on its leave, and the first may not have the result yet.
		c.Eventually(electBudget, "the first knows that it has left", func() error {
			out, err := c.TryGbctl("-n", first, "etcd", "members")
			if err == nil && strings.Contains(out, last.Name) {
				err = errors.New(out)
			}
			return err
		})
		c.Gbctl("-n", last.Address.String(), "service", "etcd", "start")
		c.Eventually(joinBudget, "three members vote", voting)
		c.Kubectl("get", "configmap", "written")
	})
	// The twin: with the data of a removed member, a node isn't a member.
	t.Run("the last one has its former data", func(t *testing.T) {
		c := c.In(t)
		if err := c.Cut(t.Context(), last.Name); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(os.RemoveAll(data), os.Rename(kept, data)); err != nil {
			t.Fatal(err)
		}
		if err := c.On(t.Context(), last.Name); err != nil {
			t.Fatal(err)
		}
		c.Eventually(formerBudget, "three members vote", voting)
		m.Reached("three members vote, with the former data put away")
		if now := member(c, last.Name); now == former {
			t.Errorf("it is member %s again, which was removed", now)
		}
		c.Kubectl("get", "configmap", "written")
		if out, err := c.Try("get", "configmap", "never-written"); err == nil || !strings.Contains(err.Error(), "not found") {
			t.Errorf("nobody has written it: %v: %s", err, out)
		}
	})
}

// member is the ID of a node's voting member, from the first node.
func member(c *e2etest.Cluster, name string) string {
	c.T().Helper()
	out := c.Gbctl("-n", c.Nodes[0].Address.String(), "etcd", "members")
	for line := range strings.Lines(out) {
		// The node that was asked comes first.
		if f := strings.Fields(line); len(f) > 3 && f[2] == name && f[3] == "yes" {
			return f[1]
		}
	}
	c.T().Fatalf("%s has no voting member:\n%s", name, out)
	return ""
}

// lookedAfter tests manual maintenance of etcd: no alarm is raised, space is freed, and
// another member becomes the leader, while a member that isn't the leader only reports that.
func lookedAfter(t *testing.T, c *e2etest.Cluster) {
	says := func(node, want string, args ...string) {
		t.Helper()
		c.Eventually(electBudget, "etcd "+strings.Join(args, " "), func() error {
			out, err := c.TryGbctl(append([]string{"-n", node, "etcd"}, args...)...)
			if err == nil && !regexp.MustCompile(want).MatchString(out) {
				t.Fatalf("gbctl etcd %s: %s", strings.Join(args, " "), out)
			}
			return err
		})
	}
	var all []string
	for _, n := range c.Nodes {
		all = append(all, n.Address.String())
		says(n.Address.String(), `^NODE +MEMBER +ALARM\n$`, "alarm", "list")
	}
	says(strings.Join(all, ","), `(?s)^(\S+: \S+ \S+ before, \S+ \S+ now\n){3}$`, "defrag")
	says(all[0], `^NODE +MEMBER +ALARM\n$`, "alarm", "disarm")

	client := c.Etcd(c.Network(), c.Nodes...)
	var before, now qemu.Node
	leads := regexp.MustCompile(`: etcd member \S+ \([0-9a-f]+\) leads now\n$`)
	// another leader may be elected meanwhile
	c.Eventually(electBudget, "the leader forfeits its leadership", func() (err error) {
		if before, err = c.Leader(client); err != nil {
			return err
		}
		out, err := c.TryGbctl("-n", before.Address.String(), "etcd", "forfeit-leadership")
		if err == nil && !leads.MatchString(out) {
			err = errors.New(out)
		}
		return err
	})
	c.Eventually(electBudget, "another member leads", func() (err error) {
		now, err = c.Leader(client)
		if err == nil && now.Name == before.Name {
			err = fmt.Errorf("%s leads still", now.Name)
		}
		return err
	})
	says(before.Address.String(), `: this node's member doesn't lead: `+now.Name+` \([0-9a-f]+\) does\n$`, "forfeit-leadership")
}
