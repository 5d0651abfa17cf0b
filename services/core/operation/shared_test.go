package operation

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// cell stands for etcd: the records of all nodes, and who coordinates. A node that is gone,
// or cut off, is its operation's coordinator until its lease ends.
type cell struct {
	mu      sync.Mutex // guards all following fields
	records map[string][]byte
	owners  map[string]*cellClaim
	down    bool // no quorum
	cut     map[string]bool
}

const cellLease = time.Minute

func newCell() *cell {
	return &cell{records: map[string][]byte{}, owners: map[string]*cellClaim{}, cut: map[string]bool{}}
}

var errQuorum = errors.New("etcd has no quorum")

func (c *cell) set(change func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change()
}

// of is the cell as a node has it.
func (c *cell) of(node string) Shared { return cellNode{c, node} }

type cellNode struct {
	*cell
	node string
}

type cellClaim struct {
	cellNode
	h       Holder
	expires time.Time
	lost    chan struct{}
}

func (n cellNode) reach() error {
	if n.down || n.cut[n.node] {
		return errQuorum
	}
	return nil
}

func (n cellNode) Claim(_ context.Context, h Holder) (Claim, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.reach(); err != nil {
		return nil, err
	}
	h.Node = n.node
	if o := n.owners[h.ID]; o != nil && o.node != n.node && time.Now().Before(o.expires) {
		return nil, &HeldError{Holder: o.h}
	}
	c := &cellClaim{cellNode: n, h: h, expires: time.Now().Add(cellLease), lost: make(chan struct{})}
	n.owners[h.ID] = c
	go c.keep()
	return c, nil
}

func (n cellNode) List(context.Context) ([]SharedRecord, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.reach(); err != nil {
		return nil, err
	}
	var all []SharedRecord
	for id, text := range n.records {
		r := SharedRecord{ID: id, Record: text}
		if o := n.owners[id]; o != nil && time.Now().Before(o.expires) {
			r.Coordinator = &o.h
		}
		all = append(all, r)
	}
	return all, nil
}

func (n cellNode) Delete(_ context.Context, id string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.records, id)
	return n.reach()
}

// keep renews the claim each second while its node reaches the others.
func (c *cellClaim) keep() {
	for {
		time.Sleep(time.Second)
		c.mu.Lock()
		switch {
		case c.owners[c.h.ID] != c:
			c.mu.Unlock()
			return
		case c.reach() == nil:
			c.expires = time.Now().Add(cellLease)
		case time.Until(c.expires) < 10*time.Second:
			close(c.lost)
			c.mu.Unlock()
			return
		}
		c.mu.Unlock()
	}
}

func (c *cellClaim) Node() string          { return c.node }
func (c *cellClaim) Lost() <-chan struct{} { return c.lost }

func (c *cellClaim) Read(context.Context) ([]byte, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.records[c.h.ID], c.reach()
}

func (c *cellClaim) Write(_ context.Context, text []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.reach(); err != nil {
		return err
	}
	if c.owners[c.h.ID] != c {
		return errors.New("another node is the coordinator")
	}
	c.records[c.h.ID] = text
	return nil
}

func (c *cellClaim) Release(context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.owners[c.h.ID] == c {
		delete(c.owners, c.h.ID)
	}
	return c.reach()
}

// upgrade is a shared operation with a part for each of three nodes. The part of n2 waits
// until it is released; what is done on which coordinator is in did.
func (n *node) upgrade(name string, release <-chan struct{}, did *[]string, mu *sync.Mutex) Definition {
	found := Data[[]string]{"nodes"}
	note := func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		*did = append(*did, name+": "+fmt.Sprintf(format, args...))
	}
	steps := []Step{
		{ID: "look", What: "find the nodes", Deadline: time.Minute, Run: func(_ context.Context, p *Progress) error {
			note("look")
			return found.Put(p, []string{"n1", "n2", "n3"})
		}},
		{ID: "nodes", What: "upgrade each node", Deadline: time.Hour, Run: func(ctx context.Context, p *Progress) error {
			nodes, err := found.Get(p)
			if err != nil {
				return err
			}
			var parts []Part
			for _, node := range nodes {
				parts = append(parts, Part{ID: node, What: "upgrade " + node, Run: func(ctx context.Context, p *Progress) error {
					p.Report("begins")
					note("begin %s", node)
					if node == "n2" {
						select {
						case <-release:
						case <-ctx.Done():
							return ctx.Err()
						}
					}
					note("done %s", node)
					return nil
				}})
			}
			return p.Each(ctx, 1, parts...)
		}},
	}
	return Definition{
		Name: "upgrade", Shared: true,
		Plan:  func(context.Context, Request) (Plan, error) { return Plan{Steps: steps}, nil },
		Steps: func(Request) ([]Step, error) { return steps, nil },
	}
}

// three are the control planes of a cluster; what their operations did is in did.
type three struct {
	*cell
	nodes   map[string]*node
	release chan struct{}
	mu      sync.Mutex
	did     []string
}

func newThree(t *testing.T) *three {
	c := &three{cell: newCell(), nodes: map[string]*node{}, release: make(chan struct{})}
	for _, name := range []string{"n1", "n2", "n3"} {
		n := newNode(t)
		n.shared = c.of(name)
		n.definitions = []Definition{n.upgrade(name, c.release, &c.did, &c.mu)}
		n.boot()
		c.nodes[name] = n
	}
	return c
}

func (c *three) expect(t *testing.T, want ...string) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	if got := strings.Join(c.did, "; "); got != strings.Join(want, "; ") {
		t.Errorf("done: %s", got)
	}
}

// A coordinator that is killed in the middle of a step with a part for each of three
// nodes: another node takes the operation over, and ends it. What is done isn't done again.
func TestTakeOver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newThree(t)
		defer time.Sleep(2 * time.Second) // until claims have seen their end
		n1, n3 := c.nodes["n1"], c.nodes["n3"]
		defer c.nodes["n2"].halt()
		id := n1.start("upgrade")
		synctest.Wait()
		o := n1.want(id, Running, Done, Running)
		if got := summary(o.Steps[1]); got != "1 of 3 done, n2: begins" || o.Coordinator != "n1" {
			t.Errorf("%q on %s", got, o.Coordinator)
		}
		there, err := n3.r.Elsewhere(t.Context())
		if err != nil || len(there) != 1 || there[0].ID != id || there[0].Coordinator != "n1" || there[0].Orphaned {
			t.Errorf("n3 has %+v, %v", there, err)
		}
		if _, err := n3.r.TakeOver(t.Context(), id, "eve", anyone); !errors.As(err, new(Refusal)) || !strings.Contains(err.Error(), "node n1 is running upgrade") {
			t.Errorf("its coordinator is there: %v", err)
		}
		c.set(func() { c.cut["n1"] = true })
		n1.halt() // it is gone, and tells nobody
		time.Sleep(cellLease + time.Second)
		if there, err = n3.r.Elsewhere(t.Context()); err != nil || len(there) != 1 || !there[0].Orphaned {
			t.Errorf("n3 has %+v, %v", there, err)
		}
		close(c.release)
		if _, err := n3.r.TakeOver(t.Context(), id, "eve", anyone); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		o = n3.want(id, Done, Done, Done)
		if o.Coordinator != "n3" || o.By != "jo" {
			t.Errorf("%+v", o)
		}
		c.expect(t, "n1: look", "n1: begin n1", "n1: done n1", "n1: begin n2", "n3: begin n2", "n3: done n2", "n3: begin n3", "n3: done n3")
		// The former coordinator comes back, and leaves it alone.
		c.set(func() { c.cut["n1"] = false })
		n1.boot()
		defer n1.halt()
		time.Sleep(time.Minute)
		if o := n1.want(id, Done, Done, Done); o.Coordinator != "n3" {
			t.Errorf("n1 has %+v", o)
		}
		c.expect(t, "n1: look", "n1: begin n1", "n1: done n1", "n1: begin n2", "n3: begin n2", "n3: done n2", "n3: begin n3", "n3: done n3")
		n3.halt()
	})
}

// A coordinator that is cut off ends its step before another node can take over, and
// reports afterwards which node has it.
func TestCoordinatorThatIsCutOff(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newThree(t)
		defer time.Sleep(2 * time.Second) // until claims have seen their end
		for _, n := range c.nodes {
			defer n.halt()
		}
		n1, n2 := c.nodes["n1"], c.nodes["n2"]
		id := n1.start("upgrade")
		synctest.Wait()
		c.set(func() { c.cut["n1"] = true })
		time.Sleep(cellLease + time.Second)
		n1.want(id, Running, Done, Running) // it waits
		if _, err := n2.r.TakeOver(t.Context(), id, "eve", anyone); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		c.expect(t, "n1: look", "n1: begin n1", "n1: done n1", "n1: begin n2", "n2: begin n2")
		c.set(func() { c.cut["n1"] = false })
		time.Sleep(time.Minute)
		if o := n1.want(id, Moved, Done, Running); !strings.Contains(o.Error, "node n2 has taken it over") {
			t.Errorf("%q", o.Error)
		}
		close(c.release)
		synctest.Wait()
		n2.want(id, Done, Done, Done)
		c.expect(t, "n1: look", "n1: begin n1", "n1: done n1", "n1: begin n2", "n2: begin n2", "n2: done n2", "n2: begin n3", "n2: done n3")
	})
}

// Without a quorum nothing goes on, and nothing is lost: the operation waits, over a
// restart too, and goes on by itself.
func TestSharedOperationWaitsForTheQuorum(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newThree(t)
		defer time.Sleep(2 * time.Second) // until claims have seen their end
		for _, n := range c.nodes {
			defer n.halt()
		}
		n1 := c.nodes["n1"]
		c.set(func() { c.down = true })
		if _, err := n1.try(Ask{Name: "upgrade"}); !errors.As(err, new(Refusal)) || !strings.Contains(err.Error(), "its record can't be kept in etcd") {
			t.Errorf("%v", err)
		}
		c.set(func() { c.down = false })
		id := n1.start("upgrade")
		synctest.Wait()
		c.set(func() { c.down = true })
		close(c.release)
		time.Sleep(time.Hour)
		n1.want(id, Running, Done, Running)
		n1.halt()
		n1.boot()
		time.Sleep(time.Hour)
		n1.want(id, Running, Done, Running)
		c.set(func() { c.down = false })
		time.Sleep(time.Minute)
		n1.want(id, Done, Done, Done)
		c.mu.Lock()
		defer c.mu.Unlock()
		rec, err := decode(c.records[id])
		if err != nil || rec.State != Done || rec.Coordinator != "n1" {
			t.Errorf("etcd has %+v, %v", rec, err)
		}
	})
}

// anyone may take an operation over.
func anyone(Operation) error { return nil }
