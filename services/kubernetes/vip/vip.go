// Package vip manages the address that the control planes share.
//
// It is the service `vip`. The address is on one control plane at a time, beside the
// node's own ones, and moves to another one when its holder is gone, or its API server
// has failed. etcd decides the holder, by a queue in which every control plane whose API
// server is ready has a place for as long as it renews its lease: the first becomes the
// holder, until it leaves, or the next in the queue evicts it because it is gone. A
// holder whose etcd has no quorum keeps the address: without a quorum no other node can
// be elected, and it still serves.
//
// Each address of the configuration has a controller, which collects the facts,
// lets state decide, and acts on the decision:
//
//	etcd ─────── election ── view ───┐
//	API server ─ check ───── health ─┼─▶ controller ─▶ state ─▶ address on the link, announcements,
//	link ─────── wire ────── frames ─┘                          probes, place in etcd's queue
//
// networkd doesn't manage this address: it ignores addresses that it hasn't added itself,
// and so never uses it as the node's own.
package vip

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/services/core/background"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/system/configuration"
)

const (
	// ID of the service.
	ID = "vip"
	// stopBudget is for the removal of the address from the link, which takes
	// milliseconds, and to leave the queue in etcd, which may not answer.
	stopBudget = 5 * time.Second
	// dropTries: the kernel's list of addresses is incomplete while other addresses change.
	dropTries = 3
)

// Status is the status of one shared address, as this node sees it.
type Status struct {
	Address netip.Addr `yaml:"address"`
	Link    string     `yaml:"link" column:"LINK"`
	Holder  bool       `yaml:"holder" column:"HOLDER"` // this node has it
	// HeldBy is the node that holds it in etcd; "": none, or not Known.
	HeldBy string `yaml:"heldBy,omitempty" column:"HELD BY"`
	// Known: the answer of etcd is recent.
	Known bool `yaml:"known"`
	// Candidates are the nodes that could hold it.
	Candidates int       `yaml:"candidates"`
	Why        string    `yaml:"why" column:"WHY"`
	Since      time.Time `yaml:"since,omitempty"`    // when this node took it or gave it up; zero: neither yet
	Conflict   string    `yaml:"conflict,omitempty"` // MAC address of a machine that has it by mistake
	Etcd       string    `yaml:"etcd,omitempty"`     // etcd's last error, while there is one
}

// Statuses has an object for each shared address, on control planes.
var Statuses = resource.Define[Status](resource.Definition{
	Type:      "VIPStatuses.net.garboard.dev",
	Kind:      "VIPStatus",
	Aliases:   []string{"vip"},
	Namespace: "network",
})

// Options are the inputs of the service.
type Options struct {
	Store *resource.Store
}

// Service is vip in the graph. It follows the configuration while it runs; without a
// shared address it does nothing. It stops before etcd, so that it can leave the queue
// there.
func Service(o Options) dag.Service {
	return dag.Service{
		ID:         ID,
		Skip:       configuration.OnControlPlanes(o.Store, "only control planes share an address"),
		Run:        o.run,
		Restart:    dag.RestartAlways,
		StopBudget: stopBudget,
	}
}

// run runs a controller for each address of the configuration.
func (o Options) run(ctx context.Context, h *dag.Handle) error {
	running := map[shared]func(){}
	defer func() {
		for _, stop := range running {
			stop()
		}
	}()
	reported := ""
	for range o.Store.Watch(ctx, configuration.Configs.Type()) {
		wanted, err := o.wanted()
		if err != nil {
			return err
		}
		for s, stop := range running {
			if !wanted[s] {
				stop()
				delete(running, s)
			}
		}
		for s := range wanted {
			if running[s] != nil {
				continue
			}
			running[s] = background.Start(ctx, func(ctx context.Context) {
				for range sleep.Every(ctx, againAfter) {
					newController(s, o.Store, h).run(ctx)
				}
			})
		}
		if text := describe(wanted); text != reported {
			reported = text
			h.Started(text)
		}
	}
	return nil
}

func (o Options) wanted() (map[shared]bool, error) {
	all := map[shared]bool{}
	cfg, err := configuration.Config(o.Store)
	if err != nil {
		return all, resource.IgnoreNotFound(err)
	}
	for _, in := range cfg.Machine.Network.Interfaces { // not of Links: several entries of one link have one each
		if in.VIP != nil && !in.Ignore {
			all[shared{in.Name, in.VIP.IP}] = true
		}
	}
	return all, nil
}

func describe(wanted map[shared]bool) string {
	if len(wanted) == 0 {
		return "Started; the configuration has no shared address"
	}
	var parts []string
	for s := range wanted {
		parts = append(parts, fmt.Sprintf("%s on %s", s.address, s.link))
	}
	slices.Sort(parts)
	return "Started for " + strings.Join(parts, ", ")
}
