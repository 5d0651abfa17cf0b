//go:build e2e

package etcd

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// etcdutl runs the program that the node would run in a container.
func etcdutl(ctx context.Context, args []string) (string, error) {
	cmd := exec.CommandContext(ctx, component(args[0]), args[1:]...)
	said, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		err = &containerd.ExitError{ID: utilityID, Status: uint32(exit.ExitCode())}
	}
	return string(said), err
}

func component(name string) string {
	for _, dir := range filepath.SplitList(os.Getenv(componentsVar)) {
		if path := filepath.Join(dir, name); executable(path) {
			return path
		}
	}
	return name
}

func (n *realNode) client() *clientv3.Client {
	n.rig.t.Helper()
	c, err := Dial(context.Background(), n.o.Store, clientURL(n.addr))
	must(n.rig.t, err)
	n.rig.t.Cleanup(func() { c.Close() })
	return c
}

func (n *realNode) put(key string) {
	n.rig.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), eventually.Scale(requestTimeout))
	defer cancel()
	_, err := n.client().Put(ctx, key, "x")
	must(n.rig.t, err)
}

func (n *realNode) get(key string) *clientv3.GetResponse {
	n.rig.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), eventually.Scale(requestTimeout))
	defer cancel()
	got, err := n.client().Get(ctx, key)
	must(n.rig.t, err)
	return got
}

func (n *realNode) wipe() {
	n.kill()
	must(n.rig.t, os.RemoveAll(n.path("data")))
}

func snapshotOf(content []byte) Snapshot {
	return Snapshot{Size: uint64(len(content)), SHA256: sha256.Sum256(content)}
}

// Two of three nodes are lost; the third begins a new cluster with a snapshot, and
// the others join again with empty disks. The new cluster refuses their old data.
func TestRealRecover(t *testing.T) {
	t.Parallel()
	r, node := realRig(t)
	a, b, c := node("a", config.Init), node("b", config.ControlPlane), node("c", config.ControlPlane)
	ctx := t.Context()
	a.start()
	a.serves()
	r.knows(0, a.addr)
	for _, n := range []*realNode{b, c} {
		n.start()
		n.serves()
		must(t, n.notePeers(ctx))
	}
	a.put("before")
	var buf bytes.Buffer
	must(t, a.Snapshot(ctx, &buf))
	content := buf.Bytes()
	a.put("after")
	seenBefore := a.get("after").Header

	refused := func(n *realNode, s Snapshot, content []byte, says string) {
		t.Helper()
		before, err := n.read()
		must(t, err)
		_, _, err = n.Receive(ctx, s, bytes.NewReader(content))
		if !errors.As(err, new(Refusal)) || !strings.Contains(err.Error(), says) {
			t.Errorf("%v, want a refusal with %q", err, says)
		}
		after, err := n.read()
		must(t, err)
		if fmt.Sprint(before) != fmt.Sprint(after) {
			t.Errorf("the journal was %+v, is %+v", before, after)
		}
		if left, _ := filepath.Glob(n.recoveryPath("*")); len(left) > 0 {
			t.Errorf("%q is left", left)
		}
	}
	refused(a, snapshotOf(content), content, "isn't empty")
	c.wipe()
	r.down(true)
	refused(c, snapshotOf(content), content, "etcd of this cluster answers at "+b.addr.String())

	a.kill()
	b.kill()
	damaged := bytes.Clone(content)
	damaged[len(damaged)/2] ^= 1
	for _, tt := range []struct {
		name    string
		s       Snapshot
		content []byte
		says    string
	}{
		{"a flipped byte", snapshotOf(damaged), damaged, "damaged"},
		{"a flipped byte on the way", snapshotOf(content), damaged, "another one"},
		{"too short", snapshotOf(content), content[:len(content)-1], "other than that came"},
		{"without its sum", snapshotOf(content[:len(content)-sha256.Size]), content[:len(content)-sha256.Size], "doesn't end with its SHA-256"},
		{"something else", Snapshot{Size: 1024, SHA256: sha256.Sum256(make([]byte, 1024)), Raw: true}, make([]byte, 1024), "isn't a database of etcd"},
		{"too large", Snapshot{Size: maxSnapshot + 1}, nil, "of at most"},
	} {
		t.Run(tt.name, func(t *testing.T) { refused(c, tt.s, tt.content, tt.says) })
	}

	// The power is cut when the file is complete, and then when it is half restored.
	cut, cancel := context.WithCancel(ctx)
	cancel()
	if _, _, err := c.Receive(cut, snapshotOf(content), bytes.NewReader(content)); err == nil {
		t.Error("received without time for it")
	}
	if _, err := c.read(); err != nil {
		t.Error(err)
	}
	began := make(chan struct{})
	c.utility = func(ctx context.Context, _ []string) (string, error) {
		close(began)
		<-ctx.Done()
		return "", ctx.Err()
	}
	c.operate()
	id := c.recover(snapshotOf(content), content)
	c.start()
	<-began
	c.kill()
	must(t, os.MkdirAll(c.recoveryPath("data/member/snap"), 0o700))
	must(t, os.WriteFile(c.recoveryPath("data/member/snap/db"), content[:4096], 0o600))
	c.utility = etcdutl
	c.start()
	c.operate()
	c.serves()
	c.ready.Store(true) // like the service's health check
	if o := c.ended(id); o.State != operation.Done {
		t.Errorf("%+v", o)
	}
	c.expect("c")
	if got := c.get("before"); got.Count != 1 || got.Header.Revision <= seenBefore.Revision || got.Header.ClusterId == seenBefore.ClusterId {
		t.Errorf("before: %+v, was %+v", got, seenBefore)
	}
	if got := c.get("after"); got.Count != 0 {
		t.Errorf("after: %+v", got)
	}
	if left, _ := filepath.Glob(c.recoveryPath("*")); len(left) > 0 {
		t.Errorf("%q is left", left)
	}
	if again, _, err := c.Receive(ctx, snapshotOf(content), bytes.NewReader(content)); err != nil || again == nil || !again.Already {
		t.Errorf("again: %+v, %v", again, err)
	}

	// b comes back with its data, which now belongs to another cluster.
	r.knows(0, c.addr)
	b.events.forget()
	b.start()
	eventually.That(t, 20*time.Second, "b to run", func() error {
		if said, _ := os.ReadFile(b.path("log")); !bytes.Contains(said, []byte("cluster ID mismatch")) {
			return errors.New("it hasn't met c yet")
		}
		return nil
	})
	long := time.Now().Add(-time.Hour)
	b.well.Store(&long)
	if err := b.watchOnce(ctx); reason.Of(err) != ForeignData || !strings.Contains(err.Error(), clientURL(c.addr)) {
		t.Errorf("who looks after b says %v", err)
	}
	b.kill()
	b.suspect.Store(true) // because its run ended by itself
	b.start()
	eventually.That(t, 20*time.Second, "b to detect the data of another cluster", func() error { return b.events.has("holds data of another etcd cluster") })
	c.expect("c")
	// Its disk is wiped, and so is a's.
	for _, n := range []*realNode{a, b} {
		n.wipe()
		n.start()
		n.serves()
	}
	a.expect("a", "b", "c")
	if a.get("before").Count != 1 {
		t.Error("a hasn't what was recovered")
	}
}

// A copy of a member's database is accepted with Raw.
func TestRealRecoverRaw(t *testing.T) {
	t.Parallel()
	_, node := realRig(t)
	a, b := node("a", config.Init), node("b", config.ControlPlane)
	ctx := t.Context()
	a.start()
	a.serves()
	a.put("before")
	_, _, err := a.Defragment(ctx) // so that it is in the file
	must(t, err)
	a.kill()
	content, err := os.ReadFile(a.path("data", "member", "snap", "db"))
	must(t, err)
	b.utility = etcdutl
	b.start()
	eventually.That(t, 10*time.Second, "b to wait", func() error { return b.events.has("Waiting for bootstrap") })
	s := snapshotOf(content)
	s.Raw = true
	b.operate()
	b.recover(s, content)
	b.serves()
	if b.get("before").Count != 1 {
		t.Error("it isn't there")
	}

	// After a tool has failed, the node waits as before, and accepts another snapshot.
	c := node("c", config.ControlPlane)
	c.utility = func(context.Context, []string) (string, error) {
		return "no", &containerd.ExitError{ID: utilityID, Status: 1}
	}
	b.kill()
	c.operate()
	c.start()
	id := c.recover(s, content)
	if o := c.ended(id); o.State != operation.Failed || !strings.Contains(o.Error, "ended with status 1: no") {
		t.Errorf("a tool that fails: %+v", o)
	}
	if got, err := c.read(); err != nil || got.Phase != waiting {
		t.Errorf("%+v, %v", got, err)
	}
	if left, _ := filepath.Glob(c.recoveryPath("*")); len(left) > 0 {
		t.Errorf("%q is left", left)
	}
}

// operate runs the operations of the node until it is killed.
func (n *realNode) operate() {
	t := n.rig.t
	var err error
	n.ops, err = operation.New(operation.Options{
		Store: n.o.Store, Log: slog.New(slog.DiscardHandler), Dir: n.path("operations"), Definitions: n.Definitions(),
	})
	must(t, err)
	n.o.Running = n.ops.Running
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- n.ops.Run(ctx) }()
	n.ops.Open()
	eventually.That(t, 10*time.Second, "the journals to be read", func() error {
		_, err := n.ops.Running()
		return err
	})
	n.stopOps = func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

// recover sends a snapshot, and begins to restore it.
func (n *realNode) recover(s Snapshot, content []byte) (id string) {
	t := n.rig.t
	t.Helper()
	_, release, err := n.Receive(t.Context(), s, bytes.NewReader(content))
	must(t, err)
	defer release()
	arguments := RecoverArguments{SHA256: hexSum(s), Raw: s.Raw}
	o, err := n.ops.Start(t.Context(), operation.Ask{Name: RecoverOperation, By: "jane", Arguments: arguments})
	must(t, err)
	return o.ID
}

// ended waits for the end of an operation.
func (n *realNode) ended(id string) (o operation.Operation) {
	t := n.rig.t
	t.Helper()
	eventually.That(t, 30*time.Second, id+" to end", func() (err error) {
		o, err = n.ops.Get(id)
		if err == nil && !o.Finished() {
			err = fmt.Errorf("it is %s: %+v", o.State, o.Steps)
		}
		return err
	})
	return o
}
