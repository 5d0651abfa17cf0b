package configuration

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/source"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/core/sleep"
)

// stateFound is for a STATE that is there before a configuration is: what the last
// boot left undone is done, so that config.yaml is what counts.
func (a *Applier) stateFound() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.state {
		return nil
	}
	err := a.settle()
	a.state = err == nil
	return err
}

// settle ends, or begins, a trial, and takes over what was staged.
func (a *Applier) settle() (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("settle the configuration on STATE: %w", err)
		}
	}()
	if err := a.stored.sweep(); err != nil {
		return err
	}
	current, err := a.stored.read(filepath.Base(boot.ConfigFile))
	if err != nil { // what is undone stays so until a boot can read it
		a.o.Log.Error("the configuration on STATE can't be read", "err", err)
		return nil
	}
	t, err := a.stored.readTrial()
	if err != nil { // written in one step, so by somebody else: it can't be followed
		a.o.Log.Warn("a journal of a tried configuration is dropped", "err", err)
		if err := a.stored.remove(tryFile); err != nil {
			return err
		}
	}
	switch {
	case t == nil:
	case current != nil && !readable(current) && readable(t.Previous):
		if err := a.restore(t, current, "this boot couldn't read it"); err != nil {
			return err
		}
	case !tried(t, current): // the power went before the change was made
		if err := a.stored.remove(tryFile); err != nil {
			return err
		}
	case t.Reboot: // this boot is the trial, and the next one its end
		t.Reboot = false
		if err := a.stored.write(tryFile, *t); err != nil {
			return err
		}
		a.trial = t
		return nil
	default:
		if err := a.restore(t, current, "not confirmed before the node restarted"); err != nil {
			return err
		}
	}
	return a.promote()
}

// tried reports whether the change of a journal was made: the new document is there, or
// the former one isn't, as the tried configuration has persist: false.
func tried(t *trial, current []byte) bool {
	return t.Tried == Digest(current) || current == nil && textPersistent(t.Previous)
}

// textPersistent reports whether a document is to be on STATE. One that can't be read any
// more was there.
func textPersistent(text []byte) bool {
	c, _, err := config.Load("configuration", text)
	return err != nil || isPersistent(c)
}

// readable is false of a document that another release wrote, or that was damaged: a
// node that has only that one waits in maintenance mode.
func readable(text []byte) bool {
	_, _, err := config.Load("configuration", text)
	return err == nil
}

// restore ends a trial that a restart of the node has cut off, or that it can't begin.
func (a *Applier) restore(t *trial, current []byte, why string) error {
	a.o.Log.Warn("the node restarted while a configuration was being tried: the one before comes back", "tried by", t.By, "why", why)
	if !textPersistent(t.Previous) { // it comes from where the boot before had it
		if err := a.stored.remove(filepath.Base(boot.ConfigFile)); err != nil {
			return err
		}
		return a.stored.remove(tryFile)
	}
	if err := boot.WriteFile(a.stored.config(), t.Previous, storeMode); err != nil {
		return err
	}
	if err := a.stored.remove(tryFile); err != nil {
		return err
	}
	var changes []config.Change
	from, _, fromErr := config.Load("the tried configuration", current)
	to, _, toErr := config.Load("the configuration before", t.Previous)
	if fromErr == nil && toErr == nil {
		changes = config.Diff(from, to)
	}
	a.remember(a.entry(Undone, why, changes), t.Previous)
	return nil
}

// promote makes a staged document the current one.
func (a *Applier) promote() error {
	data, err := a.stored.read(stagedFile)
	if err != nil || data == nil {
		return err
	}
	var staged historyEntry
	err = json.Unmarshal(data, &staged)
	if err == nil {
		_, _, err = config.Load("the staged configuration", staged.Text)
	}
	if err != nil { // this release reads it otherwise than the one that staged it
		a.o.Log.Error("the staged configuration is dropped, the current one stays", "err", err)
		return a.stored.remove(stagedFile)
	}
	if err := boot.WriteFile(a.stored.config(), staged.Text, storeMode); err != nil {
		return err
	}
	a.remember(staged.Entry, staged.Text)
	return a.stored.remove(stagedFile)
}

// begin takes over what a boot has found.
func (a *Applier) begin(from string, text []byte) (err error) {
	d := ownDocument{text: text}
	if from == source.State {
		d, err = a.own(text)
	} else {
		d.config, d.warnings, err = a.load(from, text)
	}
	if err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.config != nil {
		return nil // somebody was quicker, over the API
	}
	for _, w := range d.warnings {
		a.o.Log.Warn("configuration: " + w.String())
	}
	a.text, a.config = d.text, d.config
	if a.trial != nil {
		a.deadline = a.o.Now().Add(a.trial.Timeout)
		a.o.Log.Warn("this configuration is being tried: it is undone unless it is confirmed", "within", a.trial.Timeout, "tried by", a.trial.By)
	}
	if a.state {
		if err := a.storeBootConfig(cmp.Or(d.why, "found at boot: "+from), d.keep); err != nil {
			a.o.Log.Error("the configuration isn't kept on STATE: the next boot may begin with another", "err", err)
		}
	}
	return a.publish(nil)
}

// ownDocument is what a node runs with that has a STATE.
type ownDocument struct {
	text     []byte
	config   *config.Config
	warnings []config.Warning
	why      string // why it isn't the document as it is on STATE; "": it is
	keep     bool   // STATE keeps its document, which another release may read
}

// hadOne reports whether this node had a configuration, which may not be on STATE (persist: false).
func (a *Applier) hadOne() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	all, err := a.stored.history()
	return a.state && (err != nil || len(all) > 0)
}

// own reads the document on STATE. The node ran with it, and it must run again: in maintenance mode, anybody could give
// it another one. So fields of a newer release are put aside, and the newest document of the history takes the place of
// one that can't be read. A new system on trial doesn't do that: it goes, and the former one can read it. What any
// system on trial puts aside stays on STATE. The error is that of the document.
func (a *Applier) own(text []byte) (d ownDocument, err error) {
	d.text = text
	if d.config, d.warnings, err = config.Load(source.State, text); err == nil {
		return d, nil
	}
	all, _ := a.stored.history() // without it, there is only this one
	if a.o.Trial && !a.o.Back {
		all = nil
	}
	for i := len(all); i >= 0; i-- {
		if d = (ownDocument{text: text}); i < len(all) {
			d = ownDocument{text: all[i].Text, keep: true, why: fmt.Sprintf("version %d of the history, because the configuration can't be read", all[i].Version)}
		}
		if known, unknown, _ := config.Known(source.State, d.text); len(unknown) > 0 {
			d.keep = d.keep || a.o.Trial
			d.text, d.why = known, strings.TrimPrefix(d.why+"; ", "; ")+"without what this release doesn't know: "+strings.Join(unknown, ", ")
		}
		var e error
		if d.config, d.warnings, e = config.Load(source.State, d.text); e == nil {
			a.o.Log.Error("the configuration on STATE can't be used as it is", "used", d.why, "err", err)
			return d, nil
		}
	}
	return d, err
}

// storeBootConfig writes to STATE what this boot began with, if it isn't there. keep: STATE keeps what it has.
func (a *Applier) storeBootConfig(by string, keep bool) error {
	have, err := a.stored.read(filepath.Base(boot.ConfigFile))
	if err != nil {
		return err
	}
	if !keep && !bytes.Equal(have, a.text) {
		if err := a.commit(a.config, a.text); err != nil {
			return err
		}
	}
	all, err := a.stored.history()
	if err != nil {
		return err
	}
	if n := len(all); n == 0 || all[n-1].Digest != Digest(a.text) {
		entry := a.entry(Immediate, by, nil)
		entry.Summary = "as it was found"
		a.remember(entry, a.text)
	}
	a.forget()
	return nil
}

// NeedNetwork is for a source that isn't reached: the network starts, and the node waits.
func (a *Applier) NeedNetwork(ctx context.Context, d time.Duration) error {
	a.mu.Lock()
	_, err := Stages.Get(a.o.Store, StageID)
	if errors.Is(err, resource.ErrNotFound) {
		err = Stages.Put(a.o.Store.As(ID), StageID, Searching)
	}
	a.mu.Unlock()
	if err == nil && !sleep.For(ctx, d) {
		err = context.Cause(ctx)
	}
	return err
}

// maintain opens maintenance mode, in which anybody may give the node its
// configuration: never on a node that has one, however it looks for another. With Searching
// it closes it again: the node has had one, as a STATE says that came late.
func (a *Applier) maintain(stage Stage) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	was, err := Stages.Get(a.o.Store, StageID)
	if a.config != nil || stage == Searching && (err != nil || was.Spec != Maintenance) {
		return nil
	}
	return Stages.Put(a.o.Store.As(ID), StageID, stage)
}

// StateReady is for a STATE that came after the configuration: on a new disk the
// configuration is kept there; on a slow one, the one that is there is the node's
// own, with all changes since it was installed, and replaces the other. It is for
// the service disks to call each time it has mounted STATE.
func (a *Applier) StateReady() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.state {
		return nil
	}
	if err := a.settle(); err != nil {
		return err
	}
	keep := false
	own, err := a.stored.read(filepath.Base(boot.ConfigFile))
	if err != nil {
		return err
	}
	if own != nil && !bytes.Equal(own, a.text) {
		d, err := a.own(own)
		if err != nil {
			return fmt.Errorf("STATE came late, and its configuration is broken: %w", err)
		}
		a.o.Log.Warn("STATE came late: its configuration replaces the one that this boot began with")
		a.text, a.config, keep = d.text, d.config, d.keep
		if err := a.publish(nil); err != nil {
			return err
		}
	}
	if a.trial != nil {
		a.deadline = a.o.Now().Add(a.trial.Timeout)
		a.poke()
	}
	a.state = true
	return a.storeBootConfig("found at boot", keep)
}

// Text is the document as it was applied, with its comments: of a version in the
// history, or for 0 the current one.
func (a *Applier) Text(version uint64) ([]byte, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if version > 0 {
		return a.earlier(version)
	}
	if a.config == nil {
		return nil, ErrNoConfig
	}
	return a.text, nil
}

// History lists what was applied, newest first.
func (a *Applier) History() ([]Entry, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	all, err := a.stored.history()
	if err != nil {
		return nil, fmt.Errorf("read the history of the configuration: %w", err)
	}
	entries := make([]Entry, 0, len(all))
	found := false
	for i := len(all) - 1; i >= 0; i-- {
		e := all[i].Entry
		e.Current = !found && e.Digest == Digest(a.text)
		found = found || e.Current
		entries = append(entries, e)
	}
	return entries, nil
}

// Situation is the configuration's, beside its text.
func (a *Applier) Situation() Situation {
	entries, _ := a.History() // without it, there is no version to tell
	a.mu.Lock()
	defer a.mu.Unlock()
	s := Situation{Try: a.deadline}
	for _, e := range entries {
		if e.Current {
			s.Version = e.Version
		}
	}
	if staged, err := a.stored.read(stagedFile); err == nil {
		s.Staged = staged != nil
	}
	return s
}
