package resource

import (
	"context"
	"fmt"
	"log/slog"
	"slices"

	"github.com/garboard-os/garboard/services/core/sleep"
)

// view is the store as one controller may see it, in its own name.
type view struct {
	writer
	log  *slog.Logger
	mark chan struct{} // the runtime's: an input has changed
}

func newView(store *Store, c Controller, log *slog.Logger, mark chan struct{}) *view {
	return &view{
		writer: writer{Store: store, owner: c.Name, declared: &c},
		log:    slog.New(prefixed{log.Handler(), c.Name + ": "}),
		mark:   mark,
	}
}

func (v *view) Log() *slog.Logger { return v.log }

func (v *view) Unchanged(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		select {
		case <-v.mark:
			sleep.Wake(v.mark) // it is the runtime's
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}

// reads is why the writer may not read an object. Reading what a controller hasn't declared would work today and miss
// the change tomorrow, so it is refused. Finalizers may also be set on inputs: that is what they are for.
func (w *writer) reads(typ, id string) error {
	if w.declared == nil || slices.Contains(w.declared.Outputs, typ) {
		return nil
	}
	for _, in := range w.declared.Inputs {
		if in.Type == typ && (in.ID == "" || in.ID == id) {
			return nil
		}
	}
	what := typ
	if id != "" {
		what += " " + id
	}
	return fmt.Errorf("controller %s reads %s: %w", w.owner, what, ErrUndeclared)
}

func (w *writer) writes(typ string) error {
	if w.declared == nil || slices.Contains(w.declared.Outputs, typ) {
		return nil
	}
	return fmt.Errorf("controller %s writes %s: %w", w.owner, typ, ErrUndeclared)
}

func (w *writer) get(typ, namespace, id string) (Object[any], error) {
	if err := w.reads(typ, id); err != nil {
		return Object[any]{}, err
	}
	return w.Store.get(typ, namespace, id)
}

func (w *writer) list(typ, namespace string) ([]Object[any], error) {
	if err := w.reads(typ, ""); err != nil {
		return nil, err
	}
	return w.Store.list(typ, namespace)
}

// prefixed puts the controller's name before each message, as the lines of
// controller-runtime read.
type prefixed struct {
	slog.Handler
	prefix string
}

func (p prefixed) Handle(ctx context.Context, r slog.Record) error {
	r.Message = p.prefix + r.Message
	return p.Handler.Handle(ctx, r)
}

func (p prefixed) WithAttrs(attrs []slog.Attr) slog.Handler {
	return prefixed{p.Handler.WithAttrs(attrs), p.prefix}
}

func (p prefixed) WithGroup(name string) slog.Handler {
	return prefixed{p.Handler.WithGroup(name), p.prefix}
}
