package configuration

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/sleep"
)

// restartTimeout bounds one restart of a service: longer than any stop budget.
const restartTimeout = 2 * time.Minute

// Confirm keeps what is being tried.
func (a *Applier) Confirm(_ context.Context, by string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.trial == nil {
		return fmt.Errorf("confirm configuration: %w: it was confirmed already, or is undone (gbctl config history)", ErrNothingToConfirm)
	}
	if a.trial.Reboot {
		return fmt.Errorf("confirm configuration: %w: the reboot into it is still to come", ErrBusy)
	}
	if err := a.stored.remove(tryFile); err != nil {
		return fmt.Errorf("confirm configuration: %w", err)
	}
	a.trial, a.deadline = nil, time.Time{}
	a.poke()
	a.forget()
	a.o.Log.Log(context.Background(), logs.LevelNotice, "the tried configuration is confirmed", "by", by)
	return nil
}

// Rollback applies an earlier document again: version 0 is the one before the
// current one. While a change is being tried it is undone now.
func (a *Applier) Rollback(ctx context.Context, version uint64, r Request) (Result, error) {
	a.mu.Lock()
	if a.trial != nil && version == 0 {
		defer a.mu.Unlock()
		return a.rollTrial(r)
	}
	text, err := a.earlier(version)
	base := Digest(a.text)
	a.mu.Unlock()
	if err != nil {
		return Result{}, fmt.Errorf("roll the configuration back: %w", err)
	}
	r.Text, r.Base = text, ""
	if version == 0 { // the one before the current one: not before whatever comes in between
		r.Base = base
	}
	return a.Apply(ctx, r)
}

func (a *Applier) rollTrial(r Request) (Result, error) {
	previous, _, err := config.Load("the configuration before", a.trial.Previous)
	if err != nil {
		return Result{}, err
	}
	res := Result{Changes: config.Diff(a.config, previous), Mode: Immediate}
	if r.DryRun {
		return res, nil
	}
	if a.leaving {
		return Result{}, a.ready()
	}
	res.Rebooting, res.Restarted, err = a.undo("rolled back by " + r.By)
	return res, err
}

// earlier is a document of the history; the caller holds mu.
func (a *Applier) earlier(version uint64) ([]byte, error) {
	all, err := a.stored.history()
	if err != nil {
		return nil, err
	}
	if version > 0 {
		for _, k := range all {
			if k.Version == version {
				return k.document()
			}
		}
		return nil, fmt.Errorf("version %d %w", version, ErrNoVersion)
	}
	before := false // a current one
	for _, k := range slices.Backward(all) {
		current := k.Digest == Digest(a.text)
		if before && !current {
			return k.document()
		}
		before = before || current
	}
	return nil, errors.New("the history has nothing before the current configuration")
}

// undo brings back what was before the trial. After an error nothing is undone.
func (a *Applier) undo(why string) (rebooting bool, restarts []string, err error) {
	previous, _, err := config.Load("the configuration before", a.trial.Previous)
	if err != nil {
		return false, nil, err
	}
	changes := config.Diff(a.config, previous)
	text := a.trial.Previous
	if err := a.commit(previous, text); err != nil {
		return false, nil, fmt.Errorf("undo a tried configuration: %w", err)
	}
	// It is undone. A journal that stays speaks of a document that isn't there.
	if err := a.stored.remove(tryFile); err != nil {
		a.o.Log.Warn("the journal of a tried configuration stays until the next change", "err", err)
	}
	a.trial, a.deadline = nil, time.Time{}
	reboot, restarts := needs(changes)
	if rebooting = len(reboot) > 0; rebooting {
		restarts = nil
		a.reboot("a tried configuration is undone: " + why)
	} else {
		err = a.enforce(changes, restarts)
	}
	a.remember(a.entry(Undone, why, changes), text)
	a.forget()
	return rebooting, restarts, err
}

// run restarts services and ends trials, until ctx ends.
func (a *Applier) run(ctx context.Context) {
	restart := make(chan struct{}, 1)
	var both sync.WaitGroup
	both.Go(func() { a.restartAll(ctx, restart) })
	defer both.Wait()
	for {
		sleep.Wake(restart)
		select {
		case <-ctx.Done():
			return
		case <-a.wake:
		case <-a.next():
			a.due()
			a.expire()
		}
	}
}

// next is when run has something to do; nil is never.
func (a *Applier) next() <-chan time.Time {
	a.mu.Lock()
	defer a.mu.Unlock()
	at := a.deadline
	if at.IsZero() || !a.publishAt.IsZero() && a.publishAt.Before(at) {
		at = a.publishAt
	}
	if at.IsZero() {
		return nil
	}
	return time.After(at.Sub(a.o.Now()))
}

// due publishes what had to wait.
func (a *Applier) due() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.publishAt.IsZero() || a.o.Now().Before(a.publishAt) {
		return
	}
	if err := a.publish(nil); err != nil {
		a.o.Log.Error("publish the configuration", "err", err, "next try in", retryUndo)
		a.publishAt = a.o.Now().Add(retryUndo)
	}
}

// retryUndo is when what nobody waits for, and failed, is tried again: STATE is
// full or broken.
const retryUndo = 5 * time.Second

func (a *Applier) expire() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.config == nil || a.trial == nil || a.deadline.IsZero() || a.o.Now().Before(a.deadline) {
		return // confirmed meanwhile
	}
	if _, _, err := a.undo("not confirmed within " + a.trial.Timeout.String()); err != nil {
		a.o.Log.Error(err.Error(), "next try in", retryUndo)
		if a.trial != nil {
			a.deadline = a.o.Now().Add(retryUndo)
		}
	}
}

// restartAgain is between two tries to restart a service that goes on, because it would lack something: who makes it
// wait is asked for no more than whether it still does.
const restartAgain = 2 * time.Second

// restartAll restarts what changes ask for, one after the other. What is asked for
// several times meanwhile is restarted once.
func (a *Applier) restartAll(ctx context.Context, wake <-chan struct{}) {
	late := map[string]string{} // services that go on, and why
	for {
		select {
		case <-ctx.Done():
			return
		case <-wake:
		}
		for id := a.nextRestart(); id != "" && ctx.Err() == nil; id = a.nextRestart() {
			before, is := late[id]
			if delete(late, id); !is {
				a.o.Log.Info("restarting a service whose configuration has changed", "service", id)
			}
			rctx, cancel := context.WithTimeout(ctx, restartTimeout)
			err := dag.Guard(a.o.Log, func() error { return a.o.Restart(rctx, id, is) })
			if err != nil && rctx.Err() == nil { // after that, it starts when it has stopped
				late[id] = err.Error()
				time.AfterFunc(restartAgain, func() { a.mu.Lock(); defer a.mu.Unlock(); a.restart([]string{id}) })
			}
			if err != nil && ctx.Err() == nil && err.Error() != before {
				a.o.Log.Warn("restart after a change of the configuration", "service", id, "err", err)
			}
			cancel()
		}
	}
}

func (a *Applier) nextRestart() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.restarts) == 0 || !a.publishAt.IsZero() { // a service reads its configuration as it starts
		return ""
	}
	id := a.restarts[0]
	a.restarts = a.restarts[1:]
	return id
}
