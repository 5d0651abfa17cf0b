//go:build e2e

package etcd

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// S-212, S-215, S-219, S-355: other nodes wait, then join as learners and are
// promoted; a node that lost its data joins again under its old address.
func TestRealJoin(t *testing.T) {
	t.Parallel()
	r, node := realRig(t)
	a, b, c := node("a", config.Init), node("b", config.ControlPlane), node("c", config.ControlPlane)
	b.start()
	eventually.That(t, 10*time.Second, "b to wait", func() error {
		return b.events.has("Waiting for bootstrap, or for a control plane to join at " + r.apiserver.URL)
	})
	a.start()
	a.serves()
	a.expect("a")
	r.knows(0, a.addr)
	b.serves()
	a.expect("a", "b")
	r.knows(0, a.addr, b.addr)
	c.start()
	c.serves()
	a.expect("a", "b", "c")
	must(t, c.events.has("has the cluster's data and votes"))

	// A voting member comes back with an empty disk.
	c.kill()
	must(t, os.RemoveAll(c.path("data")))
	c.start()
	c.serves()
	a.expect("a", "b", "c")

	// STATE is lost, too, and the address was that of a node of type init: the
	// cluster knows the member by its URL.
	c.kill()
	must(t, os.RemoveAll(c.path("data")))
	must(t, os.Remove(c.o.Journal))
	c.start()
	c.serves()
	a.expect("a", "b", "c")

	// S-214: the same for the node of type init that began the cluster, after a reinstallation.
	r.knows(0, b.addr, c.addr)
	a.kill()
	must(t, os.RemoveAll(a.path("data")))
	must(t, os.Remove(a.o.Journal))
	a.start()
	a.serves()
	a.expect("a", "b", "c")
	if got, err := a.read(); err != nil || got.Token != "" {
		t.Errorf("it began a cluster of its own: %+v, %v", got, err)
	}

	// All start at the same time, with their data: no node waits for another one's API server.
	r.knows(503)
	for _, n := range []*realNode{a, b, c} {
		n.kill()
	}
	for _, n := range []*realNode{c, b, a} {
		n.start()
	}
	a.serves()
	a.expect("a", "b", "c")
}

// A join that was interrupted at any step continues, or begins again.
func TestRealJoinCutShort(t *testing.T) {
	t.Parallel()
	r, node := realRig(t)
	a, b := node("a", config.Init), node("b", config.ControlPlane)
	a.start()
	a.serves()
	r.knows(0, a.addr)
	ctx := t.Context()
	must(t, os.MkdirAll(b.path("data"), 0o700))

	// After it was added, before that was recorded.
	must(t, b.decide(ctx))
	must(t, os.Remove(b.o.Journal))
	before, err := b.read()
	must(t, err)
	must(t, b.decide(ctx))
	a.expect(" learner", "a") // the same one, which has no name yet
	if before.Phase != none {
		t.Errorf("the journal came back: %+v", before)
	}

	// After etcd made its first files, without a log.
	must(t, os.MkdirAll(b.path("data", "member", "snap"), 0o700))
	must(t, b.decide(ctx))
	if entries, _ := os.ReadDir(b.path("data")); len(entries) > 0 {
		t.Errorf("the data of a join that was cut short is still there: %v", entries)
	}

	// While it is a learner with data, and is then removed by a command.
	must(t, b.exec())
	eventually.That(t, 20*time.Second, "b to write its log", func() error {
		if !b.hasLog() {
			return errors.New("no log")
		}
		return nil
	})
	eventually.That(t, 20*time.Second, "b to tell its name", func() error {
		if got := a.members(); !slices.Equal(got, []string{"a", "b learner"}) {
			return fmt.Errorf("members are %q", got)
		}
		return nil
	})
	b.kill()
	must(t, b.decide(ctx)) // still a member: nothing is changed
	if !b.hasLog() {
		t.Error("the data of a member was removed")
	}
	c, err := Dial(ctx, a.o.Store, clientURL(a.addr))
	must(t, err)
	defer c.Close()
	found, err := list(ctx, c)
	must(t, err)
	for _, m := range found.Members {
		if m.IsLearner {
			must(t, remove(ctx, c, found.Members, m))
		}
	}
	b.start()
	b.serves()
	a.expect("a", "b")
}

func executable(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Mode().Perm()&0o100 != 0
}

// S-213: a control plane begins a cluster on request; a repeated request
// reports that. Other nodes refuse, and join.
func TestRealBootstrap(t *testing.T) {
	t.Parallel()
	r, node := realRig(t)
	r.knows(503)
	a, b := node("a", config.ControlPlane), node("b", config.ControlPlane)
	ctx := t.Context()
	refused := func(n *realNode, says string) {
		t.Helper()
		var refusal Refusal
		if _, err := n.Bootstrap(ctx, nil); !errors.As(err, &refusal) || !strings.Contains(err.Error(), says) {
			t.Errorf("bootstrap of %s: %v, want a refusal with %q", n.name, err, says)
		}
	}
	refused(a, "answers at "+r.apiserver.URL+", with 503")
	r.down(true)
	a.start()
	eventually.That(t, 10*time.Second, "a to wait", func() error { return a.events.has("Waiting for bootstrap") })
	begun, err := a.Bootstrap(ctx, nil)
	if err != nil || begun.Already || begun.Token == "" {
		t.Fatalf("bootstrap: %+v, %v", begun, err)
	}
	for _, cluster := range []bool{false, true} { // before it serves, and after
		again, err := a.Bootstrap(ctx, nil)
		if err != nil || !again.Already || again.Token != begun.Token || (again.Cluster != "") != cluster {
			t.Errorf("bootstrap again: %+v, %v", again, err)
		}
		a.serves()
		if id, _, err := a.Members(ctx); err != nil || cluster && id != again.Cluster {
			t.Errorf("etcd is of cluster %s, %v; bootstrap said %s", id, err, again.Cluster)
		}
	}
	r.down(false)
	r.knows(0, a.addr)
	refused(b, "the cluster lives already, with etcd at "+clientURL(a.addr))
	b.start()
	b.serves()
	a.expect("a", "b")
	refused(b, "isn't empty")

	// After the loss of its data, the node that began the cluster doesn't begin a second one.
	a.kill()
	b.kill()
	must(t, os.RemoveAll(a.path("data")))
	a.events.forget()
	r.knows(0, a.addr, b.addr)
	a.start()
	eventually.That(t, 20*time.Second, "a to wait for b", func() error { return a.events.has("etcd at " + clientURL(b.addr) + " to answer") })
}

// A voting member that was removed while it was down detects that, and joins
// again; one that is still a member continues, whatever the reason of its end.
func TestRealRemovedWhileDown(t *testing.T) {
	t.Parallel()
	r, node := realRig(t)
	a, b := node("a", config.Init), node("b", config.ControlPlane)
	ctx := t.Context()
	a.start()
	a.serves()
	r.knows(0, a.addr)
	b.start()
	b.serves()
	must(t, b.notePeers(ctx))
	r.knows(503) // the journal has addresses to ask

	before, ok, err := b.identity()
	must(t, err)
	b.suspect.Store(true)
	must(t, b.decide(ctx))
	if after, _, err := b.identity(); err != nil || after != before || !ok {
		t.Errorf("a member's data: %x, then %x, %v", before, after, err)
	}

	if _, err := a.RemoveMember(ctx, HexID(before.member)); err != nil {
		t.Fatal(err)
	}
	eventually.That(t, 30*time.Second, "b to end", func() error {
		if said, _ := os.ReadFile(b.path("log")); !bytes.Contains(said, []byte("removed")) {
			return errors.New("etcd hasn't noticed")
		}
		return nil
	})
	b.kill()
	b.suspect.Store(true)
	b.start()
	b.serves()
	a.expect("a", "b")
	if after, _, err := b.identity(); err != nil || after.member == before.member {
		t.Errorf("it is member %x again: %v", after.member, err)
	}
}

// Leaving, removal and leadership, and what is refused.
func TestRealOperate(t *testing.T) {
	t.Parallel()
	r, node := realRig(t)
	a, b, c := node("a", config.Init), node("b", config.ControlPlane), node("c", config.ControlPlane)
	ctx := t.Context()
	a.start()
	a.serves()
	if _, err := a.Leave(ctx); !errors.Is(err, ErrLast) {
		t.Errorf("the last member leaves: %v", err)
	}
	must(t, a.MayStop(ctx, 0))
	r.knows(0, a.addr)
	b.start()
	b.serves()
	c.start()
	c.serves()

	leader, was, err := a.ForfeitLeadership(ctx)
	if err != nil || !was || leader == "" {
		t.Fatalf("forfeit: %q, %t, %v", leader, was, err)
	}
	if next, was, err := a.ForfeitLeadership(ctx); err != nil || was || next != leader {
		t.Errorf("forfeit again: %q, %t, %v; want %q", next, was, err, leader)
	}
	statuses, err := a.Status(ctx)
	must(t, err)
	for _, s := range statuses {
		if s.Err != nil || s.Version == "" || s.DbSize == 0 || (called(s.Member) == leader) != (s.Leader == s.Member.ID) {
			t.Errorf("status of %s: %+v, %v", called(s.Member), s.StatusResponse, s.Err)
		}
	}
	var database bytes.Buffer
	must(t, a.Snapshot(ctx, &database))
	content := database.Bytes()
	at := max(0, len(content)-sha256.Size)
	if sum := sha256.Sum256(content[:at]); !bytes.Equal(sum[:], content[at:]) {
		t.Errorf("a snapshot of %d bytes doesn't end with its sum", len(content))
	}
	if before, after, err := a.Defragment(ctx); err != nil || after == 0 || after > before {
		t.Errorf("defragment: %d, %d, %v", before, after, err)
	}
	if alarms, err := a.Alarms(ctx, true); err != nil || len(alarms) > 0 {
		t.Errorf("alarms: %v, %v", alarms, err)
	}

	// c leaves in order, and joins again.
	c.o.Stop = func(context.Context) error { c.kill(); return nil }
	p, err := c.ownMember(ctx)
	must(t, err)
	p.close()
	if c.removed(ctx, p) {
		t.Error("c is said to be removed, and isn't")
	}
	if _, err := c.Leave(ctx); err != nil {
		t.Fatal(err)
	}
	// The same check is used after the answer to the removal was lost.
	if !c.removed(ctx, p) {
		t.Error("c isn't said to be removed")
	}
	a.expect("a", "b")
	if data, err := c.hasData(); data || err != nil {
		t.Errorf("data is left: %t, %v", data, err)
	}
	// A node doesn't leave twice.
	c.o.Stop = func(context.Context) error { t.Error("stopped again"); return nil }
	if name, err := c.Leave(ctx); err != nil || name != "" {
		t.Errorf("leaving again: %q, %v", name, err)
	}
	must(t, c.MayLeave(ctx, 0))
	c.start()
	c.serves()
	must(t, c.MayLeave(ctx, 0))
	must(t, c.MayStop(ctx, 0))

	// b is gone: it can be removed, and after that c can't.
	_, members, err := a.Members(ctx)
	must(t, err)
	ids := map[string]string{}
	for _, m := range members {
		ids[m.Name] = HexID(m.ID)
	}
	b.kill()
	if _, err := a.RemoveMember(ctx, ids["c"]); !errors.Is(err, ErrQuorum) || !strings.Contains(err.Error(), "no answer from b ("+ids["b"]+")") {
		t.Errorf("removing a living one of three with another dead: %v", err)
	}
	if err := c.MayLeave(ctx, 0); !errors.Is(err, ErrQuorum) || !strings.Contains(err.Error(), "no answer from b ("+ids["b"]+")") {
		t.Errorf("c may leave: %v", err)
	}
	if err := c.MayStop(ctx, 0); !errors.Is(err, ErrQuorum) || !strings.Contains(err.Error(), "1 do (a ("+ids["a"]+")); no answer from b ("+ids["b"]+")") {
		t.Errorf("c may stop: %v", err)
	}
	if _, err := a.RemoveMember(ctx, ids["a"]); !errors.As(err, new(Refusal)) {
		t.Errorf("removing itself: %v", err)
	}
	if _, err := a.RemoveMember(ctx, "123"); !errors.Is(err, ErrNoMember) {
		t.Errorf("removing nobody: %v", err)
	}
	if _, err := a.RemoveMember(ctx, ids["b"]); err != nil {
		t.Errorf("removing the dead one: %v", err)
	}
	a.expect("a", "c")

	// c's leave was interrupted by a power cut after the removal; it has its data
	// and doesn't run.
	_, members, err = c.Members(ctx)
	must(t, err)
	before, err := c.read()
	must(t, err)
	own, ok, err := c.identity()
	if err != nil || !ok || HexID(own.member) != before.Member || HexID(own.cluster) != before.Cluster {
		t.Errorf("the data is of %x, %t, %v; the journal says %+v", own, ok, err, before)
	}
	if !slices.ContainsFunc(members, func(m *pb.Member) bool { return m.ID == own.member && m.Name == "c" }) {
		t.Errorf("%x isn't c of %v", own.member, members)
	}
	r.knows(0, a.addr)
	c.kill()
	if name, err := c.Leave(ctx); err == nil || name != "" {
		t.Errorf("leaving without an answer of the other half: %q, %v", name, err)
	}
	// Neither may a stop then: the error lists the missing members, although a can only ask itself.
	if err := a.MayStop(ctx, 0); !errors.Is(err, ErrQuorum) || !strings.Contains(err.Error(), "no answer from c ("+HexID(own.member)+")") {
		t.Errorf("a may stop: %v", err)
	}
	must(t, c.exec())
	eventually.That(t, 20*time.Second, "c to answer again", func() error { return c.MayLeave(ctx, 0) })
	// c waits if a doesn't answer for a short time; the case without an end is above.
	leaves, err := c.ownMember(ctx)
	must(t, err)
	defer leaves.close()
	must(t, a.cmd.Process.Signal(syscall.SIGSTOP))
	settled := make(chan error, 1)
	go func() { settled <- settle(ctx, SettleTimeout, leaves.may(mayRemove)) }()
	if err := leaves.may(mayRemove)(ctx); !errors.Is(err, ErrQuorum) { // settle, which began before, was refused, too
		t.Errorf("a stands still, and c may leave: %v", err)
	}
	must(t, a.cmd.Process.Signal(syscall.SIGCONT))
	if err := <-settled; err != nil {
		t.Errorf("a was silent for a moment: %v", err)
	}
	c.o.Stop = func(context.Context) error { c.kill(); return nil }
	if _, err := c.Leave(ctx); err != nil {
		t.Error(err)
	}
	a.expect("a")
	// Once more with the data: it was removed, and only the data is left to remove.
	must(t, os.MkdirAll(filepath.Join(c.path("data"), "member"), 0o700))
	if name, err := c.Leave(ctx); err != nil || name != "" {
		t.Errorf("leaving when it was removed: %q, %v", name, err)
	}
	if data, err := c.hasData(); data || err != nil {
		t.Errorf("data is left: %t, %v", data, err)
	}
}
