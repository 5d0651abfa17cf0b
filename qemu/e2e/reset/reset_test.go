//go:build e2e && long

// Package reset tests a cluster that shrinks, from three control planes and a
// worker to the last control plane: nodes are rebooted and reset, without an
// interruption for the cluster's users. Some lose their power during it.
package reset

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/e2e/history"
	"github.com/garboard-os/garboard/qemu/exit"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	podsBudget = 60 * time.Second
	// goBudget is for a node to be drained, to leave and to end.
	goBudget = 90 * time.Second
	// backBudget is for a node to boot and to be Ready.
	backBudget = 90 * time.Second
	// voteBudget is for the members of etcd to agree on their number.
	voteBudget = 30 * time.Second
	// missing is how long the API may not answer while a control plane leaves: the load
	// balancer checks every second, and a member that leaves may have been the leader.
	missing = 10 * time.Second
	// beginBudget is for a reset to be planned, and its journal to be written.
	beginBudget = 30 * time.Second
	// soonOff is shorter than a boot and the rest of a reset on an idle machine: a
	// power cut within it is often in the middle.
	soonOff = 6 * time.Second
)

// pods are a web server with replicas, and one that a disruption budget protects.
const pods = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: default}
spec:
  replicas: 4
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 2
      topologySpreadConstraints: [{maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: ScheduleAnyway, labelSelector: {matchLabels: {app: web}}}]
      containers: [{name: web, image: IMAGE, command: [/usr/local/bin/kubectl, proxy, --port=8001]}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: held, namespace: default}
spec:
  selector: {matchLabels: {app: held}}
  template:
    metadata: {labels: {app: held}}
    spec:
      terminationGracePeriodSeconds: 2
      containers: [{name: held, image: IMAGE, command: [/usr/local/bin/kubectl, proxy, --port=8001]}]
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: hold, namespace: default}
spec: {minAvailable: 1, selector: {matchLabels: {app: held}}}
`

func TestClusterShrinks(t *testing.T) {
	c, m := e2etest.Ready(t, "reset", qemu.Container, e2etest.Nodes(3, 1), func(o *qemu.Options) {
		o.ControlPlanePatches = [][]byte{[]byte("cluster: {allowSchedulingOnControlPlanes: true}")}
	})
	c.Complete()
	c.Apply(strings.ReplaceAll(pods, "IMAGE", config.DefaultAPIServerImage))
	c.Eventually(podsBudget, "the pods are ready", func() error { return available(c, "web", "4") })
	c.Eventually(podsBudget, "the held pod is ready", func() error { return available(c, "held", "1") })
	m.Reached("pods are ready")
	first, second, third, worker := c.Nodes[0], c.Nodes[1], c.Nodes[2], c.Nodes[3]

	t.Run("a reboot that a budget holds up", func(t *testing.T) { held(t, c.In(t)) })
	m.Reached("a reboot that a budget holds up")
	t.Run("a reboot of the worker", func(t *testing.T) { reboots(t, c.In(t), worker) })
	m.Reached("the worker was rebooted")
	t.Run("a shutdown of the worker", func(t *testing.T) { shuts(t, c.In(t), worker) })
	m.Reached("the worker was off, and is on again")
	t.Run("a worker that keeps its configuration", func(t *testing.T) { rejoins(t, c.In(t), worker) })
	m.Reached("the worker has lost its data and joined again")
	t.Run("a reset of the worker", func(t *testing.T) { goes(t, c.In(t), worker, 3) })
	m.Reached("the worker is gone")
	t.Run("a reset of a member, with power cuts", func(t *testing.T) { goesInPieces(t, c.In(t), third) })
	m.Reached("the third control plane is gone")
	t.Run("a reset of a member", func(t *testing.T) { goes(t, c.In(t), second, 1) })
	m.Reached("the second control plane is gone")
	t.Run("a reset of the last member", func(t *testing.T) { stays(t, c.In(t), first) })
}

// available: a deployment has as many pods as it wants.
func available(c *e2etest.Cluster, deployment, want string) error {
	got, err := c.Try("get", "deployment", deployment, "-o", "jsonpath={.status.availableReplicas}")
	if err == nil && got != want {
		err = fmt.Errorf("%q pods of %s are available", got, deployment)
	}
	return err
}

func node(c *e2etest.Cluster, name, path string) (string, error) {
	return c.Try("get", "node", name, "-o", "jsonpath={"+path+"}")
}

// back: the node is Ready, accepts pods, and has booted since.
func back(c *e2etest.Cluster, name, path, before string) error {
	now, err := node(c, name, path)
	if err != nil {
		return err
	}
	ready, err := node(c, name, `.status.conditions[?(@.type=="Ready")].status`)
	if err != nil {
		return err
	}
	cordoned, err := node(c, name, ".spec.unschedulable")
	if err == nil && (now == before || ready != "True" || cordoned != "") {
		err = fmt.Errorf("%s is %s, ready %s, cordoned %q", path, now, ready, cordoned)
	}
	return err
}

func restarts(t *testing.T, c *e2etest.Cluster, name string) int {
	t.Helper()
	all, err := c.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range all {
		if s.Name == name {
			return s.Restarts
		}
	}
	t.Fatalf("no node %s", name)
	return 0
}

// held: a pod that a disruption budget protects is named, and the reboot still
// happens when its time is up.
func held(t *testing.T, c *e2etest.Cluster) {
	name := c.Kubectl("get", "pods", "-l", "app=held", "-o", "jsonpath={.items[0].spec.nodeName}")
	n, err := c.Find(name)
	if err != nil {
		t.Fatal(err)
	}
	before := restarts(t, c, name)
	out := c.Patient(goBudget+backBudget).Gbctl("-n", n.Address.String(), "reboot", "--drain-timeout", eventually.Scale(6*time.Second).Round(time.Second).String(), "--wait")
	for _, part := range []string{"✓ cordon", "default/held-", "disruption budget hold", "- drain skipped", "is back and healthy"} {
		if !strings.Contains(out, part) {
			t.Errorf("gbctl doesn't say %q:\n%s", part, out)
		}
	}
	if after := restarts(t, c, name); after != before+1 {
		t.Errorf("it restarted %d times", after-before)
	}
	c.Eventually(backBudget, "it takes pods again", func() error { return back(c, name, ".metadata.name", "") })
	c.Kubectl("delete", "poddisruptionbudget", "hold")
}

// reboots: pods are moved first, and may come back afterwards.
func reboots(t *testing.T, c *e2etest.Cluster, n qemu.Node) {
	before := restarts(t, c, n.Name)
	out := c.Patient(goBudget+backBudget).Gbctl("-n", n.Address.String(), "reboot", "--wait")
	for _, part := range []string{"✓ cordon", "✓ drain", "reboots now", "is back and healthy"} {
		if !strings.Contains(out, part) {
			t.Errorf("gbctl doesn't say %q:\n%s", part, out)
		}
	}
	if after := restarts(t, c, n.Name); after != before+1 {
		t.Errorf("it restarted %d times", after-before)
	}
	c.Eventually(backBudget, "it takes pods again", func() error { return back(c, n.Name, ".metadata.name", "") })
	c.Eventually(podsBudget, "the pods are ready", func() error { return available(c, "web", "4") })
	// The twin: a node that a user has cordoned stays cordoned.
	c.Kubectl("cordon", n.Name)
	c.Patient(goBudget+backBudget).Gbctl("-n", n.Address.String(), "reboot", "--drain=false", "--wait")
	if got, err := node(c, n.Name, ".spec.unschedulable"); got != "true" {
		t.Errorf("it was uncordoned: %q, %v", got, err)
	}
	c.Kubectl("uncordon", n.Name)
}

// shuts: pods are moved, the machine ends and stays off, and accepts pods again
// after it is turned on.
func shuts(t *testing.T, c *e2etest.Cluster, n qemu.Node) {
	before := restarts(t, c, n.Name)
	out := c.Patient(goBudget).Gbctl("-n", n.Address.String(), "shutdown", "--wait")
	for _, part := range []string{"✓ cordon", "✓ drain", "powers off now", "is off"} {
		if !strings.Contains(out, part) {
			t.Errorf("gbctl doesn't say %q:\n%s", part, out)
		}
	}
	c.Eventually(goBudget, "it is off", func() error { return off(t, c, n.Name) })
	if got, err := node(c, n.Name, ".spec.unschedulable"); got != "true" {
		t.Errorf("it isn't cordoned while it is off: %q, %v", got, err)
	}
	c.Eventually(podsBudget, "the pods are elsewhere", func() error {
		if err := available(c, "web", "4"); err != nil {
			return err
		}
		out, err := c.Try("get", "pods", "-l", "app=web", "--field-selector", "spec.nodeName="+n.Name, "-o", "name")
		if err == nil && out != "" {
			err = fmt.Errorf("it has %q", out)
		}
		return err
	})
	if err := off(t, c, n.Name); err != nil || restarts(t, c, n.Name) != before {
		t.Errorf("it didn't stay off: %v", err)
	}
	if err := c.On(t.Context(), n.Name); err != nil {
		t.Fatal(err)
	}
	c.Eventually(backBudget, "it takes pods again", func() error { return back(c, n.Name, ".metadata.name", "") })
	// A container has no access to the host's disks.
	if out, err := c.TryGbctl("-n", n.Address.String(), "reset", "--dry-run", "--user-disks-to-wipe", "/dev/sda"); err == nil || !strings.Contains(err.Error(), "has no disks of its own") {
		t.Errorf("a disk of the host would be wiped: %v\n%s", err, out)
	}
}

func off(t *testing.T, c *e2etest.Cluster, name string) error {
	all, err := c.Status(t.Context())
	for _, s := range all {
		if s.Name == name && s.State != exit.Off.String() {
			return fmt.Errorf("it is %s", s.State)
		}
	}
	return err
}

// rejoins: S-183, only EPHEMERAL is wiped.
func rejoins(t *testing.T, c *e2etest.Cluster, n qemu.Node) {
	uid, err := node(c, n.Name, ".metadata.uid")
	if err != nil {
		t.Fatal(err)
	}
	c.Patient(goBudget).Gbctl("-n", n.Address.String(), "reset", "--system-labels-to-wipe", "EPHEMERAL", "--reboot", "--yes")
	c.Eventually(backBudget, "it has joined anew", func() error { return back(c, n.Name, ".metadata.uid", uid) })
}

// goes: S-180. Users of the cluster don't notice.
func goes(t *testing.T, c *e2etest.Cluster, n qemu.Node, members int) {
	watch := watchAPI(t, c)
	t.Log(c.Gbctl("-n", n.Address.String(), "reset", "--dry-run"))
	out := c.Patient(goBudget).Gbctl("-n", n.Address.String(), "reset", "--yes")
	t.Log(out)
	c.Eventually(goBudget, "it is off", func() error { return off(t, c, n.Name) })
	gone(t, c, n, members)
	p := watch()
	if err := eventually.Took(p.From, p.From.Add(p.Took), missing); err != nil {
		t.Errorf("the API doesn't answer: %v", err)
	}
	c.Eventually(podsBudget, "the pods are elsewhere", func() error { return available(c, "web", "4") })

	// S-184: without STATE, it waits for a configuration.
	offset := consoleSize(t, c, n)
	if err := c.On(t.Context(), n.Name); err != nil {
		t.Fatal(err)
	}
	c.Eventually(backBudget, "it is in maintenance mode", func() error {
		text, err := os.ReadFile(c.Console(n.Name))
		if err == nil && !strings.Contains(string(text[offset:]), "no usable configuration") {
			err = errors.New("its console doesn't say so")
		}
		return err
	})
	if err := c.Off(t.Context(), n.Name); err != nil {
		t.Fatal(err)
	}
}

func consoleSize(t *testing.T, c *e2etest.Cluster, n qemu.Node) int64 {
	t.Helper()
	info, err := os.Stat(c.Console(n.Name))
	if err != nil {
		t.Fatal(err)
	}
	return info.Size()
}

// gone: nothing of it is left, neither in the cluster nor on its disk.
func gone(t *testing.T, c *e2etest.Cluster, n qemu.Node, members int) {
	t.Helper()
	c.Eventually(voteBudget, "neither Kubernetes nor etcd knows it", func() error {
		if out, err := c.Try("get", "nodes", "-o", "name"); err != nil || strings.Contains(out, n.Name) {
			return fmt.Errorf("nodes are %q, %w", out, err)
		}
		out, err := c.TryGbctl("-n", c.Nodes[0].Address.String(), "etcd", "members")
		if err == nil && (strings.Contains(out, n.Name) || strings.Count(out, "yes") != members) {
			err = fmt.Errorf("members are\n%s", out)
		}
		return err
	})
	wiped(t, c, n)
}

func wiped(t *testing.T, c *e2etest.Cluster, n qemu.Node) {
	t.Helper()
	if err := isWiped(c, n); err != nil {
		t.Error(err)
	}
}

func isWiped(c *e2etest.Cluster, n qemu.Node) error {
	for dir, want := range map[string]string{"state": "reset", "var": ""} {
		entries, err := os.ReadDir(filepath.Join(c.Dir(), n.Name, dir))
		if err != nil {
			return err
		}
		var names []string
		for _, e := range entries {
			names = append(names, e.Name())
		}
		if got := strings.Join(names, " "); got != want {
			return fmt.Errorf("in %s are %q", dir, got)
		}
	}
	return nil
}

// watchAPI sends requests all the time, and returns the longest time without an answer.
func watchAPI(t *testing.T, c *e2etest.Cluster) (longest func() history.Pause) {
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	answers := history.New(time.Now())
	wg.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			if _, err := c.Try("get", "namespace", "default", "--request-timeout=5s"); err == nil {
				answers.Acknowledged(strconv.Itoa(i), "", time.Now())
			} else {
				answers.Failed(err, time.Now())
			}
		}
	})
	return func() history.Pause {
		cancel()
		wg.Wait()
		p := answers.Longest()
		t.Logf("the longest time without an answer: %s", p.Took)
		return p
	}
}

var resetRuns = regexp.MustCompile(`reset-[a-z0-9]+ +running `)

// goesInPieces: after power cuts at any time, the reset completes, and the node has left.
func goesInPieces(t *testing.T, c *e2etest.Cluster, n qemu.Node) {
	seed := time.Now().UnixNano()
	random := rand.New(rand.NewPCG(uint64(seed), 0))
	t.Logf("seed %d", seed)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var asked sync.WaitGroup
	asked.Go(func() {
		out, err := c.Patient(goBudget).TryGbctl("-n", n.Address.String(), "reset", "--yes")
		t.Logf("gbctl: %v\n%s", err, out)
	})
	// Before its journal is written, there is no reset that a node could continue.
	c.Eventually(beginBudget, "the reset runs", func() error {
		out, err := c.TryGbctl("-n", n.Address.String(), "operation", "list")
		if err == nil && !resetRuns.MatchString(out) {
			err = fmt.Errorf("there is\n%s", out)
		}
		return err
	})
	middle := 0
	for i := range 3 {
		var after time.Duration // the first cut is at once, and so in the middle
		if i > 0 {
			after = time.Duration(random.Int64N(int64(eventually.Scale(soonOff))))
		}
		select {
		case <-time.After(after):
		case <-ctx.Done():
		}
		if err := c.Cut(ctx, n.Name); err != nil {
			t.Logf("cut after %s: %v", after, err) // it was off already
		} else if isWiped(c, n) != nil {
			middle++
		}
		t.Logf("cut after %s; wiped: %v", after, isWiped(c, n))
		if err := c.On(ctx, n.Name); err != nil {
			t.Fatal(err)
		}
	}
	if t.Logf("%d of 3 cuts were in the middle of the reset", middle); middle == 0 {
		t.Error("no power cut was in the middle of the reset")
	}
	c.Eventually(goBudget+backBudget, "it is wiped", func() error { return isWiped(c, n) })
	asked.Wait()
	gone(t, c, n, 2)
}

// stays: S-185. Nothing has changed.
func stays(t *testing.T, c *e2etest.Cluster, n qemu.Node) {
	for _, args := range [][]string{{"reset", "--yes"}, {"reset", "--dry-run"}, {"reset", "--reboot", "--system-labels-to-wipe", "EPHEMERAL", "--yes"}} {
		out, err := c.TryGbctl(append([]string{"-n", n.Address.String()}, args...)...)
		if err == nil || !strings.Contains(err.Error(), "it is the last voting member") || !strings.Contains(err.Error(), "--graceful=false") {
			t.Errorf("%v: %v\n%s", args, err, out)
		}
	}
	if err := back(c, n.Name, ".metadata.name", ""); err != nil {
		t.Error(err)
	}
	if err := available(c, "web", "4"); err != nil {
		t.Error(err)
	}
}
