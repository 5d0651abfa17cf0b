package firewall

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
)

// What is asked for and has no effect is a problem, which the doctor finds; it ends by itself.
func TestPoliciesWithoutEffect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type answers struct {
			kernel, unknown error
			there           bool
		}
		var now atomic.Pointer[answers] // the controller asks at its own moments
		now.Store(&answers{})
		p := &policies{queue: func() error { return now.Load().kernel }, agent: func() (bool, error) { return now.Load().there, now.Load().unknown }}
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
			if err := configuration.Configs.Put(store.As("test"), configuration.ConfigID, c); err != nil {
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
		now.Store(&answers{kernel: errors.New("no such file or directory")})
		configure(true)
		says("NetworkPolicies have no effect on this node: its kernel can't queue packets for a program (nft_queue): no such file or directory")
		now.Store(&answers{})
		later()
		says("NetworkPolicies have no effect on this node: kube-network-policies hasn't made its rules yet")
		now.Store(&answers{there: true})
		later()
		says("")
		now.Store(&answers{unknown: errors.New("no buffer space")})
		later()
		says("it isn't known whether NetworkPolicies have an effect on this node")
		configure(false)
		if all := PolicyStatuses.List(store); len(all) > 0 {
			t.Errorf("a status after they were switched off: %v", all)
		}
	})
}
