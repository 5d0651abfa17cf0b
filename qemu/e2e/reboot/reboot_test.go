//go:build e2e && long

// Package reboot tests a cluster all of whose nodes go down at the same time:
// by a power failure, and later by their power buttons. It recovers by itself,
// as the same cluster.
package reboot

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/google/go-cmp/cmp"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	podsBudget = 30 * time.Second
	// backBudget is for all nodes to boot on the same two cores, for etcd to have
	// a quorum, and for pods to be in their old state.
	backBudget = 90 * time.Second
	// offBudget is a promise: a machine that is asked to power off has done so
	// within it, whatever runs, and also if its etcd has no quorum any more.
	offBudget = 30 * time.Second
	// pressBudget is one, too: by then its pods have moved, or stay.
	pressBudget = 60 * time.Second
)

var shutdownDone = regexp.MustCompile(`(?m)(shutdown-[a-z0-9]+) +done\b`)

const workload = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: work, namespace: default}
spec:
  replicas: 3
  selector: {matchLabels: {app: work}}
  template:
    metadata: {labels: {app: work}}
    spec:
      terminationGracePeriodSeconds: 1
      containers: [{name: work, image: ` + config.DefaultPauseImage + `}]
`

// kept are objects that no controller makes again, or only with another UID.
var kept = []string{
	"/api/v1/namespaces", "/api/v1/nodes", "/api/v1/configmaps", "/api/v1/secrets", "/api/v1/services", "/api/v1/serviceaccounts",
	"/apis/apps/v1/deployments", "/apis/apps/v1/daemonsets", "/apis/apps/v1/replicasets", "/apis/rbac.authorization.k8s.io/v1/clusterroles",
}

func TestAllNodesAtOnce(t *testing.T) {
	c, m := e2etest.Ready(t, "reboot", qemu.Container, e2etest.Nodes(3, 1))
	c.Apply(workload)
	c.Eventually(podsBudget, "the pods run", func() error { return available(c) })
	etcd := c.Etcd(c.Network(), c.ControlPlanes()...)
	// The twin: deleted objects don't come back.
	c.Kubectl("create", "configmap", "deleted")
	c.Kubectl("delete", "configmap", "deleted")
	before := objects(t, c)
	m.Reached(fmt.Sprintf("there are %d objects", len(before)))

	for _, way := range []struct {
		name string
		off  func(context.Context, string) error
	}{
		{"the power fails", c.Cut},
		{"every power button is pressed", c.Off},
	} {
		t.Run(way.name, func(t *testing.T) {
			c := c.In(t)
			m := e2etest.Marks(t)
			start := time.Now()
			all(t, c, way.off)
			m.Reached("all are off")
			if err := c.Promised(start, time.Now(), offBudget); err != nil {
				t.Errorf("all are off: %v", err)
			}
			// The twin: now there is no answer.
			if out, err := c.Try("get", "--raw", "/version", "--request-timeout=2s"); err == nil {
				t.Errorf("all are off, and somebody answers: %s", out)
			}
			on := time.Now()
			all(t, c, c.On)
			c.Eventually(backBudget, "all nodes are Ready, and say so themselves", func() error {
				return errors.Join(c.NodesReady(c.Nodes...), alive(c, on))
			})
			m.Reached("all nodes are Ready")
			if alive(c, time.Now().Add(time.Hour)) == nil {
				t.Error("leases of the future are taken for true")
			}
			c.Eventually(backBudget, "three members have the same data", func() error { return c.InSync(etcd, c.ControlPlanes()...) })
			m.Reached("three members have the same data")
			c.Eventually(backBudget, "the pods run", func() error { return available(c) })
			c.Ready(m)
			if diff := cmp.Diff(before, objects(t, c)); diff != "" {
				t.Errorf("UIDs before and after:\n%s", diff)
			}
			for _, n := range c.Nodes {
				works(t, c, n)
			}
			m.Reached("a new pod runs on each node")
		})
	}
	t.Run("a budget holds the pods", func(t *testing.T) { held(t, c.In(t), c.Nodes[3]) })
}

// held: the time for pods to move is up, none has moved, and the node powers off in order.
// The operation has its result when the node is on again.
func held(t *testing.T, c *e2etest.Cluster, worker qemu.Node) {
	m := e2etest.Marks(t)
	c.Kubectl("create", "poddisruptionbudget", "hold", "--selector=app=work", "--min-available=3")
	list := func() (string, error) { return c.TryGbctl("-n", worker.Address.String(), "operation", "list") }
	before, err := list() // has the shutdown of the test before
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	if err := c.Off(t.Context(), worker.Name); err != nil {
		t.Fatal(err)
	}
	end := time.Now()
	m.Reached("it is off")
	if err := c.Promised(start, end, pressBudget+offBudget); err != nil {
		t.Error(err)
	}
	status, err := c.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if s := status[len(status)-1]; s.Name != worker.Name || s.State != "off" {
		t.Errorf("%s is %q", s.Name, s.State)
	}
	if err := c.On(t.Context(), worker.Name); err != nil {
		t.Fatal(err)
	}
	id := ""
	c.Eventually(backBudget, "the operation is done", func() error {
		out, err := list()
		for _, done := range shutdownDone.FindAllStringSubmatch(out, -1) {
			if !strings.Contains(before, done[1]) {
				id = done[1]
			}
		}
		if err == nil && id == "" {
			err = errors.New(out)
		}
		return err
	})
	m.Reached("it is on again, and the operation is done")
	if out := c.Kubectl("get", "node", worker.Name, "-o", "jsonpath={.spec.unschedulable}"); out != "" {
		t.Errorf("it is cordoned: %q", out)
	}
	out, err := c.TryGbctl("-n", worker.Address.String(), "operation", "attach", id)
	if err != nil || !strings.Contains(out, "disruption budget hold") {
		t.Errorf("%s: %v: %s", id, err, out)
	}
}

// all does something to all nodes at the same time.
func all(t *testing.T, c *e2etest.Cluster, do func(context.Context, string) error) {
	t.Helper()
	var each sync.WaitGroup
	for _, n := range c.Nodes {
		each.Go(func() {
			if err := do(t.Context(), n.Name); err != nil {
				t.Errorf("%s: %v", n.Name, err)
			}
		})
	}
	each.Wait()
	if t.Failed() {
		t.FailNow()
	}
}

// objects are the UIDs of objects that must survive.
func objects(t *testing.T, c *e2etest.Cluster) map[string]string {
	t.Helper()
	all := map[string]string{}
	s := c.Endpoint()
	for _, path := range kept {
		found, err := s.Objects(t.Context(), path)
		if err != nil {
			t.Fatal(err)
		}
		for name, o := range found {
			all[path+" "+name] = o.Metadata.UID
		}
	}
	return all
}

// alive is nil if each kubelet has renewed its lease since then: before that,
// the API has the old state of a node.
func alive(c *e2etest.Cluster, since time.Time) error {
	out, err := c.Try("get", "leases", "-n", "kube-node-lease", "-o", "json")
	if err != nil {
		return err
	}
	var list struct {
		Items []struct {
			Metadata struct{ Name string }
			Spec     struct{ RenewTime time.Time }
		}
	}
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		return err
	}
	renewed := map[string]time.Time{}
	for _, l := range list.Items {
		renewed[l.Metadata.Name] = l.Spec.RenewTime
	}
	var errs []error
	for _, n := range c.Nodes {
		if !renewed[n.Name].After(since) {
			errs = append(errs, fmt.Errorf("%s has renewed its lease at %s, before %s", n.Name, renewed[n.Name], since))
		}
	}
	return errors.Join(errs...)
}

func available(c *e2etest.Cluster) error {
	out, err := c.Try("get", "deployment", "work", "-o", "jsonpath={.status.availableReplicas}")
	if err == nil && out != "3" {
		err = fmt.Errorf("%q of 3 pods are available", out)
	}
	return err
}

// works: a pod for a node runs there.
func works(t *testing.T, c *e2etest.Cluster, n qemu.Node) {
	t.Helper()
	name := "probe-" + n.Name
	c.Kubectl("run", name, "--image="+config.DefaultPauseImage, "--restart=Never",
		`--overrides={"spec":{"nodeName":"`+n.Name+`","tolerations":[{"operator":"Exists"}],"terminationGracePeriodSeconds":1}}`)
	c.Eventually(podsBudget, "a new pod runs on "+n.Name, func() error {
		out, err := c.Try("get", "pod", name, "-o", "jsonpath={.status.phase}")
		if err == nil && strings.TrimSpace(out) != "Running" {
			err = fmt.Errorf("it is %s", out)
		}
		return err
	})
	c.Kubectl("delete", "pod", name, "--now")
}
