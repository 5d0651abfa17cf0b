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

	"github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/option"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
	"github.com/garboard-os/garboard/services/system/machine"
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
	Situation() machine.Situation
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
}

// Doctor makes diagnoses. Its methods may be called from any goroutine.
type Doctor struct {
	o Options

	mu      sync.Mutex          // guards the following
	current *diagnosis          // the one under way; nil: none is
	stuck   map[string]struct{} // looks that have not returned in time, and still haven't
}

// diagnosis is one run, which all that ask meanwhile share.
type diagnosis struct {
	done     chan struct{} // closed when the rest is there
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
	return &Doctor{o: o, stuck: map[string]struct{}{}}
}

// Diagnose returns what was found, worst first, and what was looked at. It takes
// a few seconds at most; when ctx ends first, both are empty.
func (d *Doctor) Diagnose(ctx context.Context) ([]*garboardv1.Finding, []string) {
	d.mu.Lock()
	run := d.current
	if run == nil {
		run = &diagnosis{done: make(chan struct{})}
		d.current = run
		// Others may wait for it too: the first who asked may go.
		go d.run(context.WithoutCancel(ctx), run)
	}
	d.mu.Unlock()
	select {
	case <-run.done:
		return run.findings, run.checked
	case <-ctx.Done():
		return nil, nil
	}
}

// run ends by itself within the budget.
func (d *Doctor) run(ctx context.Context, run *diagnosis) {
	ctx, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	s := d.collect(ctx)
	run.findings, run.checked = evaluate(s), s.checked
	d.mu.Lock()
	d.current = nil
	d.mu.Unlock()
	close(run.done)
}
