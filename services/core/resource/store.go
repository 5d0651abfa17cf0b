package resource

import (
	"cmp"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/garboard-os/garboard/services/core/sleep"
)

// Store holds the objects of a node, in memory. It is a Reader; As makes a
// Writer. Its methods may be called from any goroutine.
type Store struct {
	// mu guards all following fields. Nothing blocks while it is held: watchers
	// and controllers are only marked as having work.
	mu      sync.RWMutex
	objects map[string]map[key]Object[any] // by type
	wakers  map[*waker]bool
}

// waker tells somebody who reads the store that an input has changed.
type waker struct {
	inputs []Input
	mark   chan<- struct{}
}

type key struct{ namespace, id string }

// NewStore returns an empty store.
func NewStore() *Store {
	return &Store{
		objects: make(map[string]map[key]Object[any]),
		wakers:  make(map[*waker]bool),
	}
}

// As returns a Writer whose objects belong to owner: nobody else changes them.
func (s *Store) As(owner string) Writer { return &writer{Store: s, owner: owner} }

type writer struct {
	*Store
	owner    string
	declared *Controller // nil: it isn't a controller's, and may see all
}

// Object returns one object of a type that is known by name only.
func (s *Store) Object(typ, namespace, id string) (Object[any], error) {
	return s.get(typ, namespace, id)
}

// Objects returns the objects of a type that is known by name only, sorted by
// namespace and ID; of all namespaces if namespace is "".
func (s *Store) Objects(typ, namespace string) []Object[any] {
	objects, _ := s.list(typ, namespace) // a store declares nothing to be violated
	return objects
}

func (s *Store) get(typ, namespace, id string) (Object[any], error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	o, ok := s.objects[typ][key{namespace, id}]
	if !ok {
		return Object[any]{}, fmt.Errorf("get %s %s/%s: %w", typ, namespace, id, ErrNotFound)
	}
	return o, nil
}

func (s *Store) list(typ, namespace string) ([]Object[any], error) {
	s.mu.RLock()
	found := slices.Collect(maps.Values(s.objects[typ]))
	s.mu.RUnlock()
	if namespace != "" {
		found = slices.DeleteFunc(found, func(o Object[any]) bool { return o.Namespace != namespace })
	}
	slices.SortFunc(found, func(a, b Object[any]) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.ID, b.ID))
	})
	return found, nil
}

// change calls do with an object, and whether it exists, while mu is held. refused is why the writer mustn't.
func (w *writer) change(at target, refused error, do func(o Object[any], exists bool) error) error {
	if refused != nil {
		return refused
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	o, exists := w.objects[at.typ][key{at.namespace, at.id}]
	return do(o, exists)
}

func (w *writer) put(at target, spec any) error {
	return w.change(at, w.writes(at.typ), func(o Object[any], exists bool) error {
		fail := func(err error) error { return fmt.Errorf("put %s %s/%s: %w", at.typ, at.namespace, at.id, err) }
		switch {
		case at.id == "":
			return fail(fmt.Errorf("no ID"))
		case exists && o.Owner != w.owner:
			return fail(fmt.Errorf("%q: %w, %q", w.owner, ErrOwned, o.Owner))
		case exists && reflect.DeepEqual(o.Spec, spec):
			return nil
		}
		if !exists {
			o.Meta = Meta{Namespace: at.namespace, Type: at.typ, ID: at.id, Owner: w.owner, Created: time.Now()}
		}
		o.Version++
		o.Spec = spec
		if len(Problems(spec)) == 0 {
			o.Troubled = time.Time{}
		} else if o.Troubled.IsZero() {
			o.Troubled = time.Now()
		}
		w.store(at, o)
		return nil
	})
}

func (w *writer) remove(at target) error {
	return w.change(at, w.writes(at.typ), func(o Object[any], exists bool) error {
		switch {
		case !exists:
			return nil
		case o.Owner != w.owner:
			return fmt.Errorf("delete %s %s/%s: %q: %w, %q", at.typ, at.namespace, at.id, w.owner, ErrOwned, o.Owner)
		}
		delete(w.objects[at.typ], key{at.namespace, at.id})
		w.changed(at)
		return nil
	})
}

func (w *writer) finalizer(at target, name string) error {
	return w.change(at, w.reads(at.typ, at.id), func(o Object[any], exists bool) error {
		i, has := slices.BinarySearch(o.Finalizers, name)
		switch {
		case !exists:
			return fmt.Errorf("add finalizer %s to %s %s/%s: %w", name, at.typ, at.namespace, at.id, ErrNotFound)
		case !has:
			o.Finalizers = slices.Insert(slices.Clone(o.Finalizers), i, name)
			w.store(at, o)
		}
		return nil
	})
}

// store stores a changed object. The caller holds mu.
func (s *Store) store(at target, o Object[any]) {
	if s.objects[at.typ] == nil {
		s.objects[at.typ] = make(map[key]Object[any])
	}
	s.objects[at.typ][key{at.namespace, at.id}] = o
	s.changed(at)
}

// changed marks those who want to know. The caller holds mu.
func (s *Store) changed(at target) {
	for w := range s.wakers {
		if slices.ContainsFunc(w.inputs, func(in Input) bool { return !in.Quiet && in.Type == at.typ && (in.ID == "" || in.ID == at.id) }) {
			sleep.Wake(w.mark)
		}
	}
}

// notify marks mark, which must have room for one, on each change of the inputs
// until the returned function is called.
func (s *Store) notify(inputs []Input, mark chan<- struct{}) (stop func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := &waker{inputs, mark}
	s.wakers[w] = true
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.wakers, w)
	}
}
