package firewall

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
)

// fake is a kernel's: its rules and their counters.
type fake struct {
	mu       sync.Mutex // guards all below
	rules    []rule
	counted  hits
	replaced int
	refuses  error
}

func (k *fake) replace(rules []rule, counted hits) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.refuses != nil {
		return k.refuses
	}
	k.rules, k.counted = rules, hits{}
	for _, r := range rules {
		if r.name != "" {
			k.counted[r.name] = counted[r.name]
		}
	}
	k.replaced++
	return nil
}

func (k *fake) read() (hits, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return maps.Clone(k.counted), nil
}

func (k *fake) change(do func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	do()
}

type bench struct {
	*testing.T
	store  *resource.Store
	kernel fake
	logged bytes.Buffer // the controller writes it, and is at rest when the test reads it
}

func (b *bench) start() {
	b.store = resource.NewStore()
	runtime, err := resource.NewRuntime(b.store, slog.New(slog.NewTextHandler(&b.logged, nil)), (&firewall{kernel: &b.kernel}).controller())
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.Context())
	done := make(chan error)
	go func() { done <- runtime.Run(ctx) }()
	b.Cleanup(func() { cancel(); <-done })
}

func (b *bench) configure(c *config.Config) {
	b.Helper()
	if err := configuration.Configs.Put(b.store.As("test"), configuration.ConfigID, c); err != nil {
		b.Fatal(err)
	}
	synctest.Wait()
}

func (b *bench) look() {
	<-time.After(lookEvery) // of the bubble's clock
	synctest.Wait()
}

func (b *bench) rule(id string) Rule {
	b.Helper()
	o, err := Rules.Get(b.store, id)
	if err != nil {
		b.Fatal(err)
	}
	return o.Spec
}

func TestController(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bench{T: t}
		b.start()
		synctest.Wait()
		if b.kernel.replaced != 0 {
			t.Error("there are rules before there is a configuration")
		}
		b.configure(node(config.ControlPlane, nil))
		if err := network.Addresses.Put(b.store.As("test"), network.AddressID, network.NodeAddress{Primary: netip.MustParseAddr("10.5.0.2"), All: addresses}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if diff := cmp.Diff(Rule{Action: drop}, b.rule("strangers-to-etcd")); diff != "" {
			t.Error(diff)
		}
		count := func(packets uint64) {
			b.kernel.change(func() {
				b.kernel.counted["strangers-to-etcd"] = nftables.CounterObj{Packets: packets, Bytes: 40 * packets}
			})
		}
		counted := func(when string, want uint64) {
			t.Helper()
			if got := b.rule("strangers-to-etcd"); got.Packets != want || got.Bytes != 40*want {
				t.Errorf("%s: %d packets, want %d", when, got.Packets, want)
			}
		}
		count(7)
		replaced := b.kernel.replaced
		b.look()
		counted("after a look", 7)
		if b.kernel.replaced != replaced {
			t.Error("rules were replaced that hadn't changed")
		}

		// A control plane is met, and stays known when it is gone from the lists.
		if err := balancer.APIServers.Put(b.store.As("test"), "10.9.0.3:6443", balancer.APIServer{From: balancer.FromKubernetes}); err != nil {
			t.Fatal(err)
		}
		if err := etcd.Met.Put(b.store.As("test"), "10.9.0.4", etcd.Meeting{}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		counted("after a change", 7)
		if err := balancer.APIServers.Delete(b.store.As("test"), "10.9.0.3:6443"); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		for _, from := range []string{"10.9.0.3", "10.9.0.4"} {
			k := packet{chain: input, link: "eth0", protocol: "tcp", port: 2380, from: from, to: "10.5.0.2"}
			if action, by := decide(b.kernel.rules, k); action != accept {
				t.Errorf("control plane %s: %s by %s", from, action, by)
			}
		}
		count(9)
		b.look()
		counted("with new counters", 9)

		// What another program takes away comes back.
		b.kernel.change(func() { b.kernel.rules, b.kernel.counted = nil, nil })
		b.look()
		if len(b.kernel.rules) == 0 || !strings.Contains(b.logged.String(), "another program") {
			t.Errorf("%d rules are there again; log: %s", len(b.kernel.rules), b.logged.String())
		}

		// Rules that the kernel refuses leave the former ones.
		b.kernel.change(func() { b.kernel.refuses = errors.New("no room") })
		was := len(b.kernel.rules)
		b.configure(node(config.ControlPlane, func(f *config.Firewall) {
			f.Rules = []config.FirewallRule{{Name: "more", Action: config.FirewallDrop, Interface: "eth1"}}
		}))
		if got := b.rule("more").Problem; got != "the kernel refuses the firewall, and keeps former rules, if there are any: no room" || len(b.kernel.rules) != was {
			t.Errorf("problem %q, %d rules", got, len(b.kernel.rules))
		}
		b.kernel.change(func() { b.kernel.refuses = nil })
		b.look()
		if got := b.rule("more"); got.Problem != "" || len(b.kernel.rules) <= was {
			t.Errorf("%+v, %d rules", got, len(b.kernel.rules))
		}

		// The alias of a card is its kernel's name for nftables, and follows the card.
		lan := config.FirewallRule{Name: "lan", Action: config.FirewallDrop, Interface: "lan"}
		b.configure(node(config.ControlPlane, func(f *config.Firewall) { f.Rules = []config.FirewallRule{lan} }))
		for _, card := range []string{"eth2", "eth3"} {
			if err := network.Links.Replace(b.store.As("test"), map[string]network.LinkStatus{card: {Alias: "lan"}, "eth9": {}}); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			if action, by := decide(b.kernel.rules, packet{chain: input, link: card, protocol: "tcp", port: 99, from: "192.0.2.9", to: "10.5.0.2"}); by != "lan" {
				t.Errorf("from %s: %s by %q, want lan", card, action, by)
			}
		}

		// A table without counters isn't taken for one that is gone.
		b.configure(node(config.Worker, func(f *config.Firewall) { f.AllowMetadata = true }))
		if err := network.Addresses.Delete(b.store.As("test"), network.AddressID); err != nil {
			t.Fatal(err)
		}
		for _, s := range balancer.APIServers.List(b.store) {
			t.Errorf("%s is still there", s.ID)
		}
		synctest.Wait()
		replaced = b.kernel.replaced
		b.look()
		b.look()
		if b.kernel.replaced != replaced || strings.Count(b.logged.String(), "another program") != 1 {
			t.Errorf("rules were replaced that hadn't changed; log: %s", b.logged.String())
		}

		off := false
		b.configure(node(config.ControlPlane, func(f *config.Firewall) { f.Enabled = &off }))
		if n := len(Rules.List(b.store)); n != 0 || b.kernel.rules != nil {
			t.Errorf("%d rules are published, %d are there", n, len(b.kernel.rules))
		}
	})
}

// A kernel without nf_tables is a failure that doctor finds, until there is one.
func TestNoNetfilter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bench{T: t}
		b.kernel.refuses = errors.New("operation not supported")
		b.start()
		b.configure(node(config.Worker, nil))
		b.look()
		b.look()
		if got := b.rule("pods-to-metadata").Problem; got != "the kernel refuses the firewall, and keeps former rules, if there are any: operation not supported" {
			t.Error(got)
		}
		if n := strings.Count(b.logged.String(), "level=WARN"); n != 1 {
			t.Errorf("%d warnings", n)
		}
		if all := resource.Failures.List(b.store); len(all) != 1 {
			t.Error(all)
		}
		b.kernel.change(func() { b.kernel.refuses = nil })
		b.look()
		b.look()
		b.look()
		if all := resource.Failures.List(b.store); len(all) != 0 || len(b.kernel.rules) == 0 {
			t.Errorf("%v, %d rules", all, len(b.kernel.rules))
		}
	})
}
