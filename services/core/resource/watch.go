package resource

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/sleep"
)

// EventKind is what happened to an object.
type EventKind int

const (
	Created EventKind = iota
	Updated           // spec or finalizers
	Deleted           // Object is what was told of it last
	Present           // it was there when the watch began
	Synced            // all objects that were there have been sent; no Object
)

func (k EventKind) String() string {
	return [...]string{"created", "updated", "deleted", "present", "synced"}[k]
}

// Event is a change, with the object as it is after it.
type Event struct {
	Kind   EventKind
	Object Object[any]
}

// Watch tells that objects of these types have changed, and at first that there are some, until
// ctx ends; then the channel is closed. Several changes may be one message: who gets it looks at
// the store.
func (s *Store) Watch(ctx context.Context, types ...string) <-chan struct{} {
	mark := make(chan struct{}, 1)
	inputs := lists.Of(types, func(typ string) Input { return Input{Type: typ} })
	stop := s.notify(inputs, mark)
	if slices.ContainsFunc(types, func(typ string) bool { return len(s.Objects(typ, "")) > 0 }) {
		sleep.Wake(mark)
	}
	context.AfterFunc(ctx, func() {
		stop()
		close(mark) // nobody writes to it any more
	})
	return mark
}

// Events returns the objects of a type that are there as Present, in the order of List, then
// Synced, and then every change, until ctx ends; then the channel is closed. namespace and id
// narrow it; "" is all. Who doesn't keep up never holds up the store: changes of one object
// merge, and it gets the last; what has gone meanwhile comes before what has changed.
func (s *Store) Events(ctx context.Context, typ, namespace, id string) <-chan Event {
	mark := make(chan struct{}, 1)
	stop := s.notify([]Input{{Type: typ, ID: id}}, mark)
	w := &watcher{store: s, typ: typ, namespace: namespace, id: id, told: map[key]Object[any]{}}
	w.round = w.objects()
	out := make(chan Event)
	go func() {
		defer close(out)
		defer stop()
		for {
			e, ok := w.next()
			if !ok {
				if sleep.Await(ctx, mark) != nil {
					return
				}
				continue
			}
			select {
			case out <- e:
			case <-ctx.Done():
				return
			}
		}
	}()
	return out
}

// watcher compares the objects with what it has told of them. So it keeps no changes, however late it is asked.
type watcher struct {
	store              *Store
	typ, namespace, id string        // "": all
	round              []Object[any] // what was there when it was looked at last, and whose turn is still to come
	synced             bool
	told               map[key]Object[any]
}

func (w *watcher) objects() []Object[any] {
	return slices.DeleteFunc(w.store.Objects(w.typ, w.namespace), func(o Object[any]) bool { return w.id != "" && o.ID != w.id })
}

// next is the next event; false: there is none now. What was never told of needn't be told deleted. All objects that
// are there get their turn before the first one is looked at again, however often that changes.
func (w *watcher) next() (Event, bool) {
	for again := false; ; again = true {
		for len(w.round) > 0 {
			o, err := w.store.get(w.typ, w.round[0].Namespace, w.round[0].ID)
			w.round = w.round[1:]
			if err != nil {
				continue // it has gone
			}
			switch old, known := w.told[key{o.Namespace, o.ID}]; {
			case !w.synced:
				return w.tell(Present, o), true
			case !known:
				return w.tell(Created, o), true
			case old.Version != o.Version || !old.Created.Equal(o.Created) || !slices.Equal(old.Finalizers, o.Finalizers):
				return w.tell(Updated, o), true
			}
		}
		if !w.synced {
			w.synced = true
			return Event{Kind: Synced}, true
		}
		if again {
			return Event{}, false
		}
		there, gone := w.objects(), maps.Clone(w.told)
		for _, o := range there {
			delete(gone, key{o.Namespace, o.ID})
		}
		for k, o := range gone { // they come first: others may have taken their place
			delete(w.told, k)
			return Event{Deleted, o}, true
		}
		w.round = there
	}
}

func (w *watcher) tell(kind EventKind, o Object[any]) Event {
	w.told[key{o.Namespace, o.ID}] = o
	return Event{kind, o}
}

// Until is the condition that an object is there and says what one waits for. It
// is a dag.Condition.
type Until struct {
	store *Store
	at    target
	text  string
	ok    func(spec any) bool
}

// When is the condition that object id is there, and that ok, unless nil, holds for its spec. text is what users read
// while they wait.
func (k *Kind[S]) When(s *Store, id string, text string, ok func(S) bool) *Until {
	return &Until{store: s, at: k.at(id), text: text, ok: func(spec any) bool {
		typed, _ := spec.(S)
		return ok == nil || ok(typed)
	}}
}

func (u *Until) String() string { return u.text }

// Wait returns nil once the condition holds, or ctx's error.
func (u *Until) Wait(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for range u.store.Watch(ctx, u.at.typ) {
		if u.Holds() {
			return nil
		}
	}
	return fmt.Errorf("wait for %s: %w", u.text, ctx.Err())
}

// Holds tells whether the condition holds now.
func (u *Until) Holds() bool {
	o, err := u.store.get(u.at.typ, u.at.namespace, u.at.id)
	return err == nil && u.ok(o.Spec)
}
