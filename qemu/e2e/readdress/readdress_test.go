//go:build e2e

// Package readdress gives a cluster of one node another address. The power fails meanwhile, somebody aborts, and then
// it is kept. What was there before is there afterwards, and pods go on.
package readdress

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/api/client"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/osthread"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	podBudget = 60 * time.Second
	// moveBudget is for the API server to serve at another address, and for all that follows.
	moveBudget = 3 * time.Minute
	// commandBudget is for a command that waits for that.
	commandBudget = 5 * time.Minute
)

// pod is ready while it reaches the API server through Service kubernetes, with its token.
const pod = `
apiVersion: v1
kind: ConfigMap
metadata: {name: before, namespace: default}
data: {it: was there}
---
apiVersion: v1
kind: Pod
metadata: {name: client, namespace: default}
spec:
  containers:
  - name: client
    image: IMAGE
    command: [/usr/local/bin/kubectl, proxy, --address=0.0.0.0, --port=8001, --accept-hosts=.*]
    readinessProbe: {httpGet: {path: /version, port: 8001}, periodSeconds: 1, timeoutSeconds: 5}
`

// rig is the node, and gbctl in its network.
type rig struct {
	*e2etest.Cluster
	t       *testing.T
	network *osthread.Thread
	env     []string
}

// access makes a context without the ports of this machine.
func (r *rig) access() {
	r.t.Helper()
	file, err := client.Load(r.ClientConfig())
	if err != nil {
		r.t.Fatal(err)
	}
	who, err := file.Current("")
	if err != nil {
		r.t.Fatal(err)
	}
	who.Via = nil
	path := filepath.Join(r.t.TempDir(), "config")
	if err := file.Save(path); err != nil {
		r.t.Fatal(err)
	}
	r.env = []string{"GARBOARDCONFIG=" + path}
}

func (r *rig) gbctl(at netip.Addr, args ...string) (string, error) {
	return r.Inside(r.network).Patient(commandBudget).TryGbctlWith("", r.env, append([]string{"-n", at.String()}, args...)...)
}

// asks returns the ID of the operation that asks at an address.
func (r *rig) asks(at netip.Addr) (id string) {
	r.t.Helper()
	r.Eventually(moveBudget, "the operation asks at "+at.String(), func() error {
		out, err := r.gbctl(at, "operation", "list")
		for line := range strings.Lines(out) {
			if strings.Contains(line, "asks: answer yes at "+at.String()) {
				id, _, _ = strings.Cut(line[strings.Index(line, "readdress-"):], " ")
				return nil
			}
		}
		return fmt.Errorf("%w: %s", errors.Join(err, errors.New("no question")), out)
	})
	return id
}

// serves is nil once all is well at an address, with the pod's container that was started then.
func (r *rig) serves(at netip.Addr, since *string) func() error {
	return func() error {
		s := r.Server(r.network, qemu.Node{Address: at})
		if err := r.pod(at, since); err != nil {
			return err
		}
		flannel, err := s.Get(r.t.Context(), "/api/v1/nodes/"+r.Node())
		if err != nil || !strings.Contains(string(flannel), `"flannel.alpha.coreos.com/public-ip":"`+at.String()+`"`) {
			return fmt.Errorf("flannel tells others another address: %s, %w", flannel, err)
		}
		maps, err := s.Objects(r.t.Context(), "/api/v1/namespaces/default/configmaps")
		if err != nil || maps["default/before"].Data["it"] != "was there" {
			return fmt.Errorf("the data isn't there: %v, %w", maps, err)
		}
		slices, err := s.Get(r.t.Context(), "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes")
		if err != nil || !strings.Contains(string(slices), `"addresses":["`+at.String()+`"]`) {
			return fmt.Errorf("Service kubernetes: %s, %w", slices, err)
		}
		members, err := r.gbctl(at, "etcd", "members")
		if err != nil || !strings.Contains(members, "https://"+at.String()+":2380") || !strings.Contains(members, "https://"+at.String()+":2379") {
			return fmt.Errorf("etcd: %s, %w", members, err)
		}
		return nil
	}
}

// pod is nil while the pod reaches an API server, and is the one of before.
func (r *rig) pod(at netip.Addr, since *string) error {
	var p struct {
		Status struct {
			ContainerStatuses []struct {
				Ready bool
				State struct{ Running struct{ StartedAt string } }
			}
		}
	}
	answer, err := r.Server(r.network, qemu.Node{Address: at}).Get(r.t.Context(), "/api/v1/namespaces/default/pods/client")
	if err == nil {
		err = json.Unmarshal(answer, &p)
	}
	if all := p.Status.ContainerStatuses; err != nil || len(all) != 1 || !all[0].Ready {
		return fmt.Errorf("the pod: %s, %w", answer, err)
	} else if *since == "" {
		*since = all[0].State.Running.StartedAt
	} else if *since != all[0].State.Running.StartedAt {
		return fmt.Errorf("the pod has restarted since %s: %s", *since, answer)
	}
	return nil
}

func TestReaddressOneNode(t *testing.T) {
	c, m := e2etest.Ready(t, "readdress", qemu.Container)
	r := &rig{Cluster: c, t: t, network: c.Network()}
	r.access()
	former := c.Nodes[0].Address
	next := former
	for range 100 {
		next = next.Next()
	}
	c.Apply(strings.ReplaceAll(pod, "IMAGE", config.DefaultAPIServerImage))
	var since string
	c.Eventually(podBudget, "the node serves", r.serves(former, &since))
	plan, err := r.gbctl(former, "readdress", next.String(), "--dry-run")
	t.Log(plan)
	for _, part := range []string{former.String() + "/24 → " + next.String() + "/24", "cluster.controlPlane.endpoint", "gets its former address and configuration back"} {
		if err != nil || !strings.Contains(plan, part) {
			t.Errorf("%q isn't in the plan: %v", part, err)
		}
	}
	m.Reached("the plan")

	// From this machine only the former address is reached, as for an administrator who has mistaken the new one.
	done := make(chan string)
	go func() {
		out, err := c.Patient(commandBudget).TryGbctl("-n", former.String(), "readdress", next.String())
		done <- fmt.Sprintf("%s %v", out, err)
	}()
	id := r.asks(next)
	m.Reached("the node is at " + next.String() + ", and asks")
	if err := c.Cut(t.Context(), c.Node()); err != nil {
		t.Fatal(err)
	}
	if err := c.On(t.Context(), c.Node()); err != nil {
		t.Fatal(err)
	}
	if again := r.asks(next); again != id {
		t.Errorf("%s goes on after the power cut, not %s", again, id)
	}
	m.Reached("after a power cut it is there again")
	if out, err := r.gbctl(next, "operation", "abort", id); err != nil {
		t.Fatal(out, err)
	}
	since = ""
	c.Eventually(moveBudget, "the node is back at its former address", r.serves(former, &since))
	if out := <-done; !strings.Contains(out, "aborted") {
		t.Errorf("gbctl, which reaches the former address only, says %s", out)
	}
	m.Reached("aborted, it is at its former address")

	began := time.Now()
	gap := r.gap(former, next)
	out, err := r.gbctl(former, "readdress", next.String())
	t.Log(out)
	if err != nil {
		t.Fatal(err)
	}
	m.Reached(fmt.Sprintf("readdress took %s; no API server for %s", time.Since(began).Round(time.Second), (<-gap).Round(100*time.Millisecond)))
	c.Eventually(podBudget, "the node serves at its new address", r.serves(next, &since))
	// agents of the node were started anew
	for _, args := range [][]string{{"config", "show"}, {"health", "--wait", "1m"}, {"doctor"}} {
		out, err := r.gbctl(next, args...)
		if err != nil || args[0] == "config" && strings.Contains(out, former.String()+"/") {
			t.Errorf("gbctl %v: %v\n%s", args, err, out)
		}
	}
	if file, err := os.ReadFile(strings.TrimPrefix(r.env[0], "GARBOARDCONFIG=")); err != nil || !strings.Contains(string(file), next.String()) {
		t.Errorf("the context of gbctl: %v\n%s", err, file)
	}
	kubeconfig, err := r.gbctl(next, "kubeconfig", "-")
	if err != nil || !strings.Contains(kubeconfig, "https://"+next.String()+":6443") {
		t.Errorf("gbctl kubeconfig: %v\n%s", err, kubeconfig)
	}
	m.Reached("all is well there")

	if err := c.Cut(t.Context(), c.Node()); err != nil {
		t.Fatal(err)
	}
	if err := c.On(t.Context(), c.Node()); err != nil {
		t.Fatal(err)
	}
	since = ""
	c.Eventually(moveBudget, "the node comes up at its new address", r.serves(next, &since))
	m.Reached("it comes up there")
}

// gap is how long no API server answers, until one does at the new address.
func (r *rig) gap(former, next netip.Addr) <-chan time.Duration {
	said := make(chan time.Duration, 1)
	was, is := r.Server(r.network, qemu.Node{Address: former}).Anew(time.Second), r.Server(r.network, qemu.Node{Address: next}).Anew(time.Second)
	go func() {
		last := time.Now()
		for r.t.Context().Err() == nil {
			if _, err := was.Get(r.t.Context(), "/readyz"); err == nil {
				last = time.Now()
			}
			if _, err := is.Get(r.t.Context(), "/readyz"); err == nil {
				said <- time.Since(last)
				return
			}
			select {
			case <-time.After(50 * time.Millisecond):
			case <-r.t.Context().Done():
			}
		}
	}()
	return said
}
