package configuration

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/option"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/core/sleep"
)

// Mode is when a configuration takes effect. The words are those of gbctl.
type Mode string

const (
	Auto      Mode = "auto"      // the mildest that works
	Immediate Mode = "immediate" // now, without a reboot, or not at all
	OnReboot  Mode = "on-reboot" // staged for the next boot
	Reboot    Mode = "reboot"    // now, with a reboot
	Try       Mode = "try"       // now, and undone unless confirmed
	// Undone is in the history only: it came back because what was tried wasn't
	// confirmed.
	Undone Mode = "undone"
)

// Request asks for a configuration to be applied.
type Request struct {
	Text       []byte
	Mode       Mode
	TryTimeout time.Duration // from MinTryTimeout to MaxTryTimeout; 0: DefaultTryTimeout
	DryRun     bool
	By         string // who asks, for the history
	// Base is the digest of the text that this one was made from; "": any.
	Base string
	// First: only as the first configuration of a node that has none. Unsigned: it may say that no system needs a
	// signature.
	First, Unsigned bool
	// Force: a live change may take the node's last way away.
	Force bool
	// Around gets what a dry run has found, and do, which carries it out. nil: do is called at once.
	Around func(plan Result, do func() (Result, error)) (Result, error)
}

// Result is what was done, or in a dry run what would be.
type Result struct {
	Changes   []config.Change
	Warnings  []config.Warning
	Mode      Mode // never Auto
	Rebooting bool
	Restarted []string  // services
	Deadline  time.Time // Try: undone then unless confirmed
	Version   uint64    // in the history; 0: none was made
}

// Entry is one applied configuration.
type Entry struct {
	Version uint64    `json:"version"`
	Time    time.Time `json:"time"`
	By      string    `json:"by"`
	Mode    Mode      `json:"mode"`
	Digest  string    `json:"digest"`
	Summary string    `json:"summary"` // what changed, in a line
	Current bool      `json:"-"`
}

// Situation is what a person who looks at the configuration should know besides
// the text.
type Situation struct {
	Version uint64
	Staged  bool
	Try     time.Time // when the change that is being tried is undone; zero: none is
}

// Bounds and default of the time that a change is tried for: a person needs some
// seconds to look, and must not forget it for longer than an hour.
const (
	DefaultTryTimeout = time.Minute
	MinTryTimeout     = 10 * time.Second
	MaxTryTimeout     = time.Hour
)

// ApplierOptions are what the Applier stands on.
type ApplierOptions struct {
	Mode boot.Mode // of the node
	// Trial: this boot is the one that a system on trial has. Back: a rollback goes back to it.
	Trial, Back bool
	Store       *resource.Store
	Log         *slog.Logger
	// Restart restarts a service. late: it was to restart earlier, and couldn't.
	Restart func(ctx context.Context, id string, late bool) error
	// Reboot restarts the machine; it returns at once.
	Reboot func(why string)
	// Place says what a machine without a system has of its disk with a configuration, or why that can't be; nil: it
	// has no disk.
	Place func(config.Install) (string, error)
	// HasWay says whether the node could be reached with these settings; nil: nobody knows.
	HasWay func(config.Network) bool
	// Unable says what this node can't do of a configuration; "": nothing is known. nil: nobody looks.
	Unable func(*config.Config) string

	StateDir string           // default boot.StateDir
	Now      func() time.Time // default time.Now
}

// Applier changes the configuration of a node, and keeps what it has applied on
// STATE. A document counts as applied once config.yaml holds it; what follows
// from it can be done again at any time.
type Applier struct {
	o      ApplierOptions
	stored store

	// given is closed when a node without a configuration has got one.
	given chan struct{}
	// wake tells run that there is something to restart, or to wait for.
	wake chan struct{}

	// mu guards all following fields, and is held over every change of a file, so
	// that changes have one order.
	mu       sync.Mutex
	state    bool // STATE is there
	recorded bool // this boot is in the history
	text     []byte
	config   *config.Config // of text; nil while there is none
	trial    *trial         // nil: nothing is being tried
	deadline time.Time      // of trial; zero while it waits for a reboot
	leaving  bool           // a reboot was asked for
	restarts []string       // services, in order
	// publishAt is when config is to be published; zero: it is.
	publishAt time.Time
}

// NewApplier makes an Applier for a node that has no configuration yet.
func NewApplier(o ApplierOptions) *Applier {
	option.Default(&o.StateDir, boot.StateDir)
	option.Default(&o.Now, time.Now)
	return &Applier{o: o, stored: store{o.StateDir}, given: make(chan struct{}), wake: make(chan struct{}, 1)}
}

// load checks a document for this node.
func (a *Applier) load(name string, text []byte) (*config.Config, []config.Warning, error) {
	if a.o.Mode == boot.Container {
		return config.LoadForContainer(name, text)
	}
	return config.Load(name, text)
}

// Apply checks a document and applies it. An error leaves the node as it was;
// one of a bad document is config.Problems.
func (a *Applier) Apply(_ context.Context, r Request) (Result, error) {
	next, warnings, err := a.load("configuration", r.Text)
	if err != nil {
		return Result{Warnings: warnings}, err
	}
	if r.First && !r.Unsigned && next.Machine.Install.Unsigned {
		return Result{}, ErrUnsigned
	}
	if r.First && a.o.Place != nil { // the disk may yet come, and another configuration, too
		place, err := a.o.Place(next.Machine.Install)
		if err != nil {
			place = err.Error()
		}
		if err != nil || r.DryRun {
			warnings = append(warnings, config.Warning{Problem: config.Problem{Name: "configuration", What: place}})
		}
	}
	if a.o.Unable != nil {
		if what := a.o.Unable(next); what != "" {
			warnings = append(warnings, config.Warning{Problem: config.Problem{Name: "configuration", What: what}})
		}
	}
	if r.DryRun || r.Around == nil {
		return a.apply(next, warnings, r)
	}
	planned := r
	planned.DryRun = true
	plan, err := a.apply(next, warnings, planned)
	if err != nil {
		return plan, err
	}
	return r.Around(plan, func() (Result, error) { return a.apply(next, warnings, r) })
}

// apply is Apply for a document that was parsed.
func (a *Applier) apply(next *config.Config, warnings []config.Warning, r Request) (Result, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := config.CheckManifests("configuration", r.Text, next, a.config); err != nil {
		return Result{Warnings: warnings}, err
	}
	if r.First && a.config != nil {
		return Result{}, fmt.Errorf("apply configuration: %w", ErrConfigured)
	}
	if r.Base != "" && r.Base != Digest(a.text) {
		return Result{}, fmt.Errorf("apply configuration: %w; read it again and make the change anew", ErrStale)
	}
	res := Result{Changes: config.Diff(a.config, next), Warnings: warnings}
	if err := a.decide(&res, next, r); err != nil {
		return Result{}, fmt.Errorf("apply configuration: %w", err)
	}
	if r.DryRun {
		return res, nil
	}
	if err := a.ready(); err != nil {
		return Result{}, fmt.Errorf("apply configuration: %w", err)
	}
	if err := a.carryOut(&res, next, r); err != nil {
		return Result{}, fmt.Errorf("apply configuration: %w", err)
	}
	return res, nil
}

// decide fills in what is going to happen.
func (a *Applier) decide(res *Result, next *config.Config, r Request) error {
	if a.config == nil { // maintenance: there is nothing to go back to, and nothing runs yet
		if r.Mode == Try || r.Mode == OnReboot {
			return fmt.Errorf("%w: mode %q needs one to begin with; use mode auto", ErrNoConfig, r.Mode)
		}
		res.Mode = Immediate
		return nil
	}
	reboot, restarts := needs(res.Changes)
	res.Mode = r.Mode
	switch r.Mode {
	case Auto, "":
		res.Mode = Immediate
		if len(reboot) > 0 {
			res.Mode = Reboot
		}
	case Immediate:
		if len(reboot) > 0 {
			return &NeedsReboot{Paths: reboot}
		}
	case Try:
		if len(res.Changes) == 0 {
			res.Mode = Immediate
		}
	case OnReboot, Reboot:
	default:
		return fmt.Errorf("mode %q isn't one; there are auto, immediate, on-reboot, reboot and try", r.Mode)
	}
	if res.Mode == Immediate && !r.Force && a.o.HasWay != nil && !a.o.HasWay(next.Machine.Network) {
		return ErrNoWay
	}
	res.Rebooting = res.Mode == Reboot || res.Mode == Try && len(reboot) > 0
	if !isPersistent(next) && (res.Rebooting || res.Mode == OnReboot) {
		return errors.New("persist is false, so the next boot takes its configuration from where the first one came from: change it there, or set persist")
	}
	if res.Mode == Try && !res.Rebooting {
		res.Deadline = a.o.Now().Add(cmp.Or(r.TryTimeout, DefaultTryTimeout))
	}
	if !res.Rebooting && res.Mode != OnReboot {
		res.Restarted = restarts
	}
	return nil
}

// needs are the paths of changes that take a reboot, and the services that restart for others.
func needs(changes []config.Change) (reboot, restarts []string) {
	for _, change := range changes {
		if change.Effect == config.Reboot {
			reboot = append(reboot, change.Path)
		}
	}
	for _, effect := range config.Effects(changes) {
		if id, ok := effect.Service(); ok {
			restarts = append(restarts, id)
		}
	}
	return reboot, restarts
}

// ready refuses changes at times when they would be lost, or come in between.
func (a *Applier) ready() error {
	switch {
	case a.leaving:
		return fmt.Errorf("%w: the node is about to reboot; try again when it is back", ErrBusy)
	case a.trial != nil:
		return fmt.Errorf("%w: another change is being tried; confirm it (gbctl config confirm), undo it (gbctl config rollback), or wait until it undoes itself", ErrBusy)
	case a.config != nil && !a.state:
		return fmt.Errorf("%w: STATE isn't mounted yet, and the change would be lost; see what service \"disks\" waits for. A machine that isn't installed takes another configuration after a restart", ErrBusy)
	}
	return nil
}

// carryOut does what decide has decided.
func (a *Applier) carryOut(res *Result, next *config.Config, r Request) error {
	entry := a.entry(res.Mode, r.By, res.Changes)
	switch {
	case a.config == nil:
		return a.first(next, r, entry, res)
	case res.Mode == OnReboot:
		return a.stored.write(stagedFile, historyEntry{Entry: entry, Text: r.Text})
	}
	if err := a.dropStaged(res); err != nil {
		return err
	}
	switch {
	case res.Mode == Reboot && len(res.Changes) == 0 && bytes.Equal(r.Text, a.text):
		a.reboot("a configuration was applied with mode reboot")
		return nil
	case bytes.Equal(r.Text, a.text):
		return nil
	}
	if res.Mode == Try {
		timeout := cmp.Or(r.TryTimeout, DefaultTryTimeout)
		t := trial{Previous: a.text, Tried: Digest(r.Text), Timeout: timeout, Reboot: res.Rebooting, By: r.By}
		if err := a.stored.write(tryFile, t); err != nil {
			return err
		}
		a.trial, a.deadline = &t, res.Deadline
	} else if err := a.stored.remove(tryFile); err != nil { // one that an error has left
		return err
	}
	if err := a.commit(next, r.Text); err != nil {
		// The old document still counts. The journal stays: should the new one be on
		// the disk nevertheless, the next boot brings the old one back.
		a.trial, a.deadline = nil, time.Time{}
		return err
	}
	if res.Rebooting {
		a.reboot("a configuration was applied that takes a reboot")
	} else if err := a.enforce(res.Changes, res.Restarted); err != nil {
		return err
	}
	res.Version = a.remember(entry, r.Text)
	a.forget()
	return nil
}

// answerGrace is the head start that an answer has over a change of the network:
// whoever asked for it hears that it is being tried, and for how long, before the
// way is cut off on which they asked.
const answerGrace = time.Second

const networkPath = "machine.network.interfaces"

// enforce publishes the configuration, and restarts what asks for it.
func (a *Applier) enforce(changes []config.Change, restarts []string) error {
	if !slices.ContainsFunc(changes, func(c config.Change) bool { return strings.HasPrefix(c.Path, networkPath) }) {
		return a.publish(restarts)
	}
	a.publishAt = a.o.Now().Add(answerGrace)
	a.restart(restarts)
	return nil
}

func (a *Applier) entry(mode Mode, by string, changes []config.Change) Entry {
	paths := lists.Of(changes, func(c config.Change) string { return c.Path })
	const longest = 200 // bytes: a line of a table
	return Entry{Time: a.o.Now(), By: by, Mode: mode, Summary: config.Shorten(strings.Join(paths, ", "), longest)}
}

// first gives a node in maintenance mode its configuration.
func (a *Applier) first(next *config.Config, r Request, entry Entry, res *Result) error {
	entry.Summary = "the first configuration"
	if a.state {
		if err := a.commit(next, r.Text); err != nil {
			return err
		}
	} else { // kept as soon as there is a STATE: see StateReady
		a.text, a.config = r.Text, next
	}
	// The machine's address changes with it, mostly: see enforce.
	a.publishAt = a.o.Now().Add(answerGrace)
	if a.state {
		res.Version = a.remember(entry, r.Text)
		a.forget()
	}
	close(a.given)
	a.poke()
	return nil
}

// commit makes a document the one that counts.
func (a *Applier) commit(next *config.Config, text []byte) error {
	if isPersistent(next) {
		if err := boot.WriteFile(a.stored.config(), text, storeMode); err != nil {
			return fmt.Errorf("store the configuration on STATE: %w", err)
		}
	} else if err := a.stored.remove(filepath.Base(boot.ConfigFile)); err != nil {
		return fmt.Errorf("remove the configuration from STATE: %w", err)
	}
	a.text, a.config = text, next
	return nil
}

// isPersistent reports whether a configuration is to be on STATE.
func isPersistent(c *config.Config) bool { return c.Persist == nil || *c.Persist }

// publish publishes the configuration to all services and controllers.
func (a *Applier) publish(restarts []string) error {
	w := a.o.Store.As(ID)
	if err := Configs.Put(w, ConfigID, a.config); err != nil {
		return err
	}
	if err := Stages.Put(w, StageID, Configured); err != nil {
		return err
	}
	a.publishAt = time.Time{}
	a.restart(restarts)
	return nil
}

// restart has run restart services, once the configuration is published.
func (a *Applier) restart(ids []string) {
	for _, id := range ids {
		if !slices.Contains(a.restarts, id) {
			a.restarts = append(a.restarts, id)
		}
	}
	a.poke()
}

func (a *Applier) poke() { sleep.Wake(a.wake) }

// remember adds to the history. The document is applied already, so a failed write of
// the history is only logged.
func (a *Applier) remember(e Entry, text []byte) (version uint64) {
	e.Digest = Digest(text)
	if current := a.config != nil && bytes.Equal(text, a.text); current && !isPersistent(a.config) || !current && !textPersistent(text) {
		text = nil
	}
	version, err := a.stored.remember(e, text)
	if err != nil {
		a.o.Log.Warn("the configuration is applied, but isn't in the history", "err", err)
	}
	a.o.Log.Log(context.Background(), logs.LevelNotice, "configuration applied", "version", version, "mode", string(e.Mode), "by", e.By, "changed", e.Summary)
	return version
}

// forget removes all documents from the history while STATE keeps none (persist: false). What is tried may yet be
// undone. The next boot repeats it.
func (a *Applier) forget() {
	if a.trial != nil || isPersistent(a.config) {
		return
	}
	if err := a.stored.forget(); err != nil {
		a.o.Log.Error("the history still has documents although persist is false", "err", err)
	}
}

func (a *Applier) reboot(why string) {
	a.leaving = true
	a.o.Reboot(why)
}

// dropStaged: the newest document is the one that counts, so what was staged
// before must not replace it at the next boot.
func (a *Applier) dropStaged(res *Result) error {
	staged, err := a.stored.read(stagedFile)
	if err != nil || staged == nil {
		return err
	}
	res.Warnings = append(res.Warnings, config.Warning{Problem: config.Problem{Name: "configuration", What: "the one that was staged for the next boot is dropped: this one is newer"}})
	return a.stored.remove(stagedFile)
}
