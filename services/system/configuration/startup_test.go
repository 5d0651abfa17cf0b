package configuration

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/source"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
)

// S-037: a change that comes before STATE is mounted is refused in every mode, also when it is
// to wait for a reboot: the next boot would not have it. As soon as STATE is mounted, the node
// takes changes, whatever its boot still waits for.
func TestS037ChangesBeforeState(t *testing.T) {
	base, store := document(t), resource.NewStore()
	a := NewApplier(ApplierOptions{
		Store: store, StateDir: t.TempDir(), Log: slog.New(slog.DiscardHandler),
		Reboot: func(why string) { t.Errorf("a reboot: %s", why) },
	})
	if err := a.begin("medium", with(base, "one")); err != nil {
		t.Fatal(err)
	}
	hostname := func() string {
		t.Helper()
		c, err := Config(store)
		if err != nil {
			t.Fatal(err)
		}
		return c.Machine.Network.Hostname
	}
	for _, mode := range []Mode{Auto, Immediate, OnReboot, Reboot, Try} {
		_, err := a.Apply(t.Context(), Request{Text: with(base, "two"), Mode: mode})
		if !errors.Is(err, ErrBusy) || !strings.Contains(err.Error(), "STATE isn't mounted yet") {
			t.Errorf("mode %s before STATE: %v", mode, err)
		}
	}
	if files, err := os.ReadDir(a.o.StateDir); err != nil || len(files) > 0 || hostname() != "one" {
		t.Errorf("refused changes have left %v, %v, hostname %s", files, err, hostname())
	}

	if err := a.StateReady(); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Apply(t.Context(), Request{Text: with(base, "two"), Mode: Auto}); err != nil || hostname() != "two" {
		t.Errorf("with STATE: %v, hostname %s", err, hostname())
	}
	if _, err := a.Apply(t.Context(), Request{Text: with(base, "three"), Mode: OnReboot}); err != nil || !a.Situation().Staged {
		t.Errorf("staged with STATE: %v", err)
	}
	kept, err := os.ReadFile(a.stored.config())
	if err != nil || !strings.Contains(string(kept), "hostname: two") {
		t.Errorf("STATE has %q, %v", kept, err)
	}
}

// A node whose document is damaged runs again with the newest one of its history. In maintenance mode, anybody could
// give it another one.
func TestDamagedConfiguration(t *testing.T) {
	start(t, func(p *power, base []byte) {
		for version, text := range map[uint64][]byte{7: with(base, "older"), 8: with(base, "kept"), 9: []byte("version: v9\n")} {
			entry, err := json.Marshal(historyEntry{Entry: Entry{Version: version}, Text: text})
			if err == nil {
				err = boot.WriteFile(p.stored.path(p.stored.entryPath(version)), entry, storeMode)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		p.off()
		if err := boot.WriteFile(p.stored.config(), []byte("machine: {"), storeMode); err != nil {
			t.Fatal(err)
		}
		p.on(nil)
		if p.hostname() != "kept" || p.onDisk() != "machine: {" {
			t.Errorf("hostname %q; on STATE:\n%s", p.hostname(), p.onDisk())
		}
		all, err := p.stored.history()
		if err != nil || len(all) == 0 || all[len(all)-1].By != "version 8 of the history, because the configuration can't be read" {
			t.Errorf("%+v, %v", all, err)
		}

		// A new system goes instead, and leaves all to the former one.
		a := NewApplier(ApplierOptions{Trial: true, Store: resource.NewStore(), StateDir: p.stored.dir, Log: slog.New(slog.DiscardHandler)})
		if err := a.begin(source.State, []byte("machine: {")); err == nil {
			t.Error("it has used another one")
		}
		// One that a rollback goes back to must run, and leaves the document, too.
		a = NewApplier(ApplierOptions{Trial: true, Back: true, Store: resource.NewStore(), StateDir: p.stored.dir, Log: slog.New(slog.DiscardHandler)})
		if err := errors.Join(a.stateFound(), a.begin(source.State, []byte("machine: {"))); err != nil || a.config.Machine.Network.Hostname != "kept" || p.onDisk() != "machine: {" {
			t.Errorf("%v; on STATE:\n%s", err, p.onDisk())
		}
	})
}

// Who gives a machine its first configuration hears what comes onto which disk, or why that can't be.
func TestPlanOfAnInstallation(t *testing.T) {
	var refused error
	a := NewApplier(ApplierOptions{
		Store: resource.NewStore(), StateDir: t.TempDir(), Log: slog.New(slog.DiscardHandler),
		Place: func(i config.Install) (string, error) { return "the system comes onto " + i.Disk, refused },
	})
	for _, want := range []string{"the system comes onto /dev/vda", "disk /dev/vda holds photos"} {
		res, err := a.Apply(t.Context(), Request{Text: document(t), First: true, DryRun: true})
		if err != nil || len(res.Warnings) != 1 || res.Warnings[0].What != want {
			t.Errorf("%+v, %v, want %q", res.Warnings, err, want)
		}
		refused = errors.New("disk /dev/vda holds photos")
	}
}

// A file that is lying around, and takes unsigned systems, is given to a machine in maintenance mode: nobody asked for
// such a system now.
func TestUnsignedSystemNeedsLeave(t *testing.T) {
	plain := document(t)
	text := bytes.Replace(plain, []byte("disk: /dev/vda\n"), []byte("disk: /dev/vda\n    unsigned: true\n"), 1)
	for _, tc := range []struct {
		what  string
		r     Request
		taken bool
	}{
		{"a stranger", Request{Text: text, First: true}, false},
		{"a stranger, to look only", Request{Text: text, First: true, DryRun: true}, false},
		{"a stranger who says so", Request{Text: text, First: true, Unsigned: true}, true},
		{"a stranger with a file without it", Request{Text: plain, First: true}, true},
		{"an administrator of a node", Request{Text: text}, true},
	} {
		a := NewApplier(ApplierOptions{Store: resource.NewStore(), StateDir: t.TempDir(), Log: slog.New(slog.DiscardHandler)})
		_, err := a.Apply(t.Context(), tc.r)
		if tc.taken && err != nil || !tc.taken && (!errors.Is(err, ErrUnsigned) || a.config != nil) {
			t.Errorf("%s: %v", tc.what, err)
		}
	}
}

// Who changes a configuration hears what the node can't do of it; it is applied all the same.
func TestWhatANodeCantDo(t *testing.T) {
	a := NewApplier(ApplierOptions{
		Store: resource.NewStore(), StateDir: t.TempDir(), Log: slog.New(slog.DiscardHandler),
		Unable: func(c *config.Config) string { return c.Machine.Network.Hostname },
	})
	for name, want := range map[string]int{"": 0, "unable": 1} {
		res, err := a.Apply(t.Context(), Request{Text: with(document(t), name), DryRun: true})
		if err != nil || len(res.Warnings) != want || want > 0 && res.Warnings[0].What != name {
			t.Errorf("%q: %+v, %v", name, res.Warnings, err)
		}
	}
}

// A bad sector below the document on STATE doesn't open maintenance mode: a directory can't be read, either.
func TestUnreadableConfiguration(t *testing.T) {
	base := document(t)
	dir := t.TempDir()
	unreadable := source.Source{Name: source.State, Read: func(context.Context) ([]byte, error) { return os.ReadFile(filepath.Join(dir, "config.yaml")) }}
	find := func() (from string, a *Applier, known facts, err error) {
		a = NewApplier(ApplierOptions{Store: resource.NewStore(), StateDir: dir, Log: slog.New(slog.DiscardHandler)})
		from, known, err = Options{Applier: a, MountState: func(context.Context) (State, error) { return StateMounted, nil }, Sources: []source.Source{unreadable}}.find(t.Context())
		return from, a, known, err
	}
	_, a, _, _ := find()
	if err := os.Mkdir(a.stored.config(), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, _, known, err := find(); known.text != textLost || err == nil || !strings.Contains(err.Error(), "is a directory") {
		t.Errorf("without a history: %v", err)
	}
	entry, err := json.Marshal(historyEntry{Entry: Entry{Version: 1}, Text: with(base, "kept")})
	if err == nil {
		err = os.MkdirAll(filepath.Dir(a.stored.path(a.stored.entryPath(1))), 0o700)
	}
	if err == nil {
		err = boot.WriteFile(a.stored.path(a.stored.entryPath(1)), entry, storeMode)
	}
	if err != nil {
		t.Fatal(err)
	}
	from, a, _, err := find()
	if err != nil || from != source.State || a.config.Machine.Network.Hostname != "kept" {
		t.Errorf("%q, %v", from, err)
	}
}

// After a rollback, the older release does without fields that it doesn't know. The newer one finds them in the
// history.
func TestFieldsOfANewerRelease(t *testing.T) {
	start(t, func(p *power, base []byte) {
		newer := append(bytes.Replace(with(base, "newer"), []byte("machine:\n"), []byte("machine:\n  # It must be cold.\n  cooling: {fans: 2}\n"), 1), "later: yes\n"...)
		entry, err := json.Marshal(historyEntry{Entry: Entry{Version: 9}, Text: newer})
		if err != nil {
			t.Fatal(err)
		}
		p.off()
		for path, text := range map[string][]byte{p.stored.config(): newer, p.stored.path(p.stored.entryPath(9)): entry} {
			if err := boot.WriteFile(path, text, storeMode); err != nil {
				t.Fatal(err)
			}
		}
		p.on(nil)
		if p.hostname() != "newer" {
			t.Fatalf("hostname %q", p.hostname())
		}
		if disk := p.onDisk(); strings.Contains(disk, "cooling") || strings.Contains(disk, "later") || !strings.Contains(disk, "newer") {
			t.Errorf("on STATE:\n%s", disk)
		}
		all, err := p.stored.history()
		if err != nil || len(all) < 2 {
			t.Fatalf("%+v, %v", all, err)
		}
		if last := all[len(all)-1]; last.By != "without what this release doesn't know: later, machine.cooling" {
			t.Errorf("%+v", last)
		}
		if before := all[len(all)-2]; before.Version != 9 || !bytes.Equal(before.Text, newer) {
			t.Errorf("%+v", before)
		}

		// A new system on trial does without them, too, and leaves them to the former one.
		if err := boot.WriteFile(p.stored.config(), newer, storeMode); err != nil {
			t.Fatal(err)
		}
		trial := NewApplier(ApplierOptions{Trial: true, Store: resource.NewStore(), StateDir: p.stored.dir, Log: slog.New(slog.DiscardHandler)})
		err = errors.Join(trial.stateFound(), trial.begin(source.State, newer))
		if err != nil || trial.config.Machine.Network.Hostname != "newer" || p.onDisk() != string(newer) {
			t.Errorf("%v; on STATE:\n%s", err, p.onDisk())
		}

		// What can't be left out isn't guessed.
		a := NewApplier(ApplierOptions{Store: resource.NewStore(), StateDir: t.TempDir(), Log: slog.New(slog.DiscardHandler)})
		err = a.begin(source.State, bytes.Replace(newer, []byte("version: v1alpha1"), []byte("version: v9"), 1))
		if err == nil || !strings.Contains(err.Error(), `"v9" is not known`) {
			t.Errorf("a document of another version: %v", err)
		}
	})
}

// S-021: STATE has no document of a configuration that isn't kept, and whoever comes by doesn't become its
// administrator while the source has an error.
func TestS021NothingIsKept(t *testing.T) {
	start(t, func(p *power, base []byte) {
		kept := func() (documents int) {
			all, err := p.stored.history()
			if err != nil || len(all) == 0 {
				t.Fatal(len(all), err)
			}
			for _, e := range all {
				if e.Text != nil {
					documents++
				}
			}
			return documents
		}
		p.must(Request{Text: with(base, "two")})
		p.must(Request{Text: unkept(with(base, "three")), Mode: Try})
		if kept() == 0 {
			t.Error("what may come back isn't kept")
		}
		if err := p.Confirm(t.Context(), "test"); err != nil {
			t.Fatal(err)
		}
		if n := kept(); n > 0 {
			t.Errorf("%d documents after the confirmation", n)
		}
		p.must(Request{Text: unkept(with(base, "four"))})
		if _, err := p.Rollback(t.Context(), 0, Request{}); err == nil || !strings.Contains(err.Error(), "persist: false") {
			t.Errorf("rolled back to a document that isn't kept: %v", err)
		}
		if n := kept(); n > 0 {
			t.Errorf("%d documents after a change", n)
		}
		p.off()
		p.on(unkept(with(base, "five")))
		if n := kept(); n > 0 || p.hostname() != "five" {
			t.Errorf("%d documents after a boot of %s", n, p.hostname())
		}

		late := false
		find := func(document []byte, failed error) (open bool, err error) {
			mounted := !late
			a := NewApplier(ApplierOptions{Store: resource.NewStore(), StateDir: p.dir, Log: slog.New(slog.DiscardHandler)})
			medium := source.Source{Name: "medium", Read: func(context.Context) ([]byte, error) { return document, failed }}
			mount := func(context.Context) (was State, _ error) {
				if mounted {
					was = StateMounted
				}
				mounted = true
				return was, nil
			}
			_, known, err := Options{Applier: a, MountState: mount, Sources: []source.Source{medium}}.find(t.Context())
			open, _ = mayOpenMaintenance(known)
			return open, err
		}
		if open, err := find(nil, errors.New("its server is down")); open || err == nil {
			t.Errorf("a source that fails: %v", err)
		}
		late = true
		if open, err := find(nil, errors.New("its server is down")); open || err == nil {
			t.Errorf("a source that fails before STATE is there: %v", err)
		}
		if open, err := find([]byte("machine: {"), nil); open || err == nil {
			t.Errorf("a source with a broken document: %v", err)
		}
		if open, err := find(nil, boot.ErrNone); !open || !errors.Is(err, boot.ErrNone) {
			t.Errorf("no source: %v", err)
		}
	})
}
