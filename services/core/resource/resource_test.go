package resource

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

type podSpec struct {
	Image string
	Args  map[string]string
}

var (
	pods = Define[podSpec](Definition{
		Type: "TestPods.test.garboard.dev", Kind: "TestPod", Aliases: []string{"tp"}, Namespace: "controlplane",
		Columns: []Column{{Name: "IMAGE", Value: func(spec any) string { return spec.(podSpec).Image }}},
	})
	statuses = Define[bool](Definition{Type: "TestPodStatus.test.garboard.dev", Kind: "TestPodStatus", Namespace: "controlplane"})
	configs  = Define[*podSpec](Definition{Type: "TestConfigs.test.garboard.dev", Kind: "TestConfig", Namespace: "config"})
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestVersionGrowsOnlyWithTheSpec(t *testing.T) { // S-010
	s := NewStore()
	w := s.As("test")
	if _, err := pods.Get(s, "a"); !errors.Is(err, ErrNotFound) || !strings.Contains(err.Error(), "TestPods.test.garboard.dev controlplane/a") {
		t.Errorf("error: %v", err)
	}
	var created time.Time
	for _, step := range []struct {
		image   string
		version uint64
	}{{"one", 1}, {"one", 1}, {"two", 2}, {"one", 3}} {
		must(t, pods.Put(w, "a", podSpec{Image: step.image, Args: map[string]string{"k": "v"}}))
		got, err := pods.Get(s, "a")
		must(t, err)
		want := Object[podSpec]{
			Meta: Meta{Namespace: "controlplane", Type: pods.Type(), ID: "a", Version: step.version, Owner: "test", Created: created},
			Spec: podSpec{Image: step.image, Args: map[string]string{"k": "v"}},
		}
		if created.IsZero() { // it stays what it is
			created, want.Created = got.Created, got.Created
		}
		if diff := cmp.Diff(want, got); diff != "" || created.IsZero() {
			t.Errorf("created at %s: %s", created, diff)
		}
	}
}

func TestOnlyTheOwnerWrites(t *testing.T) {
	s := NewStore()
	must(t, pods.Put(s.As("test"), "a", podSpec{Image: "one"}))
	if err := pods.Put(s.As("other"), "a", podSpec{}); !errors.Is(err, ErrOwned) {
		t.Error(err)
	}
	if err := pods.Delete(s.As("other"), "a"); !errors.Is(err, ErrOwned) {
		t.Error(err)
	}
}

func TestFinalizersAreNoted(t *testing.T) {
	s := NewStore()
	owner, other := s.As("owner"), s.As("other")
	must(t, pods.Put(owner, "a", podSpec{}))
	must(t, pods.AddFinalizer(other, "a", `k8s.StaticPodStatus("a")`))
	must(t, pods.AddFinalizer(other, "a", "b"))
	must(t, pods.AddFinalizer(other, "a", "b"))
	o, err := pods.Get(s, "a")
	must(t, err)
	if !slices.Equal(o.Finalizers, []string{"b", `k8s.StaticPodStatus("a")`}) || o.Version != 1 {
		t.Errorf("%+v", o)
	}
	must(t, pods.Delete(owner, "a"))
	must(t, pods.Delete(owner, "a"))
	if _, err := pods.Get(s, "a"); !errors.Is(err, ErrNotFound) {
		t.Error(err)
	}
	if err := pods.AddFinalizer(other, "a", "c"); !errors.Is(err, ErrNotFound) {
		t.Error(err)
	}
}

func TestNamespaces(t *testing.T) { // S-264, S-265
	s := NewStore()
	w := s.As("test")
	extras := pods.In("extras")
	must(t, pods.Put(w, "b", podSpec{Image: "default"}))
	must(t, extras.Put(w, "b", podSpec{Image: "extra"}))
	must(t, extras.Put(w, "a", podSpec{}))
	var ids []string
	for _, o := range pods.List(s) {
		ids = append(ids, o.Namespace+"/"+o.ID)
	}
	if want := []string{"controlplane/b", "extras/a", "extras/b"}; !slices.Equal(ids, want) {
		t.Errorf("%v", ids)
	}
	if n := len(extras.List(s)); n != 2 {
		t.Errorf("%d extras", n)
	}
	if o, err := pods.Get(s, "b"); err != nil || o.Spec.Image != "default" {
		t.Errorf("%+v, %v", o, err)
	}
}

func TestS008TypesByAnyName(t *testing.T) {
	for _, name := range []string{"tp", "TP", "testpods", "TestPod", "TestPods.test.garboard.dev", "testpods.TEST.garboard.dev"} {
		if d, err := Resolve(name); err != nil || d.Type != pods.Type() {
			t.Errorf("%s: %v, %v", name, d.Type, err)
		}
	}
	_, err := Resolve("nonsense")
	if !errors.Is(err, ErrNotFound) || !strings.Contains(err.Error(), "testpods") {
		t.Error(err)
	}
	if all := Definitions(); len(all) != 5 || all[0].Type != Failures.Type() {
		t.Errorf("%v", all)
	}
	defer func() {
		if p := fmt.Sprint(recover()); !strings.Contains(p, `"tp" belongs to TestPods.test.garboard.dev`) {
			t.Error(p)
		}
	}()
	Define[int](Definition{Type: "Taken.test.garboard.dev", Kind: "Taken", Aliases: []string{"tp"}, Namespace: "x"})
}

func TestS009ColumnsAreFieldsOfTheSpec(t *testing.T) {
	type level string
	type spec struct {
		Ready   bool `column:"READY"`
		Hidden  string
		Level   level         `column:"LEVEL"`
		Count   uint64        `column:"COUNT"`
		Since   time.Time     `column:"SINCE"`
		Offset  time.Duration `column:"OFFSET"`
		Reasons []string      `column:"REASONS"`
	}
	kind := Define[spec](Definition{
		Type: "TestColumns.test.garboard.dev", Kind: "TestColumn", Namespace: "test",
		Columns: []Column{{Name: "MADE", Value: func(s any) string { return s.(spec).Hidden + "!" }}},
	})
	since := time.Date(2026, 5, 1, 12, 0, 0, 0, time.FixedZone("CEST", 7200))
	for _, test := range []struct {
		spec spec
		want []string
	}{
		{spec{}, []string{"false", "", "0", "", "0s", "", "!"}},
		{spec{true, "x", "info", 7, since, 1234567 * time.Nanosecond, []string{"a", "b"}}, []string{"true", "info", "7", "2026-05-01T10:00:00Z", "1.235ms", "a; b", "x!"}},
	} {
		var got []string
		for i, c := range kind.Definition().Columns {
			if want := []string{"READY", "LEVEL", "COUNT", "SINCE", "OFFSET", "REASONS", "MADE"}[i]; c.Name != want {
				t.Errorf("column %d is %s, want %s", i, c.Name, want)
			}
			got = append(got, c.Value(test.spec))
		}
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Error(diff)
		}
	}
}

func TestWhen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewStore()
		w := s.As("test")
		cond := configs.When(s, "node", "the configuration to have an image", func(c *podSpec) bool { return c.Image != "" })
		if cond.String() != "the configuration to have an image" {
			t.Error(cond)
		}
		done := make(chan error, 1)
		go func() { done <- cond.Wait(t.Context()) }()
		for _, c := range []*podSpec{{}, {Args: map[string]string{"a": ""}}} {
			must(t, configs.Put(w, "node", c))
			synctest.Wait()
			if len(done) > 0 {
				t.Fatalf("it came true: %v", <-done)
			}
		}
		must(t, configs.Put(w, "node", &podSpec{Image: "one"}))
		synctest.Wait()
		must(t, <-done)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := configs.When(s, "none", "none", nil).Wait(ctx); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

// A watcher that reads slowly, at random, ends up with what the store holds, and no event contradicts the one before.
func TestWatchTellsTheTruthHoweverSlow(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := NewStore()
		w := s.As("test")
		watch := &watcher{store: s, typ: pods.Type(), synced: true, told: make(map[key]Object[any])}
		seen := make(map[string]Object[any])
		read := func() bool {
			e, ok := watch.next()
			if !ok {
				return false
			}
			before, known := seen[e.Object.ID]
			switch {
			case e.Kind == Created && known, e.Kind != Created && !known:
				t.Fatalf("%s %s after %+v", e.Kind, e.Object.ID, before)
			case e.Kind == Deleted:
				delete(seen, e.Object.ID)
			default:
				seen[e.Object.ID] = e.Object
			}
			return true
		}
		ids := []string{"a", "b", "c", "d"}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			id := rapid.SampledFrom(ids).Draw(t, "id")
			switch rapid.IntRange(0, 3).Draw(t, "do") {
			case 0, 1:
				if err := pods.Put(w, id, podSpec{Image: rapid.StringN(1, 1, 1).Draw(t, "image")}); err != nil {
					t.Fatal(err)
				}
			case 2:
				if err := pods.Delete(w, id); err != nil {
					t.Fatal(err)
				}
			case 3:
				read()
			}
		}
		for read() {
		}
		for _, o := range s.Objects(pods.Type(), "") {
			if diff := cmp.Diff(o, seen[o.ID]); diff != "" {
				t.Fatal(diff)
			}
			delete(seen, o.ID)
		}
		if len(seen) > 0 {
			t.Fatalf("seen, but gone: %v", seen)
		}
	})
}

func TestEventsTellWhereThePresentEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewStore()
		w := s.As("test")
		for _, id := range []string{"b", "a", "gone", "other"} {
			must(t, pods.Put(w, id, podSpec{Image: id}))
		}
		must(t, pods.In("elsewhere").Put(w, "a", podSpec{}))
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		events := s.Events(ctx, pods.Type(), "controlplane", "")
		synctest.Wait() // it offers the first one by now
		must(t, pods.Delete(w, "gone"))
		must(t, pods.Put(w, "b", podSpec{Image: "newer"}))
		must(t, pods.Put(w, "late", podSpec{}))
		must(t, pods.In("elsewhere").Put(w, "late", podSpec{}))
		var got []string
		for range 5 {
			e := <-events
			got = append(got, e.Kind.String()+" "+e.Object.ID+" "+image(e.Object.Spec))
		}
		want := []string{"present a a", "present b newer", "present other other", "synced  ", "created late "}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
		one := s.Events(ctx, pods.Type(), "", "nobody")
		if e := <-one; e.Kind != Synced {
			t.Errorf("nothing there: %+v", e)
		}
	})
}

// image of an event's spec; Synced has none.
func image(spec any) string {
	pod, _ := spec.(podSpec)
	return pod.Image
}

func TestEventsBeginWithWhatIsThere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewStore()
		w := s.As("test")
		must(t, pods.Put(w, "a", podSpec{}))
		ctx, cancel := context.WithCancel(t.Context())
		events := s.Events(ctx, pods.Type(), "", "")
		next := func(kind EventKind, id string) {
			t.Helper()
			if e := <-events; e.Kind != kind || e.Object.ID != id {
				t.Errorf("%s %s, want %s %s", e.Kind, e.Object.ID, kind, id)
			}
		}
		next(Present, "a")
		next(Synced, "")
		must(t, pods.Put(w, "b", podSpec{}))
		next(Created, "b")
		must(t, pods.Put(w, "a", podSpec{Image: "new"}))
		next(Updated, "a")
		must(t, pods.Delete(w, "b"))
		next(Deleted, "b")
		// Nobody reads, and no writer waits.
		for i := range 10_000 {
			must(t, pods.Put(w, "a", podSpec{Image: fmt.Sprint(i)}))
		}
		cancel()
		for range events {
		}
		synctest.Wait()
		if n := len(s.wakers); n != 0 {
			t.Errorf("%d watchers left", n)
		}
	})
}

// An object that changes before each look holds up no other.
func TestWatchTellsOfAllInTurn(t *testing.T) {
	t.Parallel()
	s := NewStore()
	w := s.As("test")
	watch := &watcher{store: s, typ: pods.Type(), synced: true, told: make(map[key]Object[any])}
	looks := 0
	for e := (Event{}); e.Object.ID != "b"; looks++ {
		must(t, pods.Put(w, "a", podSpec{Image: fmt.Sprint(looks)}))
		if looks == 1 {
			must(t, pods.Put(w, "b", podSpec{}))
		}
		if e, _ = watch.next(); looks > 5 {
			t.Fatal("b isn't told of")
		}
	}
}

func TestWatchTellsThatSomethingChanged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewStore()
		w := s.As("test")
		must(t, pods.Put(w, "a", podSpec{}))
		ctx, cancel := context.WithCancel(t.Context())
		both, none := s.Watch(ctx, pods.Type(), configs.Type()), s.Watch(ctx, configs.Type())
		if len(both) != 1 || len(none) != 0 {
			t.Errorf("%d and %d messages for what is there", len(both), len(none))
		}
		<-both
		for i := range 3 {
			must(t, pods.Put(w, "b", podSpec{Image: fmt.Sprint(i)}))
		}
		must(t, configs.Put(w, "node", &podSpec{}))
		if len(both) != 1 || len(none) != 1 {
			t.Errorf("%d and %d messages for changes", len(both), len(none))
		}
		cancel()
		for range both {
		}
		must(t, configs.Put(w, "node", &podSpec{Image: "later"}))
		synctest.Wait()
		if n := len(s.wakers); n != 0 {
			t.Errorf("%d watchers left", n)
		}
	})
}

// Writers race for one object; each write is one version, and none is lost.
func TestWritesUnderRace(t *testing.T) {
	s := NewStore()
	const writers, each = 8, 50
	done := make(chan int, writers)
	for i := range writers {
		go func() {
			w := s.As("test")
			wrote := 0
			for n := range each {
				if pods.Put(w, "n", podSpec{Image: fmt.Sprint(i, n)}) == nil {
					wrote++
				}
			}
			done <- wrote
		}()
	}
	deadline := time.After(time.Minute)
	total := 0
	for range writers {
		select {
		case n := <-done:
			total += n
		case <-deadline:
			t.Fatal("writers hang")
		}
	}
	o, err := pods.Get(s, "n")
	must(t, err)
	if total != writers*each || o.Version != uint64(total) {
		t.Errorf("%d writes, version %d", total, o.Version)
	}
}
