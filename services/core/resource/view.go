package resource

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
)

// view is the store as one controller may see it: its inputs and outputs to
// read, its outputs to write, in its own name. Reading what isn't declared would
// work today and miss the change tomorrow, so it is refused. Finalizers may also
// be set on inputs: that is what they are for.
type view struct {
	writer
	name    string
	inputs  []Input
	outputs []string
	log     *slog.Logger
}

func newView(store *Store, c Controller, log *slog.Logger) *view {
	return &view{
		writer:  writer{Store: store, owner: c.Name},
		name:    c.Name,
		inputs:  c.Inputs,
		outputs: c.Outputs,
		log:     slog.New(prefixed{log.Handler(), c.Name + ": "}),
	}
}

func (v *view) Log() *slog.Logger { return v.log }

func (v *view) reads(typ, id string) error {
	if slices.Contains(v.outputs, typ) {
		return nil
	}
	for _, in := range v.inputs {
		if in.Type == typ && (in.ID == "" || in.ID == id) {
			return nil
		}
	}
	what := typ
	if id != "" {
		what += " " + id
	}
	return fmt.Errorf("controller %s reads %s: %w", v.name, what, ErrUndeclared)
}

func (v *view) writes(typ string) error {
	if slices.Contains(v.outputs, typ) {
		return nil
	}
	return fmt.Errorf("controller %s writes %s: %w", v.name, typ, ErrUndeclared)
}

func (v *view) get(typ, namespace, id string) (Object[any], error) {
	if err := v.reads(typ, id); err != nil {
		return Object[any]{}, err
	}
	return v.writer.get(typ, namespace, id)
}

func (v *view) list(typ, namespace string) ([]Object[any], error) {
	if err := v.reads(typ, ""); err != nil {
		return nil, err
	}
	return v.writer.list(typ, namespace)
}

func (v *view) put(at target, spec any) error {
	if err := v.writes(at.typ); err != nil {
		return err
	}
	return v.writer.put(at, spec)
}

func (v *view) remove(at target) error {
	if err := v.writes(at.typ); err != nil {
		return err
	}
	return v.writer.remove(at)
}

func (v *view) finalizer(at target, name string, present bool) error {
	if err := v.reads(at.typ, at.id); err != nil {
		return err
	}
	return v.writer.finalizer(at, name, present)
}

// prefixed puts the controller's name before each message, as the lines of
// controller-runtime read (S-276).
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
