//go:build e2e

package etcd

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/peers"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// coordinatorWord is the first argument of a process that is a node's coordinator of
// operations: a test kills it. The others are the node's folder, its name and its address.
const coordinatorWord = "coordinator"

func TestMain(m *testing.M) {
	if len(os.Args) == 5 && os.Args[1] == coordinatorWord {
		err := coordinate(os.Args[2], os.Args[3], os.Args[4])
		fmt.Fprintln(os.Stderr, "coordinator:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// coordinate begins an operation and writes to standard output what it does, until its
// process is killed.
func coordinate(dir, name, address string) error {
	addr, err := netip.ParseAddr(address)
	if err != nil {
		return err
	}
	// The certificate that the member serves with is one for clients, too.
	var files [3][]byte
	for i, file := range []string{"ca.crt", "tls.crt", "tls.key"} {
		if files[i], err = os.ReadFile(filepath.Join(dir, file)); err != nil {
			return err
		}
	}
	store := resource.NewStore()
	as := store.As("test")
	err = errors.Join(
		network.Hostnames.Put(as, network.HostnameID, name),
		network.Addresses.Put(as, network.AddressID, network.NodeAddress{Primary: addr}),
		secrets.Etcd.Put(as, secrets.EtcdID, secrets.EtcdSpec{CA: files[0], Client: config.CertKey{Crt: files[1], Key: files[2]}}),
	)
	if err != nil {
		return err
	}
	e := New(Options{Store: store, Peers: peers.New(store), DataDir: filepath.Join(dir, "data"), Journal: filepath.Join(dir, "etcd.json")})
	r, err := operations(name, dir, e.Shared(), func(did string) { fmt.Println(did) }, nil)
	if err != nil {
		return err
	}
	r.Open()
	if _, err := r.Start(context.Background(), operation.Ask{Name: "each", By: "jo"}); err != nil {
		return err
	}
	return r.Run(context.Background())
}

// coordinator starts such a process. What it does is noted.
func (n *realNode) coordinator(done *journal) *exec.Cmd {
	t := n.rig.t
	program, err := os.Executable()
	must(t, err)
	cmd := exec.Command(program, coordinatorWord, n.dir, n.name, n.addr.String())
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	var reading sync.WaitGroup
	reading.Go(func() {
		for lines := bufio.NewScanner(out); lines.Scan(); {
			done.note(lines.Text())
		}
	})
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		reading.Wait()
		_ = cmd.Wait()
	})
	return cmd
}

// journal is the steps of an operation's coordinators, in order.
type journal struct {
	mu    sync.Mutex // guards lines
	lines []string
}

func (j *journal) note(did string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.lines = append(j.lines, did)
}

func (j *journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return strings.Join(j.lines, "; ")
}

// operations runs the operations of a node: one with a step on each of three
// nodes, which stops at n2 until it is released.
func operations(name, dir string, shared operation.Shared, note func(did string), release <-chan struct{}) (*operation.Runner, error) {
	nodes := operation.Data[[]string]{Key: "nodes"}
	steps := []operation.Step{
		{ID: "look", What: "find the nodes", Deadline: time.Minute, Run: func(_ context.Context, p *operation.Progress) error {
			note(name + " finds the nodes")
			return nodes.Put(p, []string{"n1", "n2", "n3"})
		}},
		{ID: "each", What: "do it on each node", Deadline: time.Hour, Run: func(ctx context.Context, p *operation.Progress) error {
			found, err := nodes.Get(p)
			if err != nil {
				return err
			}
			var parts []operation.Part
			for _, of := range found {
				parts = append(parts, operation.Part{ID: of, What: "do it on " + of, Run: func(ctx context.Context, _ *operation.Progress) error {
					note(name + " begins " + of)
					if of == "n2" {
						select {
						case <-release:
						case <-ctx.Done():
							note(name + " stops " + of)
							return ctx.Err()
						}
					}
					note(name + " ends " + of)
					return nil
				}})
			}
			return p.Each(ctx, 1, parts...)
		}},
	}
	return operation.New(operation.Options{
		Store: resource.NewStore(), Log: slog.New(slog.NewTextHandler(io.Discard, nil)), Dir: filepath.Join(dir, "state", "operations"), Shared: shared,
		Definitions: []operation.Definition{{
			Name: "each", Shared: true,
			Plan: func(context.Context, operation.Request) (operation.Plan, error) {
				return operation.Plan{Steps: steps}, nil
			},
			Steps: func(operation.Request) ([]operation.Step, error) { return steps, nil },
		}},
	})
}

// operates runs a node's operations in this process until the test ends.
func (n *realNode) operates(done *journal, release <-chan struct{}) *operation.Runner {
	t := n.rig.t
	r, err := operations(n.name, n.dir, n.Shared(), done.note, release)
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = r.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	r.Open()
	return r
}

// The coordinator of an operation is killed, with its member of etcd, in the middle of a step with a part for each
// of three nodes. Another control plane takes the operation over and ends it, with only
// the record in etcd. After its return, the former coordinator doesn't continue it.
func TestRealTakeOver(t *testing.T) {
	t.Parallel()
	r, node := realRig(t)
	a, b, c := node("a", config.Init), node("b", config.ControlPlane), node("c", config.ControlPlane)
	a.start()
	a.serves()
	r.knows(0, a.addr)
	for _, n := range []*realNode{b, c} {
		n.start()
		n.serves()
	}
	var done journal
	release := make(chan struct{})
	first := a.coordinator(&done)
	second := b.operates(&done, release)
	eventually.That(t, 30*time.Second, "the part of n2 to run", func() error {
		if at := done.String(); at != "a finds the nodes; a begins n1; a ends n1; a begins n2" {
			return errors.New(at)
		}
		return nil
	})
	there, err := second.Elsewhere(t.Context())
	must(t, err)
	if len(there) != 1 || there[0].Coordinator != "a" || there[0].Orphaned ||
		!slices.EqualFunc(there[0].Steps[1].Parts, []operation.State{operation.Done, operation.Running, operation.Pending}, func(p operation.PartStatus, s operation.State) bool { return p.State == s }) {
		t.Fatalf("b sees %+v", there)
	}
	id := there[0].ID
	refused := func(when string) {
		t.Helper()
		if _, err := second.TakeOver(t.Context(), id, "eve", anyone); !errors.As(err, new(operation.Refusal)) || !strings.Contains(err.Error(), "node a is running each") {
			t.Fatalf("%s: %v", when, err)
		}
	}
	refused("its coordinator is there")

	must(t, first.Process.Kill())
	a.kill()
	close(release)
	eventually.That(t, 30*time.Second, "b and c to have a leader", func() error {
		_, err := second.Elsewhere(t.Context())
		return err
	})
	refused("its coordinator could still be there") // it has given nothing back
	eventually.That(t, claimTTL+30*time.Second, "b to take it over", func() error {
		_, err := second.TakeOver(t.Context(), id, "eve", anyone)
		return err
	})
	eventually.That(t, 30*time.Second, "its end", func() error {
		o, err := second.Get(id)
		if err == nil && o.State != operation.Done {
			err = fmt.Errorf("it is %s: %s", o.State, o.Error)
		}
		return err
	})
	const want = "a finds the nodes; a begins n1; a ends n1; a begins n2; b begins n2; b ends n2; b begins n3; b ends n3"
	if got := done.String(); got != want {
		t.Errorf("done: %s", got)
	}

	a.start()
	a.serves()
	back := a.operates(&done, release)
	eventually.That(t, 30*time.Second, "a to know its end", func() error {
		o, err := back.Get(id)
		if err == nil && (o.State != operation.Done || o.Coordinator != "b") {
			err = fmt.Errorf("it is %s on %s: %s", o.State, o.Coordinator, o.Error)
		}
		return err
	})
	if got := done.String(); got != want {
		t.Errorf("done: %s", got)
	}
}

// anyone lets any node take an operation over.
func anyone(operation.Operation) error { return nil }
