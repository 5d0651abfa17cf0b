package resource

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/sleep"
)

// EventKind is what happened to an object.
type EventKind int

const (
	Created EventKind = iota
	Updated           // spec or finalizers
	Deleted           // Object is what it was last
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
// merge, and it gets the last. So its queue is no longer than the objects that are, or that it
// was told of.
func (s *Store) Events(ctx context.Context, typ, namespace, id string) <-chan Event {
	w := &watcher{namespace: namespace, id: id, starting: true}
	w.pending, w.mark = make(map[key]Event), make(chan struct{}, 1)
	s.mu.Lock()
	present := slices.SortedFunc(maps.Keys(s.objects[typ]), func(a, b key) int {
		return cmp.Or(strings.Compare(a.namespace, b.namespace), strings.Compare(a.id, b.id))
	})
	for _, k := range present {
		w.add(k, Event{Kind: Created, Object: s.objects[typ][k]})
	}
	w.initial = len(w.order)
	stop := s.listen(typ, w.add)
	s.mu.Unlock()

	out := make(chan Event)
	go func() {
		defer close(out)
		defer func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			stop()
		}()
		w.deliver(ctx, out)
	}()
	return out
}

// watcher is the queue of one Watch.
type watcher struct {
	mark          chan struct{} // has one element while something may be pending
	namespace, id string        // "": all

	// mu guards all following fields.
	mu      sync.Mutex
	pending map[key]Event // not delivered yet, one per object
	order   []key         // of pending, oldest first
	// initial is how many of them were there at the start: they come first. starting is until
	// Synced was delivered.
	initial  int
	starting bool
}

// add merges an event into what is pending for its object. What the watcher
// will never have seen, it needn't see deleted.
func (w *watcher) add(k key, e Event) {
	if w.namespace != "" && w.namespace != k.namespace || w.id != "" && w.id != k.id {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	before, pending := w.pending[k]
	switch {
	case !pending:
		w.order = append(w.order, k)
	case before.Kind == Created && e.Kind == Deleted:
		w.drop(k)
		return
	case before.Kind == Created:
		e.Kind = Created
	case before.Kind == Deleted:
		e.Kind = Updated // created again
	}
	w.pending[k] = e
	sleep.Wake(w.mark)
}

// drop forgets a pending event. The caller holds mu.
func (w *watcher) drop(k key) {
	delete(w.pending, k)
	i := slices.Index(w.order, k)
	w.order = slices.Delete(w.order, i, i+1)
	if i < w.initial {
		w.initial--
		sleep.Wake(w.mark) // it may be what completes the beginning
	}
}

func (w *watcher) next() (Event, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.starting && w.initial == 0 {
		w.starting = false
		return Event{Kind: Synced}, true
	}
	if len(w.order) == 0 {
		return Event{}, false
	}
	k := w.order[0]
	w.order = w.order[1:]
	e := w.pending[k]
	delete(w.pending, k)
	if w.initial > 0 {
		w.initial--
		e.Kind = Present
	}
	return e, true
}

func (w *watcher) deliver(ctx context.Context, out chan<- Event) {
	for {
		e, ok := w.next()
		if !ok {
			select {
			case <-w.mark:
				continue
			case <-ctx.Done():
				return
			}
		}
		select {
		case out <- e:
		case <-ctx.Done():
			return
		}
	}
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
	mark := make(chan struct{}, 1)
	stop := u.store.notify([]Input{{Type: u.at.typ, ID: u.at.id}}, mark)
	defer stop()
	for {
		if u.Holds() {
			return nil
		}
		if err := sleep.Await(ctx, mark); err != nil {
			return fmt.Errorf("wait for %s: %w", u.text, err)
		}
	}
}

// Holds tells whether the condition holds now.
func (u *Until) Holds() bool {
	o, err := u.store.get(u.at.typ, u.at.namespace, u.at.id)
	return err == nil && u.ok(o.Spec)
}
