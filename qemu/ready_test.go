package qemu

import (
	"context"
	"errors"
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
