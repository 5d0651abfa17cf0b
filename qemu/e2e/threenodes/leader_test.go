//go:build e2e

package threenodes

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	// writeBudget is for etcd to elect another leader, which takes it two seconds, and
	// for the load balancer to close connections to the dead one, which takes it nine.
	writeBudget = 20 * time.Second
	// backBudget is for a node to boot and its member to catch up.
	backBudget = 60 * time.Second
)

type readers = map[string]func(context.Context) (map[string]string, error)

// S-220: three tolerate the loss of one. They lose the leader of their etcd
// during writes: by a power cut, and by a crash. All acknowledged writes exist
// afterwards, on every member, and writes are accepted again soon.
func TestLeaderIsLostUnderLoad(t *testing.T) {
	c, m := e2etest.Shared(t, name, qemu.Container, e2etest.Nodes(3, 0))
	c.Complete()
	inside := c.Network()
	etcd := c.Etcd(inside, c.Nodes...)
	// copies are the data of each member, and the answers of each API server.
	var members []*clientv3.Client
	copies := []readers{{}, {}}
	for _, n := range c.Nodes {
		member := c.Etcd(inside, n)
		members = append(members, member)
		copies[0]["the member on "+n.Name] = e2etest.EtcdCopy(member)
		copies[1]["the API server on "+n.Name] = e2etest.KubernetesStore(c.Server(inside, n)).Read
	}
	writers := []*e2etest.Writer{c.Write(e2etest.EtcdStore(members...)), c.Write(e2etest.KubernetesStore(c.Endpoint()))}
	for i, w := range writers {
		copies[i]["the quorum"] = w.Read
	}
	both := func(why string) {
		t.Helper()
		for _, w := range writers {
			w.Goes(writeBudget, why)
		}
	}
	// leader waits until there is a leader in a later term.
	leader := func(after uint64) (n qemu.Node, term uint64) {
		t.Helper()
		c.Eventually(writeBudget, fmt.Sprintf("etcd has a leader, after term %d", after), func() (err error) {
			if n, term, err = c.Term(etcd); err == nil && term <= after {
				err = fmt.Errorf("%s leads in term %d", n.Name, term)
			}
			return err
		})
		return n, term
	}
	both("before anything happened")

	killed, term := leader(0)
	if err := c.Cut(t.Context(), killed.Name); err != nil {
		t.Fatal(err)
	}
	m.Reached("power of the leader " + killed.Name + " is cut")
	both("while the leader is off")
	next, later := leader(term)
	m.Reached(fmt.Sprintf("%s leads in term %d, after %s in term %d", next.Name, later, killed.Name, term))
	if err := c.On(t.Context(), killed.Name); err != nil {
		t.Fatal(err)
	}
	server := c.Server(inside, killed)
	c.Eventually(backBudget, "the former leader's API server is ready", func() error {
		_, err := server.Get(t.Context(), "/readyz")
		return err
	})
	m.Reached("it is back")
	both("while it came back")

	killed, term = leader(later - 1)
	if err := c.KillOn(killed.Name, "etcd"); err != nil {
		t.Fatal(err)
	}
	m.Reached("etcd of the leader " + killed.Name + " is killed")
	both("after the leader's etcd was killed")
	next, later = leader(term)
	m.Reached(fmt.Sprintf("%s leads in term %d, after term %d", next.Name, later, term))
	for i, w := range writers {
		w.Stop()
		w.Complete(backBudget, copies[i])
	}
	m.Reached("every acknowledged write is everywhere")
}
