package firewall

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/machine"
)

// What is asked for and has no effect is a problem, which the doctor finds; it ends by itself.
func TestPoliciesWithoutEffect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var kernel, unknown error
		there := false
		p := &policies{queue: func() error { return kernel }, agent: func() (bool, error) { return there, unknown }}
		store := resource.NewStore()
		runtime, err := resource.NewRuntime(store, slog.New(slog.DiscardHandler), p.controller())
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- runtime.Run(ctx) }()
		defer func() { cancel(); <-done }()
		configure := func(on bool) {
			t.Helper()
			c := &config.Config{Cluster: config.Cluster{Network: config.ClusterNetwork{Policies: on}}}
			if err := machine.Configs.Put(store.As("test"), machine.ConfigID, c); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		says := func(problem string) {
			t.Helper()
			o, err := PolicyStatuses.Get(store, policiesID)
			if err != nil {
				t.Fatal(err)
			}
			if o.Spec.Enforced != (problem == "") || !strings.Contains(o.Spec.Problem, problem) || len(store.Troubled()) > 0 != (problem != "") {
				t.Errorf("status %+v, want the problem %q", o.Spec, problem)
			}
		}
		later := func() {
			<-time.After(policiesEvery) // of the bubble's clock
			synctest.Wait()
		}
		configure(false)
		if all := PolicyStatuses.List(store); len(all) > 0 {
			t.Errorf("a status of what isn't asked for: %v", all)
		}
		kernel = errors.New("no such file or directory")
		configure(true)
		says("NetworkPolicies have no effect on this node: its kernel can't queue packets for a program (nft_queue): no such file or directory")
		kernel = nil
		later()
		says("NetworkPolicies have no effect on this node: kube-network-policies hasn't made its rules yet")
		there = true
		later()
		says("")
		there, unknown = false, errors.New("no buffer space")
		later()
		says("it isn't known whether NetworkPolicies have an effect on this node")
		configure(false)
		if all := PolicyStatuses.List(store); len(all) > 0 {
			t.Errorf("a status after they were switched off: %v", all)
		}
	})
}
