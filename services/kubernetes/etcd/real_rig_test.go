//go:build e2e

package etcd

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
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

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// componentsVar is a list like PATH of the folders with etcd. `make e2e` sets
// it once it is built.
const componentsVar = "GARBOARD_COMPONENTS"

// realNode is a node whose etcd really runs, on its own loopback address.
type realNode struct {
	*node
	cmd     *exec.Cmd
	events  eventLog
	stop    func() // ends the goroutines beside etcd
	ops     *operation.Runner
	stopOps func()
}

// eventLog is the events that the user sees.
type eventLog struct {
	mu    sync.Mutex // guards lines
	lines []string
}

func (s *eventLog) event(_ reason.Code, line string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lines = append(s.lines, line)
}

func (s *eventLog) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lines = nil
}

func (s *eventLog) has(part string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if slices.ContainsFunc(s.lines, func(l string) bool { return strings.Contains(l, part) }) {
		return nil
	}
	return fmt.Errorf("nobody said %q: %q", part, s.lines)
}

// realRig gives its nodes addresses that no other test uses.
func realRig(t *testing.T) (r *rig, node func(name string, machineType config.MachineType) *realNode) {
	t.Helper()
	for _, program := range []string{"etcd", "etcdutl"} {
		if path := component(program); !filepath.IsAbs(path) {
			t.Fatalf("no %s in %s=%q: `make e2e` builds and sets it", program, componentsVar, os.Getenv(componentsVar))
		}
	}
	r = newRig(t)
	subnet := [4]byte{127, byte(64 + rand.IntN(128)), byte(rand.IntN(256)), 10}
	return r, func(name string, machineType config.MachineType) *realNode {
		subnet[3]++
		n := &realNode{node: r.node(name, machineType, netip.AddrFrom4(subnet))}
		n.writeKeys()
		t.Cleanup(n.kill)
		return n
	}
}

func (n *realNode) writeKeys() {
	t := n.rig.t
	keys, err := secrets.Etcd.Get(n.o.Store, secrets.EtcdID)
	must(t, err)
	must(t, os.WriteFile(n.path("ca.crt"), keys.Spec.CA, 0o600))
	must(t, os.WriteFile(n.path("tls.crt"), keys.Spec.Server.Crt, 0o600))
	must(t, os.WriteFile(n.path("tls.key"), keys.Spec.Server.Key, 0o600))
	n.cfg.Cluster.Etcd.ExtraArgs = config.Args{
		"data-dir": {n.path("data")}, "listen-client-urls": {clientURL(n.addr)}, "listen-metrics-urls": {"http://" + netip.AddrPortFrom(n.addr, 2381).String()},
		"trusted-ca-file": {n.path("ca.crt")}, "cert-file": {n.path("tls.crt")}, "key-file": {n.path("tls.key")},
		"peer-trusted-ca-file": {n.path("ca.crt")}, "peer-cert-file": {n.path("tls.crt")}, "peer-key-file": {n.path("tls.key")},
		"unsafe-no-fsync": {"true"},
	}
}

// start runs the node's etcd, beginning with its preparation.
func (n *realNode) start() {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	n.stop = func() { cancel(); wg.Wait() }
	wg.Go(func() {
		if err := n.prepare(ctx, n.events.event, n.events.event); err != nil {
			if ctx.Err() == nil {
				n.rig.t.Errorf("%s: %v", n.name, err)
			}
			return
		}
		if err := n.exec(); err != nil {
			n.rig.t.Error(err)
			return
		}
		if err := n.promote(ctx, n.events.event); err != nil {
			n.events.event("", err.Error())
		}
	})
}

func (n *realNode) exec() error {
	args, err := n.commandLine()
	if err != nil {
		return err
	}
	output, err := os.OpenFile(n.path("log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer output.Close()
	n.cmd = exec.Command(component("etcd"), args[1:]...)
	n.cmd.Stdout, n.cmd.Stderr = output, output
	n.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := n.cmd.Start(); err != nil {
		return fmt.Errorf("no etcd in %s=%q (`make e2e` builds and sets it): %w", componentsVar, os.Getenv(componentsVar), err)
	}
	return nil
}

// kill is a power cut.
func (n *realNode) kill() {
	if n.stopOps != nil {
		n.stopOps()
		n.stopOps = nil
	}
	if n.stop != nil {
		n.stop()
		n.stop = nil
	}
	if n.cmd != nil && n.cmd.Process != nil {
		_ = n.cmd.Process.Kill()
		_ = n.cmd.Wait()
		n.cmd = nil
	}
	n.going.Store(false) // like the end of run
	if n.rig.t.Failed() {
		said, _ := os.ReadFile(n.path("log"))
		n.rig.t.Logf("%s was told %q; etcd said:\n%s", n.name, n.events.lines, said[max(0, len(said)-4000):])
	}
}

// serves waits until the node's own member accepts writes, and has ended its
// beginning.
func (n *realNode) serves() {
	n.rig.t.Helper()
	c, err := Dial(context.Background(), n.o.Store, clientURL(n.addr))
	must(n.rig.t, err)
	defer c.Close()
	eventually.That(n.rig.t, 30*time.Second, n.name+" to serve", func() error {
		ctx, cancel := context.WithTimeout(context.Background(), eventually.Scale(5*time.Second))
		defer cancel()
		if _, err := c.Put(ctx, "by/"+n.name, "x"); err != nil {
			return err
		}
		if r := n.unsettled.Load(); r != nil && r.Phase == fresh {
			return n.settle(ctx, *r)
		} else if r != nil {
			return errors.New(string(r.Phase))
		}
		return nil
	})
}

func (n *realNode) members() []string {
	n.rig.t.Helper()
	c, err := Dial(context.Background(), n.o.Store, clientURL(n.addr))
	must(n.rig.t, err)
	defer c.Close()
	var found *clientv3.MemberListResponse
	eventually.That(n.rig.t, 20*time.Second, "members", func() (err error) {
		found, err = list(context.Background(), c)
		return err
	})
	var all []string
	for _, m := range found.Members {
		learner := ""
		if m.IsLearner {
			learner = " learner"
		}
		all = append(all, m.Name+learner)
	}
	slices.Sort(all)
	return all
}

func (n *realNode) expect(want ...string) {
	n.rig.t.Helper()
	if got := n.members(); !slices.Equal(got, want) {
		n.rig.t.Fatalf("members are %q, want %q", got, want)
	}
}
