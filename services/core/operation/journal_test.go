package operation

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/durationpb"
	"pgregory.net/rapid"
)

// running is the journal of an operation that runs.
func running(id string) *record {
	return &record{
		Format:    format,
		Operation: Operation{ID: id, Name: "reset", By: "jo", Began: time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC), State: Running, Steps: []Status{{ID: "first", What: "x", State: Done}, {ID: "last", What: "x", State: Running, Attempts: 1}}},
		Boots:     1, Unlocked: true,
		Events: []Event{{Cursor: 1<<bootShift + 1, Kind: Said, Text: "x"}},
	}
}

func encoded(t testing.TB, rec *record) []byte {
	t.Helper()
	data, err := json.Marshal(rec)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// Whatever lies in the directory, the node boots, goes on with what can be read, and
// leaves alone what a newer release has written.
func TestMalformedJournals(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.definitions = []Definition{planned("reset", n.noting("first"), n.noting("last"))}
		if err := os.MkdirAll(n.dir, 0o700); err != nil {
			t.Fatal(err)
		}
		good := running("reset-good")
		newer := running("reset-newer")
		newer.Format = format + 1
		wrong := func(change func(*record)) []byte {
			rec := running("reset-wrong")
			change(rec)
			return encoded(t, rec)
		}
		files := map[string][]byte{
			"reset-good.json":  encoded(t, good),
			"reset-newer.json": encoded(t, newer),
			"reset-a.json":     nil,
			"reset-b.json":     encoded(t, good)[:100],
			"reset-c.json":     []byte(strings.Repeat("[", 1<<20)),
			"reset-d.json":     make([]byte, maxJournal+1),
			"reset-e.json":     encoded(t, good), // of another one
			"reset-f.json":     wrong(func(r *record) { r.ID = "../../config" }),
			"reset-g.json":     wrong(func(r *record) { r.State = "flying" }),
			"reset-h.json":     wrong(func(r *record) { r.Steps = append(r.Steps, r.Steps...) }),
			"reset-i.json":     wrong(func(r *record) { r.State, r.Verdict = Undoing, Done }),
			"reset-j.json":     wrong(func(r *record) { r.Events = append(r.Events, r.Events...) }),
			".reset-good.123":  []byte("cut off"),
			"notes.txt":        []byte("somebody's"),
		}
		for name, data := range files {
			if err := os.WriteFile(filepath.Join(n.dir, name), data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Mkdir(filepath.Join(n.dir, "reset-dir.json"), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink("/proc/self/mem", filepath.Join(n.dir, "reset-link.json")); err != nil {
			t.Fatal(err)
		}
		n.boot()
		synctest.Wait()
		n.want("reset-good", Done, Done, Done)
		n.expect("last")
		n.start("reset") // and others can be begun
		synctest.Wait()
		n.halt()
		n.boot()
		defer n.halt()
		left := map[string]int{}
		entries, err := os.ReadDir(n.dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			left[filepath.Ext(e.Name())]++
			if strings.HasPrefix(e.Name(), ".") {
				t.Errorf("%s is left", e.Name())
			}
		}
		if diff := cmp.Diff(map[string]int{".json": 3, ".broken": keptBroken, ".txt": 1}, left); diff != "" {
			t.Errorf("files that are left (-want +got):\n%s", diff)
		}
		if data, err := os.ReadFile(filepath.Join(n.dir, "reset-newer.json")); err != nil || string(data) != string(files["reset-newer.json"]) {
			t.Errorf("the newer one is now %q, %v", data, err)
		}
	})
}

// What this release can't go on with has failed, and keeps nobody from anything.
func TestJournalsThatCannotBeGoneOnWith(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change func(*record)
		why    string
	}{
		"unknown operation": {func(r *record) { r.Name = "upgrade" }, `this release knows no operation "upgrade"`},
		"unknown step":      {func(r *record) { r.Steps[1].ID = "other" }, `this release knows no step "other"`},
		"two at once":       {func(r *record) { r.ID = "reset-b" }, "this node is running reset"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				n := newNode(t)
				slow := n.noting("last")
				slow.Run = func(context.Context, *Progress) error { time.Sleep(time.Second); return nil }
				n.definitions = []Definition{planned("reset", n.noting("first"), slow)}
				if err := os.MkdirAll(n.dir, 0o700); err != nil {
					t.Fatal(err)
				}
				first, second := running("reset-a"), running("reset-a")
				c.change(second)
				for _, rec := range []*record{first, second} {
					if err := (journals{dir: n.dir, file: boot.WriteFile}).write(rec); err != nil {
						t.Fatal(err)
					}
				}
				n.boot()
				defer n.halt()
				time.Sleep(time.Minute)
				o, err := n.r.Get(second.ID)
				if err != nil || o.State != Failed || !strings.Contains(o.Error, c.why) || o.Ended.IsZero() {
					t.Errorf("%+v, %v", o, err)
				}
				if first.ID != second.ID {
					n.want(first.ID, Done, Done, Done)
				}
				n.start("reset")
			})
		})
	}
}

// The last ones are remembered, over restarts too.
func TestFinishedOperationsAreForgotten(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.definitions = []Definition{planned("reset", n.noting("work"))}
		n.boot()
		var ids []string
		for range keptFinished + 5 {
			ids = append(ids, n.start("reset"))
			time.Sleep(time.Second)
		}
		for range 2 {
			var got []string
			all, err := n.r.List()
			if err != nil {
				t.Fatal(err)
			}
			for _, o := range all {
				got = append(got, o.ID)
			}
			if diff := cmp.Diff(ids[len(ids)-keptFinished:], got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			files, err := os.ReadDir(n.dir)
			if objects := Operations.List(n.store); err != nil || len(files) != keptFinished || len(objects) != keptFinished {
				t.Errorf("%d files, %d resources, %v", len(files), len(objects), err)
			}
			n.halt()
			n.boot()
		}
		n.halt()
	})
}

// What is written can be read, and is the same.
func TestJournalIsReadAsItWasWritten(t *testing.T) {
	t.Parallel()
	j := journals{dir: t.TempDir(), log: slog.New(slog.DiscardHandler), file: boot.WriteFile}
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.StringMatching(`[a-z0-9][a-z0-9-]{0,20}`)
		text := rapid.Map(rapid.String(), bounded)
		moment := rapid.Map(rapid.Int64Range(0, 1<<35), func(s int64) time.Time { return time.Unix(s, s).UTC() })
		rec := &record{Format: format, Boots: rapid.Uint64Range(1, maxBoots).Draw(t, "boots"), Arguments: rapid.SliceOfN(rapid.Byte(), 1, 100).Draw(t, "arguments")}
		rec.Operation = Operation{
			ID: name.Draw(t, "id"), Name: name.Draw(t, "name"), By: text.Draw(t, "by"), Error: text.Draw(t, "error"), Began: moment.Draw(t, "began"),
			State: rapid.SampledFrom([]State{Running, Done, Failed, Aborted}).Draw(t, "state"), Warnings: rapid.SliceOfN(text, 1, 5).Draw(t, "warnings"),
		}
		for _, id := range rapid.SliceOfNDistinct(name, 1, maxSteps, rapid.ID).Draw(t, "steps") {
			rec.Steps = append(rec.Steps, Status{
				ID: id, What: text.Draw(t, "what"), State: rapid.SampledFrom([]State{Pending, Done, Skipped, Failed, Undone}).Draw(t, "step"),
				Deadline: time.Duration(rapid.Int64().Draw(t, "deadline")), Attempts: rapid.IntRange(0, 9).Draw(t, "attempts"), Ended: moment.Draw(t, "ended"),
			})
		}
		cursor := uint64(0)
		for range rapid.IntRange(0, 20).Draw(t, "events") {
			cursor += rapid.Uint64Range(1, 1<<20).Draw(t, "cursor")
			rec.Events = append(rec.Events, Event{Cursor: cursor, Time: moment.Draw(t, "time"), Kind: Said, Text: text.Draw(t, "text")})
		}
		if err := j.write(rec); err != nil {
			t.Fatal(err)
		}
		got, err := j.load(rec.ID + journalSuffix)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(rec, got); diff != "" {
			t.Fatalf("(-want +got):\n%s", diff)
		}
	})
}

// FuzzJournal: nothing that lies on STATE does harm, or is taken for what it isn't.
func FuzzJournal(f *testing.F) {
	f.Add(encoded(f, running("reset-a")))
	undoing := running("reset-a")
	undoing.State, undoing.Verdict, undoing.Steps[1].State = Undoing, Aborted, Undoing
	f.Add(encoded(f, undoing))
	f.Add([]byte(`{"format":2,"id":7}`))
	f.Add([]byte(`{"format":1,"steps":[{}],"events":[{"cursor":18446744073709551615}],"boots":9223372036854775808}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		rec, err := decode(data)
		if err != nil {
			return
		}
		if err := rec.validate(); err != nil || strings.ContainsAny(rec.ID, "/.") || len(rec.Steps) == 0 {
			t.Fatalf("%+v is taken: %v", rec, err)
		}
		again, err := decode(encoded(t, rec))
		if err != nil {
			t.Fatalf("it can't be read again: %v", err)
		}
		if fmt.Sprint(again.Steps) != fmt.Sprint(rec.Steps) {
			t.Fatalf("%+v is read again as %+v", rec.Steps, again.Steps)
		}
		next := newExecution(&Runner{definitions: map[string]Definition{}}, rec)
		next.history.add(Event{Kind: Said})
		if last := next.history.events[len(next.history.events)-1]; len(rec.Events) > 0 && last.Cursor <= rec.Events[len(rec.Events)-1].Cursor && rec.Boots > rec.Events[len(rec.Events)-1].Cursor>>bootShift {
			t.Fatalf("event %d comes after %d", last.Cursor, rec.Events[len(rec.Events)-1].Cursor)
		}
	})
}

// A record has a message of the API as earlier releases have their arguments: with durations in nanoseconds. Former
// names of fields are read, and what a release doesn't know is left out.
func TestArgumentsAreMessages(t *testing.T) {
	t.Parallel()
	text, err := encode(&apiv1.RollbackSystemRequest{Force: true, DrainTimeout: durationpb.New(90 * time.Minute)})
	if want := `{"drainTimeout":5400000000000,"force":true}`; err != nil || string(text) != want {
		t.Fatalf("%s, %v, want %s", text, err, want)
	}
	a, err := Decode[apiv1.RollbackSystemRequest](Request{Arguments: text}, nil)
	if err != nil || !a.Force || a.DrainTimeout.AsDuration() != 90*time.Minute {
		t.Errorf("%v, %v", a, err)
	}
	b, err := Decode[apiv1.ConvertKubernetesRequest](Request{Arguments: []byte(`{"onlyKey":true,"later":[1]}`)}, map[string]string{"onlyKey": "removeInitializedKey"})
	if err != nil || !b.RemoveInitializedKey {
		t.Errorf("%v, %v", b, err)
	}
}
