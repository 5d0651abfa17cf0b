package qemu

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// WaitReady fails for a cluster that another command has removed or stopped.
func TestWaitReadyEndsWithTheCluster(t *testing.T) {
	t.Setenv("GARBOARD_HOME", t.TempDir())
	ctx, cancel := context.WithTimeout(t.Context(), eventually.Scale(20*time.Second))
	defer cancel()
	plan := testPlan(Container)
	d, _ := dirOf(plan.Name)
	ca, err := pki.NewKubernetesCA(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	access, _, err := config.AdminKubeconfig(plan.Name, "https://127.0.0.1:1", ca, ca.Cert, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.MkdirAll(string(d), 0o700), writePlan(d, plan), os.WriteFile(d.kubeconfig(), access, 0o600)); err != nil {
		t.Fatal(err)
	}
	configured(t, d, plan, "{}")
	c := &Cluster{Plan: plan, dir: d}
	if err := c.WaitReady(ctx, nil, nil); err == nil || !strings.Contains(err.Error(), "was stopped meanwhile") || !strings.Contains(err.Error(), d.log()) {
		t.Errorf("without a host process: %v", err)
	}
	if err := os.Remove(d.plan()); err != nil {
		t.Fatal(err)
	}
	if err := c.WaitReady(ctx, nil, nil); err == nil || !strings.Contains(err.Error(), "was removed meanwhile, by another command") {
		t.Errorf("without a plan: %v", err)
	}
}

// configured writes the configuration of the first node.
func configured(t *testing.T, d clusterDir, plan Plan, patch string) {
	t.Helper()
	f, err := configurations(plan, Options{Patches: [][]byte{[]byte(patch)}}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	first := plan.Nodes[0].Name
	if err := errors.Join(os.MkdirAll(string(d.node(first)), 0o700), os.WriteFile(d.config(first), f.nodes[first], 0o600)); err != nil {
		t.Fatal(err)
	}
}

// A cluster without a pod network reaches what it can reach: its nodes wait for one, and for nothing else.
func TestMilestonesWithoutANetwork(t *testing.T) {
	t.Setenv("GARBOARD_HOME", t.TempDir())
	heartbeat := time.Now().Format(time.RFC3339)
	message := "container runtime network not ready: NetworkReady=false reason:NetworkPluginNotReady message:no network"
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"items": [{"metadata": {"name": "a"}, "status": {"conditions": [{"type": "Ready", "status": "False", "message": %q, "lastHeartbeatTime": %q}]}}]}`, message, heartbeat)
	}))
	defer server.Close()
	api := &KubeAPI{server: server.URL, client: server.Client()}
	plan := testPlan(Container)
	plan.Nodes = plan.Nodes[:1]
	d, _ := dirOf(plan.Name)
	for patch, want := range map[string]int{"{}": 3, "cluster: {coreDNS: {disabled: true}}": 2, "cluster: {network: {cni: {name: none}}}": 2} {
		configured(t, d, plan, patch)
		all, err := (&Cluster{Plan: plan, dir: d}).milestones(api)
		if err != nil || len(all) != want {
			t.Fatalf("%s: %d milestones, %v", patch, len(all), err)
		}
		if err, none := all[1].check(t.Context()), strings.Contains(patch, "none"); (err == nil) != none {
			t.Errorf("%s: a node that waits for a network: %v", patch, err)
		}
	}
	message = "PLEG is not healthy"
	if err := api.nodesReady(t.Context(), 1, false, time.Time{}); err == nil || !strings.Contains(err.Error(), message) {
		t.Errorf("a node that isn't Ready for another reason: %v", err)
	}
	heartbeat = time.Now().Add(-time.Hour).Format(time.RFC3339)
	if err := api.nodesReady(t.Context(), 1, false, time.Now().Add(-time.Minute)); err == nil || !strings.Contains(err.Error(), "since the cluster was started") {
		t.Errorf("a node that was Ready before: %v", err)
	}
}

func TestWhatTheServerSaid(t *testing.T) {
	for _, c := range []struct{ body, want string }{
		{"[+]ping ok\n[+]etcd ok\n[-]poststarthook/rbac/bootstrap-roles failed: reason withheld\nreadyz check failed\n", "[-]poststarthook/rbac/bootstrap-roles failed: reason withheld"},
		{"\nforbidden\nmore", "forbidden"}, {"[+]ping ok", ""}, {"", ""},
	} {
		if got := said(c.body); got != c.want {
			t.Errorf("%q: %q, want %q", c.body, got, c.want)
		}
	}
}
