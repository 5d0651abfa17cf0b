// Package firewall filters what reaches the node, and what its pods reach, with one table of nftables.
//
// A pure function makes the rules of the configuration and of what the node knows (rules.go). A controller puts them
// into the kernel in one transaction whenever they change (kernel.go), so that the former ones stay if the kernel
// refuses the new ones, and counts what they matched. A kernel without nf_tables filters nothing: the controller fails,
// and nothing waits for it.
//
// Pods with hostNetwork are the node itself: their packets can't be told from its own.
package firewall

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
)

const (
	// lookEvery is how old counters may be, and how long a table is missing that another program has deleted.
	lookEvery = 10 * time.Second
	// maxControlPlanes is far more than a cluster has over a boot of one node.
	maxControlPlanes = 32
)

// Rule is one rule with its counters since boot; its ID is its name.
type Rule struct {
	Action  string `yaml:"action" column:"ACTION"`
	Packets uint64 `yaml:"packets" column:"PACKETS"`
	Bytes   uint64 `yaml:"bytes" column:"BYTES"`
	Problem string `yaml:"problem,omitempty" column:"PROBLEM"`
}

// Rules has an object for each rule of the configuration, and for each of the node's own that drops.
var Rules = resource.Define[Rule](resource.Definition{
	Type: "FirewallRules.net.garboard.dev", Kind: "FirewallRule", Aliases: []string{"firewall"}, Namespace: "network",
})

// firewall is the state of the controller; only its goroutine uses it.
type firewall struct {
	kernel interface { // nft
		replace([]rule, hits) error
		read() (hits, error)
	}
	met     []netip.Addr // control planes, never forgotten: one whose API server is down needs its etcd all the same
	applied []rule       // nil: none
}

// Controller makes the kernel's table what the rules say.
func Controller() resource.Controller { return (&firewall{kernel: nft{}}).controller() }

func (f *firewall) controller() resource.Controller {
	return resource.Controller{
		Name: "network.FirewallController", Reconcile: f.reconcile, Outputs: []string{Rules.Type()},
		Inputs: []resource.Input{{Type: configuration.Configs.Type(), ID: configuration.ConfigID}, {Type: network.Addresses.Type()}, {Type: network.Links.Type()}, {Type: etcd.Met.Type()}, {Type: balancer.APIServers.Type()}},
	}
}

func (f *firewall) reconcile(_ context.Context, v resource.View) (time.Duration, error) {
	cfg, err := configuration.Config(v)
	if err != nil {
		return 0, resource.IgnoreNotFound(err)
	}
	var wanted []rule
	if cfg.Machine.Network.Firewall.On() {
		// none yet: nobody but the control planes that were met reaches etcd
		own, _ := network.Addresses.Get(v, network.AddressID)
		wanted = rules(cfg, own.Spec.All, f.controlPlanes(v))
		for i, r := range wanted {
			wanted[i].link = network.KernelName(v, r.link)
		}
	} else if f.applied == nil {
		return 0, Rules.Replace(v, nil)
	}
	counted, err := f.kernel.read()
	gone := err == nil && len(counted) == 0 && slices.ContainsFunc(f.applied, func(r rule) bool { return r.name != "" })
	if gone {
		v.Log().Warn("another program has deleted the table inet garboard, which belongs to the node: it is made anew")
	}
	if gone || !reflect.DeepEqual(wanted, f.applied) {
		if err = f.kernel.replace(wanted, counted); err == nil {
			f.applied = wanted
		}
	}
	problem := ""
	if err != nil {
		err = fmt.Errorf("the kernel refuses the firewall, and keeps former rules, if there are any: %w", err)
		problem = err.Error()
	}
	all := map[string]Rule{}
	for _, r := range wanted {
		if r.name != "" {
			all[r.name] = Rule{Action: r.action, Packets: counted[r.name].Packets, Bytes: counted[r.name].Bytes, Problem: problem}
		}
	}
	return lookEvery, errors.Join(err, Rules.Replace(v, all))
}

func (f *firewall) controlPlanes(v resource.View) []netip.Addr {
	meet := func(a netip.Addr, err error) {
		if a = a.Unmap(); err == nil && !slices.Contains(f.met, a) && len(f.met) < maxControlPlanes {
			f.met = append(f.met, a)
		}
	}
	for _, m := range etcd.Met.List(v) {
		meet(netip.ParseAddr(m.ID))
	}
	for _, s := range balancer.APIServers.List(v) {
		if at, err := netip.ParseAddrPort(s.ID); s.Spec.From == balancer.FromKubernetes {
			meet(at.Addr(), err)
		}
	}
	return f.met
}
