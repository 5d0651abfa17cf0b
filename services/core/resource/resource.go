// Package resource keeps the facts of a node and runs the controllers that make
// them so.
//
// A fact is an Object: namespace, type, ID, version, finalizers, and a
// spec that is a typed Go value. The Store holds them in memory, lets only their
// owner write, and lets anyone watch. A Controller names the types it reads and
// writes; the Runtime calls its Reconcile when an input changed, and again with
// backoff when it failed. Specs are immutable once stored: to change one, Put a
// new value.
package resource

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"time"

	"github.com/garboard-os/garboard/services/core/lists"
)

// What a caller may want to decide on. The errors that are returned wrap these
// and name the object.
var (
	ErrNotFound   = errors.New("not found")
	ErrOwned      = errors.New("belongs to another owner")
	ErrUndeclared = errors.New("not declared by the controller")
)

// IgnoreNotFound is for objects that another controller will publish: that change starts a
// controller again.
func IgnoreNotFound(err error) error {
	if errors.Is(err, ErrNotFound) {
		return nil
	}
	return err
}

// Phase is that of every object, for users: what is deleted is gone at once.
const Phase = "running"

// Meta is what an object is called, apart from what it says.
type Meta struct {
	Namespace  string
	Type       string // full plural name: StaticPods.kubernetes.garboard.dev
	ID         string
	Version    uint64   // grows by one on each change of the spec
	Finalizers []string // sorted; who cleans up after the object
	Owner      string   // the controller that writes it
	Created    time.Time
	// Troubled is since when the spec has had problems (Problems); zero: it has none.
	Troubled time.Time
}

// Object is a fact.
type Object[S any] struct {
	Meta
	Spec S
}

// Reader reads objects: the Store, a Writer, or a controller's View.
type Reader interface {
	get(typ, namespace, id string) (Object[any], error)
	list(typ, namespace string) ([]Object[any], error)
}

// Writer also writes them, in the name of one owner.
type Writer interface {
	Reader
	put(at target, spec any) error
	remove(at target) error
	finalizer(at target, name string) error
}

// View is what a controller's Reconcile gets: the types that the controller has
// declared, and its log.
type View interface {
	Reader
	Writer
	Log() *slog.Logger
	// Unchanged is ctx until an input has changed since the call of Reconcile began. It is for questions to
	// others that may take a while: a change mustn't wait for their end.
	Unchanged(ctx context.Context) (context.Context, context.CancelFunc)
}

// target says which object.
type target struct{ typ, namespace, id string }

// Kind is a registered type of objects whose spec is an S.
type Kind[S any] struct {
	definition *Definition
	namespace  string // "" is the default one, and all in List
}

// Define registers a type. It panics when one of its names is taken: packages
// define their kinds in variables, so that shows at the first start.
func Define[S any](d Definition) *Kind[S] {
	d.spec = reflect.TypeFor[S]()
	d.Columns = append(fieldColumns(d.spec), d.Columns...)
	return &Kind[S]{definition: register(d)}
}

// Type is the full plural name, for Input and Controller.Outputs.
func (k *Kind[S]) Type() string { return k.definition.Type }

// Definition is what Define was given.
func (k *Kind[S]) Definition() Definition { return *k.definition }

// In is the same kind, in another namespace than the default one.
func (k *Kind[S]) In(namespace string) *Kind[S] {
	return &Kind[S]{definition: k.definition, namespace: namespace}
}

func (k *Kind[S]) at(id string) target {
	return target{typ: k.definition.Type, namespace: cmp.Or(k.namespace, k.definition.Namespace), id: id}
}

// Get returns one object; the error wraps ErrNotFound if it isn't there. The
// spec is shared: look, don't touch.
func (k *Kind[S]) Get(r Reader, id string) (Object[S], error) {
	at := k.at(id)
	o, err := r.get(at.typ, at.namespace, at.id)
	if err != nil {
		return Object[S]{}, err
	}
	return typed[S](o), nil
}

// List returns the objects of the kind, of all namespaces unless the kind comes
// from In, sorted by namespace and ID. Listing what a controller hasn't declared
// is a mistake in the program, and panics.
func (k *Kind[S]) List(r Reader) []Object[S] {
	found, err := r.list(k.definition.Type, k.namespace)
	if err != nil {
		panic(err)
	}
	return lists.Of(found, typed[S])
}

// Put creates the object or gives it a new spec. Its version grows only when the
// spec differs (reflect.DeepEqual), so writing what is already there wakes
// nobody. From now on the spec must not be changed in place: the store couldn't
// tell. The error wraps ErrOwned.
func (k *Kind[S]) Put(w Writer, id string, spec S) error {
	return w.put(k.at(id), spec)
}

// Delete removes the object. Deleting what isn't there is no error.
func (k *Kind[S]) Delete(w Writer, id string) error {
	return w.remove(k.at(id))
}

// Replace makes these the objects of the kind in its namespace, by ID: it puts each of them,
// and deletes all others.
func (k *Kind[S]) Replace(w Writer, specs map[string]S) error {
	var errs []error
	for _, id := range slices.Sorted(maps.Keys(specs)) {
		errs = append(errs, k.Put(w, id, specs[id]))
	}
	for _, old := range k.In(k.at("").namespace).List(w) {
		if _, still := specs[old.ID]; !still {
			errs = append(errs, k.Delete(w, old.ID))
		}
	}
	return errors.Join(errs...)
}

// AddFinalizer notes on the object who cleans up after it. Not only the owner may do that.
func (k *Kind[S]) AddFinalizer(w Writer, id, name string) error {
	return w.finalizer(k.at(id), name)
}

// typed gives a stored object its Go type. Kinds with one name are one Kind, so
// the type holds.
func typed[S any](o Object[any]) Object[S] {
	spec, _ := o.Spec.(S) // a nil interface S is stored as nil
	return Object[S]{Meta: o.Meta, Spec: spec}
}
