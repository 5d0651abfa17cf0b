// Package doctor reports what is wrong with a node, why, and what ends it.
//
// It is a table of conditions (conditions.yaml). A condition has an ID that doesn't change, texts for
// the user, and a small function over a snapshot: everything that is known about the
// node at one moment, collected first. So one command does what a person would do with
// a dozen commands and a troubleshooting guide (look at services and their logs, at
// files, ask etcd and Kubernetes, try the endpoint). Each finding has its evidence.
//
// Most symptoms on a broken node are consequences. A condition names the conditions
// that it may follow from; if one of them holds too, it is listed behind that one, as
// info.
//
//	collect ─▶ snapshot ─▶ conditions ─▶ findings ─▶ fold consequences ─▶ worst first
//
// Collecting changes nothing, and its time is bounded: whatever hangs is itself a finding.
package doctor

import (
	"context"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/option"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/resolver"
)

const (
	// budget of one diagnosis: a person waits for it.
	budget = 5 * time.Second
	// collectBudget is the time for each collector; they run in parallel.
	collectBudget = 4 * time.Second
)

// Configuration is what is known of the machine configuration besides its
// meaning; *machine.Applier is one.
type Configuration interface {
	Text(version uint64) ([]byte, error)
	Situation() configuration.Situation
}

// Options are the doctor's sources.
type Options struct {
	Mode  boot.Mode
	Store *resource.Store
	// Statuses and Events are the graph's.
	Statuses func() []dag.Status
	Events   func() []dag.Event
	// Tail is the last lines of a log, oldest first.
	Tail          func(id string, lines int) []string
	Configuration Configuration        // nil: nothing is known
	SinceBoot     func() time.Duration // nil: dag.SinceBoot
	Now           func() time.Time     // nil: time.Now

	root   string // what paths are below; tests have their own
	health string // etcd's health and metrics; tests have their own
	// programs are where the control plane's other programs say how they are.
	programs map[string]string
	balancer string // URL; "": balancer.URL
	statfs   func(path string) (space, bool)
	wayless  func() bool
	// resolvers and registries ask the node's name servers and registries; tests have their own.
	resolvers  func(context.Context, *resource.Store, *config.Config) []resolver.Answer
	registries func(context.Context, *config.Config) []*containerd.Registry
}

// Doctor makes diagnoses. Its methods may be called from any goroutine.
type Doctor struct {
	o Options

	shared singleflight.Group // all that ask meanwhile get what one diagnosis finds

	stuck sync.Map // the names of looks that have not returned, and maybe not in time
}

type diagnosis struct {
	findings []*garboardv1.Finding
	checked  []string
}

// New makes a doctor. It does nothing until it is asked.
func New(o Options) *Doctor {
	option.Default(&o.SinceBoot, dag.SinceBoot)
	option.Default(&o.Now, time.Now)
	option.Default(&o.Tail, func(string, int) []string { return nil })
	option.Default(&o.health, etcdHealth)
	option.Default(&o.balancer, balancer.URL)
	option.Default(&o.programs, map[string]string{controllerManager: controllerManagerHealth, scheduler: schedulerHealth})
	option.Default(&o.statfs, statfs)
	option.Default(&o.wayless, wayless)
	option.Default(&o.resolvers, resolver.Probe)
	option.Default(&o.registries, containerd.Registries)
	return &Doctor{o: o}
}

// Diagnose returns what was found, worst first, and what was looked at. It takes
// a few seconds at most; when ctx ends first, both are empty.
func (d *Doctor) Diagnose(ctx context.Context) ([]*garboardv1.Finding, []string) {
	// Others may wait for it too: the first who asked may go.
	answer := d.shared.DoChan("", func() (any, error) { return d.run(context.WithoutCancel(ctx)), nil })
	select {
	case r := <-answer:
		found := r.Val.(diagnosis)
		return found.findings, found.checked
	case <-ctx.Done():
		return nil, nil
	}
}

// Known are the findings from what the node knows without asking or reading anything, in a few milliseconds: for its
// console.
func (d *Doctor) Known() []*garboardv1.Finding { return evaluate(d.remember()) }

// run ends by itself within the budget.
func (d *Doctor) run(ctx context.Context) diagnosis {
	ctx, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	s := d.collect(ctx)
	return diagnosis{evaluate(s), s.checked}
}
