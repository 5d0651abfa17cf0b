//go:build e2e && long

// Package partition tests three control planes whose network breaks: one is cut off from
// the others, one can't send to or can't receive from only some of them, one has a bad
// connection. Two that reach each other continue. A single one serves no client, whatever
// its own state is. After the network is repaired, all three are one cluster again.
package partition

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/network"
	"github.com/garboard-os/garboard/qemu/osthread"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	clientv3 "go.etcd.io/etcd/client/v3"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	// writeBudget is for the others to elect a leader, and for the load balancer
	// to close connections to the isolated one.
	writeBudget = 20 * time.Second
	// isolatedBudget is for an API server to detect that its etcd has no quorum.
	isolatedBudget = 20 * time.Second
	// healBudget is for a member to receive from the others again and to catch up,
	// for its API server to be ready, and for Kubernetes to update its node.
	healBudget = 45 * time.Second
	// A bad connection between continents.
	badDelay = 100 * time.Millisecond
	badLoss  = 0.02
	// refuseAfter is how long an API server may try before it refuses, and refuseWait
	// is the client's longer timeout: with a shorter one, it would get no refusal.
	refuseAfter = 5 * time.Second
	refuseWait  = 30 * time.Second
)

// part is the cluster with all clients of the test.
type part struct {
	*e2etest.Cluster
	t       *testing.T
	what    string // the fault
	inside  *osthread.Thread
	etcd    *clientv3.Client
	writers []*e2etest.Writer
	servers map[string]*e2etest.Server // by node
}

func (p *part) in(t *testing.T, what string) *part {
	own := *p
	own.t, own.Cluster, own.what = t, p.Cluster.In(t), what
	return &own
}

// S-220: two of three are a quorum, and one isn't.
func TestPartition(t *testing.T) {
	c, m := e2etest.Ready(t, "partition", qemu.Container, e2etest.Nodes(3, 0))
	p := &part{Cluster: c, t: t, inside: c.Network(), servers: map[string]*e2etest.Server{}}
	p.etcd = c.Etcd(p.inside, c.Nodes...)
	var members []*clientv3.Client
	for _, n := range c.Nodes {
		members = append(members, c.Etcd(p.inside, n))
		p.servers[n.Name] = c.Server(p.inside, n)
	}
	p.writers = []*e2etest.Writer{c.Write(e2etest.EtcdStore(members...)), c.Write(e2etest.KubernetesStore(c.Endpoint()))}
	p.healed()
	for _, part := range []struct {
		name string
		run  func(p *part, leader, second, third qemu.Node)
	}{
		{"the leader is cut off from both", (*part).alone},
		{"the leader is cut off from one", (*part).halfway},
		{"the leader is deaf", (*part).deaf},
		{"the leader is on a bad line", (*part).slow},
	} {
		t.Run(part.name, func(t *testing.T) {
			p := p.in(t, part.name)
			leader, others := p.roles()
			part.run(p, leader, others[0], others[1])
			if err := p.SetNetwork(t.Context(), leader.Name, network.Conditions{}); err != nil {
				t.Fatal(err)
			}
			p.takesWrites("after " + part.name + " no more")
			p.healed()
		})
		m.Reached(part.name + ", and no more")
	}
	for i, w := range p.writers {
		w.Stop()
		readers := map[string]func(context.Context) (map[string]string, error){"the quorum": w.Read}
		for j, n := range c.Nodes {
			if i == 0 {
				readers["the member on "+n.Name] = e2etest.EtcdCopy(members[j])
			} else {
				readers["the API server on "+n.Name] = e2etest.KubernetesStore(p.servers[n.Name]).Read
			}
		}
		w.Complete(healBudget, readers)
	}
}

// roles are the leader and the others.
func (p *part) roles() (leader qemu.Node, others []qemu.Node) {
	p.t.Helper()
	p.Eventually(writeBudget, "etcd has a leader", func() (err error) {
		leader, err = p.Leader(p.etcd)
		return err
	})
	for _, n := range p.Nodes {
		if n.Name != leader.Name {
			others = append(others, n)
		}
	}
	return leader, others
}

func (p *part) setNetwork(n qemu.Node, to network.Conditions) {
	p.t.Helper()
	if err := p.SetNetwork(p.t.Context(), n.Name, to); err != nil {
		p.t.Fatal(err)
	}
}

func (p *part) takesWrites(why string) {
	p.t.Helper()
	for _, w := range p.writers {
		w.In(p.Cluster).Goes(writeBudget, why)
	}
}

// alone: the former leader serves no client any more, and the others continue.
func (p *part) alone(leader, second, third qemu.Node) {
	p.setNetwork(leader, network.Conditions{CutFrom: []string{second.Name, third.Name}})
	p.isolated(leader)
	p.takesWrites("while " + p.what)
	p.leaves(leader)
}

// halfway: the leader reaches only the third, which reaches both. The second can't
// win an election while the third has a leader, so it has none and serves no
// client. If the third becomes the leader instead, all reach it, and all serve.
func (p *part) halfway(leader, second, third qemu.Node) {
	p.setNetwork(leader, network.Conditions{CutFrom: []string{second.Name}})
	p.Eventually(isolatedBudget, second.Name+" serves nobody, or "+third.Name+" leads", func() error {
		now, err := p.Leader(p.etcd)
		if err == nil && now.Name == third.Name {
			return nil
		}
		_, err = p.servers[second.Name].Get(p.t.Context(), "/readyz")
		return refused(err)
	})
	p.takesWrites("while " + p.what)
}

// deaf: the others receive from the leader, and it doesn't receive from them.
func (p *part) deaf(leader, second, third qemu.Node) {
	p.setNetwork(leader, network.Conditions{DeafTo: []string{second.Name, third.Name}})
	p.isolated(leader)
	p.takesWrites("while " + p.what)
	p.leaves(leader)
}

// slow: nothing is lost permanently, so the leader stays.
func (p *part) slow(leader, _, _ qemu.Node) {
	p.setNetwork(leader, network.Conditions{Delay: badDelay, Loss: badLoss})
	for i := range 2 {
		p.takesWrites(fmt.Sprintf("while %s (%d)", p.what, i+1))
	}
	p.ready()
}

// isolated: an API server without a quorum reports that. It answers no read,
// even if its own etcd has the data, and accepts no write.
func (p *part) isolated(n qemu.Node) {
	p.t.Helper()
	s := p.servers[n.Name]
	start := time.Now()
	p.Eventually(isolatedBudget, "the API server on "+n.Name+" isn't ready", func() error {
		_, err := s.Get(p.t.Context(), "/readyz")
		return refused(err)
	})
	p.t.Logf("%7.1fs  until the API server on %s wasn't ready", time.Since(start).Seconds(), n.Name)
	s = s.Limited(refuseAfter, eventually.Scale(refuseWait))
	var asked sync.WaitGroup
	defer asked.Wait()
	for _, path := range []string{"/api/v1/namespaces/default", "/api/v1/namespaces/default/configmaps"} {
		asked.Go(func() {
			_, err := s.Get(p.t.Context(), path)
			if err := refused(err); err != nil {
				p.t.Errorf("the API server on %s: %s: %v", n.Name, path, err)
			}
		})
	}
	asked.Go(func() {
		if err := refused(e2etest.KubernetesStore(s).Write(p.t.Context(), "alone", "x")); err != nil {
			p.t.Errorf("the API server on %s: a write without the others: %v", n.Name, err)
		}
	})
}

// refused is nil if a request was refused. "Not found" is an answer, and a
// timeout is no refusal.
func refused(err error) error {
	if err == nil {
		return errors.New("it answers")
	}
	if strings.Contains(err.Error(), "404") {
		return err
	}
	if silent := net.Error(nil); errors.As(err, &silent) && silent.Timeout() {
		return fmt.Errorf("it neither answers nor refuses: %w", err)
	}
	return nil
}

// leaves waits for another leader.
func (p *part) leaves(before qemu.Node) {
	p.t.Helper()
	p.Eventually(writeBudget, "another one than "+before.Name+" leads", func() error {
		leader, err := p.Leader(p.etcd)
		if err == nil && leader.Name == before.Name {
			err = fmt.Errorf("%s does", before.Name)
		}
		return err
	})
}

// ready waits until all API servers and nodes are ready.
func (p *part) ready() {
	p.t.Helper()
	p.Eventually(healBudget, "each API server is ready, and each node", func() error {
		for _, n := range p.Nodes {
			if _, err := p.servers[n.Name].Get(p.t.Context(), "/readyz"); err != nil {
				return err
			}
		}
		return p.NodesReady(p.Nodes...)
	})
}

// healed: all are ready, and the members agree.
func (p *part) healed() {
	p.t.Helper()
	start := time.Now()
	p.ready()
	p.Eventually(healBudget, "three voters have the same data", func() error {
		return p.InSync(p.etcd, p.Nodes...)
	})
	p.t.Logf("%7.1fs  until all was well", time.Since(start).Seconds())
}
