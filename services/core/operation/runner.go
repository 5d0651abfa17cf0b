package operation

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/base32"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/option"
	"github.com/garboard-os/garboard/services/core/sleep"
	"golang.org/x/sync/semaphore"
)

const (
	// maxRunning bounds operations that run at the same time.
	maxRunning = 8
	// planTimeout bounds a look at what there is to be done. With lockPatience it is less
	// than the two minutes that clients wait for an operation to begin.
	planTimeout = 80 * time.Second
	// stopBudget is what steps get to end when the node stops.
	stopBudget = 6 * time.Second
	// idSize is the number of random bytes in an ID, which make it unique.
	idSize = 5
)

// Runner runs the operations of a node. Make one with New; its methods may be called
// from any goroutine.
type Runner struct {
	o           Options
	definitions map[string]Definition
	files       journals
	ctx         context.Context // ends with Run
	stop        context.CancelFunc
	// beginning is held by the one operation that is planned and begun.
	beginning *semaphore.Weighted
	running   sync.WaitGroup

	opened atomic.Bool // STATE is there
	read   atomic.Bool // and so is what its journals say

	// mu guards all following fields.
	mu         sync.Mutex
	leaving    bool // nothing is begun any more
	operations map[string]*execution
}

// New makes a runner; nothing runs yet. An error is a defect of the definitions.
func New(o Options) (*Runner, error) {
	option.Default(&o.Print, func(string, ...any) {})
	option.Default(&o.writeFile, boot.WriteFile)
	r := &Runner{
		o: o, definitions: map[string]Definition{}, files: journals{o.Dir, o.Log, o.writeFile},
		beginning: semaphore.NewWeighted(1), operations: map[string]*execution{},
	}
	for _, d := range o.Definitions {
		if err := d.validate(); err != nil {
			return nil, err
		}
		if _, twice := r.definitions[d.Name]; twice {
			return nil, fmt.Errorf("operation %q is there twice", d.Name)
		}
		r.definitions[d.Name] = d
	}
	r.ctx, r.stop = context.WithCancel(context.Background())
	return r, nil
}

// Run lets operations run until ctx ends. Those that run then go on after the next
// boot. An error names what didn't stop in time.
func (r *Runner) Run(ctx context.Context) error {
	<-ctx.Done()
	r.mu.Lock()
	r.leaving = true
	r.mu.Unlock()
	r.stop()
	if sleep.Group(&r.running, stopBudget) {
		return nil
	}
	left := lists.Some(r.all(), func(x *execution) (string, bool) { return x.id, !x.over() })
	return fmt.Errorf("stop operations: not within %s: %s", stopBudget, strings.Join(left, ", "))
}

// Open is called each time that STATE is mounted. Operations in the journals continue. It
// returns at once: a journal never blocks the node.
func (r *Runner) Open() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.leaving || !r.opened.CompareAndSwap(false, true) {
		return
	}
	mine := r.beginning.TryAcquire(1) // nothing new begins before what goes on
	r.running.Go(func() {
		if !mine && r.beginning.Acquire(r.ctx, 1) != nil {
			return
		}
		defer r.beginning.Release(1)
		for _, rec := range r.files.read() {
			r.resume(rec)
		}
		r.forget()
		r.read.Store(true)
	})
}

// Ask is the argument of Start.
type Ask struct {
	Name      string
	Arguments any    // a message of the API, or another type that the definition decodes; nil: none
	By        string // who asks
	DryRun    bool
}

// Start plans an operation and begins it. With DryRun it only plans: the result has no ID,
// and is pending. The error is a Refusal if there is a reason against the operation.
func (r *Runner) Start(ctx context.Context, a Ask) (Operation, error) {
	def, known := r.definitions[a.Name]
	request := Request{By: bounded(a.By)}
	var err error
	if a.Arguments != nil {
		request.Arguments, err = encode(a.Arguments)
	}
	switch {
	case !known:
		return Operation{}, fmt.Errorf("operation %q: %w", a.Name, ErrNotFound)
	case err != nil:
		return Operation{}, fmt.Errorf("%s: its arguments: %w", a.Name, err)
	case len(request.Arguments) > maxArguments:
		return Operation{}, refuse("%s: its arguments have %d bytes, and may have %d", a.Name, len(request.Arguments), maxArguments)
	}
	if err := r.beginning.Acquire(ctx, 1); err != nil {
		return Operation{}, fmt.Errorf("%s: wait for another operation to begin: %w", a.Name, err)
	}
	defer r.beginning.Release(1)
	r.settle(ctx)
	if err := r.room(def); err != nil {
		return Operation{}, err
	}
	if !a.DryRun {
		request.ID = newID(a.Name)
	}
	p, err := r.plan(ctx, def, request)
	if err != nil {
		return Operation{}, err
	}
	if a.DryRun {
		p.Warnings = append(p.Warnings, r.look(ctx, def, p)...)
		return newRecord(request, def, p).Operation, nil
	}
	return r.begin(ctx, def, request, p)
}

func newID(name string) string {
	var b [idSize]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand ends the program instead
	return name + "-" + strings.ToLower(base32.StdEncoding.EncodeToString(b[:]))
}

// room refuses what can't run beside what runs.
func (r *Runner) room(def Definition) error {
	count := 0
	for _, x := range r.all() {
		if x.over() {
			continue
		}
		count++
		if rec := x.record(); def.Exclusive && x.def.Exclusive {
			return refuse("%s: this node is running %s (%s) since %s: wait for its end, or abort it (gbctl operation attach %s, gbctl operation abort %s)",
				def.Name, rec.Name, x.id, rec.Began.UTC().Format(time.RFC3339), x.id, x.id)
		}
	}
	if count >= maxRunning {
		return refuse("%s: %d operations run on this node already (gbctl operation list)", def.Name, count)
	}
	return nil
}

// plan calls the definition's Plan with a deadline. A panic of it is an error.
func (r *Runner) plan(ctx context.Context, def Definition, request Request) (p Plan, err error) {
	ctx, cancel := context.WithTimeout(ctx, planTimeout)
	defer cancel()
	err = dag.Guard(r.o.Log, func() (err error) {
		if p, err = def.Plan(ctx, request); err == nil && p.Steps == nil {
			p.Steps, err = def.Steps(request)
		}
		p.Steps = kept(p.Steps)
		return err
	})
	if called := ctx.Err(); called != nil {
		return Plan{}, calledOff(def.Name, called)
	}
	if err != nil {
		return Plan{}, Refusal{fmt.Errorf("%s: %w", def.Name, err)}
	}
	if err := validateSteps(p.Steps); err != nil {
		return Plan{}, fmt.Errorf("a defect of operation %s: %w", def.Name, err)
	}
	return p, nil
}

// steps returns the code for an operation whose plan is in its record.
func (r *Runner) steps(def Definition, rec *record) (steps []Step, err error) {
	err = dag.Guard(r.o.Log, func() (err error) {
		steps, err = def.Steps(Request{Arguments: rec.Arguments, By: rec.By, ID: rec.ID, Resuming: true})
		steps = kept(steps)
		return err
	})
	if err == nil {
		err = validateSteps(steps)
	}
	return steps, err
}

// calledOff is the error if the context ended during the checks: other nodes and the lock
// that weren't reached must not count as absent.
func calledOff(name string, err error) error {
	return fmt.Errorf("%s: it hasn't begun, and nothing is done: it couldn't look around to the end: %w", name, err)
}

// look returns what the lock would report now, for a dry run.
func (r *Runner) look(ctx context.Context, def Definition, p Plan) []string {
	if r.o.Lock == nil || !def.Exclusive {
		return nil
	}
	if p.Unlocked != "" {
		return []string{unlocked(p.Unlocked)}
	}
	ctx, cancel := context.WithTimeout(ctx, lockTimeout)
	defer cancel()
	switch holder, err := r.o.Lock.Look(ctx); {
	case err != nil:
		return []string{unlocked(err.Error())}
	case holder != nil:
		return []string{"it would be refused now: " + holder.String()}
	}
	return nil
}

// newRecord is an operation that hasn't begun.
func newRecord(request Request, def Definition, p Plan) *record {
	rec := &record{
		Format:    format,
		Operation: Operation{ID: request.ID, Name: def.Name, By: request.By, State: Pending, Role: def.Role},
		Arguments: request.Arguments,
		Data:      p.data,
		Boots:     1,
	}
	for _, s := range p.Steps {
		rec.Steps = append(rec.Steps, Status{
			ID: s.ID, What: bounded(s.What), State: Pending, Deadline: s.Deadline, Optional: s.Optional, PointOfNoReturn: s.PointOfNoReturn,
		})
	}
	rec.Warnings = lists.Of(p.Warnings[:min(len(p.Warnings), maxWarnings)], bounded)
	return rec
}

// begin takes the lock, writes the first journal of an operation, and lets it run.
func (r *Runner) begin(ctx context.Context, def Definition, request Request, p Plan) (Operation, error) {
	began := time.Now()
	var lock Taken
	without := p.Unlocked
	if r.o.Lock != nil && def.Exclusive && without == "" {
		var err error
		if lock, without, err = r.take(ctx, Holder{Name: def.Name, ID: request.ID, Since: began, Stays: def.lockStays()}); err != nil {
			return Operation{}, err
		}
	}
	if without != "" {
		p.Warnings = append(p.Warnings, unlocked(without))
	}
	rec := newRecord(request, def, p)
	rec.State, rec.Began, rec.Unlocked = Running, began, lock == nil
	x := newExecution(r, rec)
	x.lock = lock
	launched := false
	defer func() {
		if !launched {
			x.release(0)
			x.dropClaim()
		}
	}()
	if def.Shared {
		claim, err := r.claim(ctx, Holder{Name: def.Name, ID: request.ID, Since: began})
		if err != nil {
			return Operation{}, err
		}
		x.claim, rec.Coordinator = claim, claim.Node()
	}
	if called := ctx.Err(); called != nil {
		return Operation{}, calledOff(def.Name, called)
	}
	err := x.commit(func(*record) ([]Event, error) {
		warnings := lists.Of(rec.Warnings, func(w string) Event { return Event{Kind: Said, Text: "warning: " + w} })
		return append([]Event{{Kind: Changed, State: Running, Text: "asked by " + rec.By}}, warnings...), nil
	}, nil)
	if err != nil {
		return Operation{}, err
	}
	begun := x.record().clone().Operation
	if err := r.launch(x, p.Steps); err != nil {
		r.drop(x)
		return Operation{}, err
	}
	launched = true
	return begun, nil
}

// errLeaving is why nothing is begun any more.
var errLeaving = errors.New("the node stops")

// launch lets an operation run in a goroutine of its own.
func (r *Runner) launch(x *execution, steps []Step) error {
	x.steps = make(map[string]Step, len(steps))
	for _, s := range steps {
		x.steps[s.ID] = s
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.leaving {
		return Refusal{errLeaving}
	}
	r.operations[x.id] = x
	r.running.Go(func() {
		// A panic here must not end the machine; it is in the log.
		_ = dag.Guard(r.o.Log, func() error { x.run(r.ctx); return nil })
		close(x.ended)
		r.forget()
	})
	return nil
}

// resume continues the operation of a journal.
func (r *Runner) resume(rec *record) {
	rec.Boots++
	x := newExecution(r, rec)
	if rec.Finished() {
		r.keep(x)
		x.mu.Lock()
		x.publish()
		x.mu.Unlock()
		return
	}
	def, known := r.definitions[rec.Name]
	err := fmt.Errorf("this release knows no operation %q", rec.Name)
	if known {
		err = r.room(def)
	}
	var steps []Step
	if err == nil {
		steps, err = r.steps(def, rec)
	}
	if err == nil {
		if !def.Shared { // that begins with waiting for etcd
			x.force(func(*record) ([]Event, error) {
				return []Event{{Kind: Said, Text: "goes on after a restart of the node"}}, nil
			})
		}
		err = r.launch(x, steps)
	}
	if err == nil || errors.Is(err, errLeaving) || r.ctx.Err() != nil {
		return // the journal is there for the next boot
	}
	if def.Shared { // another control plane can take it over
		r.o.Log.Error("an operation can't go on after a restart, and is left alone", "operation", x.id, "err", err)
		return
	}
	x.force(func(next *record) ([]Event, error) {
		next.Error = bounded(strings.TrimPrefix(fmt.Sprintf("%s; can't go on after a restart: %v", next.Error, err), "; "))
		return x.conclude(next, Failed), nil
	})
	r.keep(x)
}

// keep remembers an operation that has ended.
func (r *Runner) keep(x *execution) {
	close(x.ended)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.operations[x.id] = x
}

// forget keeps the last finished operations.
func (r *Runner) forget() {
	r.mu.Lock()
	var finished []*execution
	for _, x := range r.operations {
		if x.over() && x.record().Finished() {
			finished = append(finished, x)
		}
	}
	oldest(finished)
	gone := finished[:max(len(finished)-keptFinished, 0)]
	for _, x := range gone {
		delete(r.operations, x.id)
	}
	r.mu.Unlock()
	for _, x := range gone {
		r.drop(x)
	}
}

// drop removes what is left of an operation.
func (r *Runner) drop(x *execution) {
	r.files.remove(x.id + journalSuffix)
	_ = Operations.Delete(r.o.Store.As(ID), x.id) // it is ours
}

// oldest sorts by beginning.
func oldest(all []*execution) {
	slices.SortFunc(all, func(a, b *execution) int {
		x, y := a.record(), b.record()
		return cmp.Or(x.Began.Compare(y.Began), strings.Compare(a.id, b.id))
	})
}

func (r *Runner) all() []*execution {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := slices.Collect(maps.Values(r.operations))
	oldest(all)
	return all
}

// Abort ends an operation that nothing is done of yet that can't be undone, and has
// what was done undone.
func (r *Runner) Abort(id, by string) error {
	x, err := r.find(id)
	if err != nil {
		return err
	}
	return x.abort(by)
}

// print writes an event of an operation to the log and the console.
func (r *Runner) print(id string, e Event) {
	line := strings.TrimRight(strings.Join([]string{id, e.Step, e.Part}, " "), " ")
	about := map[EventKind]string{
		Changed: string(e.State), Asks: "waits for an answer (gbctl -n ADDRESS operation answer " + id + " ANSWER)", Answered: "has its answer",
	}[e.Kind]
	for _, text := range []string{about, e.Text} {
		if text != "" {
			line += ": " + text
		}
	}
	r.o.Log.LogAttrs(context.Background(), slog.LevelInfo, line)
	r.o.Print("%s", line)
}
